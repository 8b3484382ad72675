"""``gmpo``: the geometric mean of clipped ratios."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from mantissa.algorithms.losses.base import Around, TokenLoss, bounded_ratio
from mantissa.base.config import Refusals
from mantissa.precision import masked_sum


class GMPOConfig(TokenLoss):
    """``-w * A * exp(mean_t c_t)``: log-ratios c are clipped token by token, then averaged over the sequence.

    arXiv 2507.20673, equation 4. ``c_t = min(x, clip(x, -clip_low, clip_high))`` of x = log ratio where A > 0, and
    ``max`` of the two where A < 0: as in ``ppo_clip`` a bound holds only what has gone far in the advantage's own
    direction, and such a token has no gradient. The bounds are on the *logarithm*: published 0.4 to both sides.

    As in ``gspo`` a token's loss is the sequence's term with the gradient through that token's own logp, so that with
    ``seq_mean_token_mean`` and one weight a sequence the sum is the published form. The mean is taken in float64;
    rejection by token would make it another sequence's, and is refused.
    """

    kind: Literal["gmpo"] = Field("gmpo", description="Geometric mean of ratios that are clipped token by token.")
    clip_low: float = Field(0.4, gt=0, description="A log-ratio below -clip_low gains nothing by falling further.")
    clip_high: float = Field(0.4, gt=0, description="A log-ratio above clip_high gains nothing by rising further.")

    by_token = False
    source = "arXiv 2507.20673, equation 4"
    implies = {"aggregation": "seq_mean_token_mean"}  # noqa: RUF012 - read by the class alone, never changed
    of_sequences = True
    verl_mode = "geo_mean"
    verl_keys = {"clip_low": "actor.clip_ratio_low", "clip_high": "actor.clip_ratio_high"}  # noqa: RUF012 - never changed

    @property
    def clip_by_token(self) -> bool:
        return True

    def refusals(self, algorithm: Around) -> Refusals:
        yield (
            algorithm.correction.reject_unit == "token",
            "loss=gmpo has one mean for a whole sequence, and correction.reject_unit=token would take tokens out of "
            "it; reject by sequence_sum, sequence_mean or sequence_max",
        )

    def of_tokens(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        sign = advantage_BT.sign().double()
        x = logp_BT.detach().double() - old_logp_BT.double()  # exact
        held = sign * x > sign * x.clamp(-self.clip_low, self.clip_high)
        clipped = torch.where(held, x.clamp(-self.clip_low, self.clip_high), x)
        known = torch.where(x.isfinite(), clipped, torch.nan)  # no clip makes a number of what is unknown
        mean_B1 = masked_sum(known, mask_BT, -1).unsqueeze(-1) / mask_BT.sum(-1, keepdim=True).clamp(min=1)
        # The value is the mean alone (logp less itself is 0); the gradient is this token's, none where it is held.
        through = torch.where(held, torch.zeros_like(logp_BT), logp_BT - logp_BT.detach())
        return -weight_BT * bounded_ratio(mean_B1.to(logp_BT.dtype) + through) * advantage_BT, held
