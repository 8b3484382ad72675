"""``cispo``: the policy gradient, weighted by the bounded ratio."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from mantissa.algorithms.losses.base import TokenLoss, bounded_ratio


class CISPOConfig(TokenLoss):
    """``-w * stopgrad(min(ratio, 1 + clip_high)) * A * logp``: every token keeps its gradient.

    arXiv 2506.13585, section 3.1. Clipped where ratio > 1 + clip_high, whatever A: that bounds the weight of a token
    and never takes its gradient.
    """

    kind: Literal["cispo"] = Field("cispo", description="Policy gradient, weighted by the ratio bounded from above.")
    clip_high: float = Field(0.28, gt=0, description="1 + clip_high is the largest weight; there is no smallest.")

    source = "arXiv 2506.13585, section 3.1"
    verl_mode = "cispo"

    def of_tokens(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        ratio = bounded_ratio(logp_BT.detach() - old_logp_BT)
        bounded = ratio.clamp(max=1 + self.clip_high)
        return -weight_BT * bounded * advantage_BT * logp_BT, ratio > bounded
