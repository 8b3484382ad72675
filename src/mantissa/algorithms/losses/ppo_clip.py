"""``ppo_clip``: the clipped ratio."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from mantissa.algorithms.losses.base import TokenLoss, clipped_surrogate


class PPOClipConfig(TokenLoss):
    """``-w * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`` (arXiv 1707.06347, equation 7).

    Clipped where A > 0 and ratio > 1 + high, or A < 0 and ratio < 1 - low: such a token has no gradient.
    """

    kind: Literal["ppo_clip"] = Field("ppo_clip", description="Clipped ratio of the current to the old policy.")
    clip_low: float = Field(0.2, gt=0, le=1, description="Below 1 - clip_low a ratio gains nothing by falling further.")
    clip_high: float = Field(0.2, gt=0, description="Above 1 + clip_high a ratio gains nothing by rising further.")

    source = "arXiv 1707.06347, equation 7"
    verl_mode = "vanilla"
    verl_keys = {"clip_low": "actor.clip_ratio_low", "clip_high": "actor.clip_ratio_high"}  # noqa: RUF012 - never changed

    def of_tokens(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        surrogate, held = clipped_surrogate(logp_BT - old_logp_BT, advantage_BT, self.clip_low, self.clip_high)
        return -weight_BT * surrogate, held
