"""``gspo``: the clipped ratio of whole sequences."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from mantissa.algorithms.losses.base import Around, TokenLoss, clipped_surrogate
from mantissa.base.config import Refusals
from mantissa.precision import masked_sum


class GSPOConfig(TokenLoss):
    """``-w * min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)`` with s = exp(mean over tokens of log ratio).

    arXiv 2507.18071, section 4.1. Its derivative is s * mean_t d logp, so a token's loss is the sequence's term with
    the gradient through that token's own logp (GSPO-token, section 4.3, which allows each token an advantage, and so a
    weight); summed over a sequence of one scale and weight that is section 4.1. Tokens that rejection took out of the
    mask would leave the mean, and the ratio would be that of another sequence: rejection by token is refused. The clip
    is 7e-4 wide, so the mean is taken in float64.
    """

    kind: Literal["gspo"] = Field("gspo", description="Clipped ratio of whole sequences, by the token.")
    clip_low: float = Field(3e-4, gt=0, le=1, description="Below 1 - clip_low a ratio gains nothing by falling.")
    clip_high: float = Field(4e-4, gt=0, description="Above 1 + clip_high a ratio gains nothing by rising.")

    by_token = False
    source = "arXiv 2507.18071, sections 4.1 and 4.3"
    implies = {"aggregation": "seq_mean_token_mean"}  # noqa: RUF012 - read by the class alone, never changed
    of_sequences = True
    verl_mode = "gspo"
    verl_keys = {"clip_low": "actor.clip_ratio_low", "clip_high": "actor.clip_ratio_high"}  # noqa: RUF012 - never changed

    def refusals(self, algorithm: Around) -> Refusals:
        yield (
            algorithm.correction.reject_unit == "token",
            "loss=gspo has one ratio for a whole sequence, and correction.reject_unit=token would take tokens out of "
            "it; reject by sequence_sum, sequence_mean or sequence_max",
        )

    def of_tokens(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        difference = logp_BT.detach().double() - old_logp_BT.double()  # exact
        mean_B1 = masked_sum(difference, mask_BT, -1).unsqueeze(-1) / mask_BT.sum(-1, keepdim=True).clamp(min=1)
        # The value is the mean alone (logp less itself is 0); the gradient is this token's, and none beyond the clamp.
        log_ratio_BT = mean_B1.to(logp_BT.dtype) + (logp_BT - logp_BT.detach())
        surrogate, held = clipped_surrogate(log_ratio_BT, advantage_BT, self.clip_low, self.clip_high)
        return -weight_BT * surrogate, held
