"""``cispo``: the policy gradient, weighted by the bounded ratio."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from mantissa.algorithms.losses.base import TokenLoss, bounded_ratio


class CISPOConfig(TokenLoss):
    """``-w * stopgrad(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logp``: every token keeps its gradient.

    arXiv 2506.13585, section 3.1, which uses no lower bound: ``clip_low`` 1 is that, for a ratio is above 0. verl
    bounds to both sides, at 0.2 where nothing is said. Clipped where the ratio is outside of the bounds, whatever A:
    that bounds the weight of a token and never takes its gradient.
    """

    kind: Literal["cispo"] = Field("cispo", description="Policy gradient, weighted by the ratio bounded from above.")
    clip_low: float = Field(1.0, gt=0, le=1, description="1 - clip_low is the smallest weight; 1 bounds nothing.")
    clip_high: float = Field(0.28, gt=0, description="1 + clip_high is the largest weight.")

    source = "arXiv 2506.13585, section 3.1"
    verl_mode = "cispo"
    verl_keys = {"clip_low": "actor.clip_ratio_low", "clip_high": "actor.clip_ratio_high"}  # noqa: RUF012 - never changed

    def of_tokens(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        ratio = bounded_ratio(logp_BT.detach() - old_logp_BT)
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight_BT * bounded * advantage_BT * logp_BT, (ratio < bounded) | (ratio > bounded)
