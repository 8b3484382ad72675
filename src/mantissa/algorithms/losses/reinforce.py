"""``reinforce``: the policy gradient with detached importance weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from torch import Tensor

from mantissa.algorithms.losses.base import TokenLoss
from mantissa.base.config import Refusals

if TYPE_CHECKING:
    from mantissa.algorithms.config import AlgorithmConfig


class ReinforceConfig(TokenLoss):
    """``-w * A * logp``: no ratio, no clip; meant for few optimiser steps a batch, with a correction.

    Williams 1992; with sequence weights it is PG-IS of arXiv 2510.26788. Its w is of the current policy over the
    rollout's, made anew for each micro-batch.
    """

    kind: Literal["reinforce"] = Field("reinforce", description="Policy gradient with detached importance weights.")

    source = "Williams 1992; PG-IS of arXiv 2510.26788 with sequence w"
    weighs_itself = True
    verl_mode = "vanilla"

    def refusals(self, algorithm: AlgorithmConfig) -> Refusals:
        yield (
            algorithm.correction.bypass,
            "correction.bypass does nothing with loss=reinforce, which has no ratio: its weights are already of the "
            "current policy over the rollout's",
        )
        yield (
            algorithm.correction.normalize,
            "correction.normalize needs weights that are known before the update, and loss=reinforce weighs by the "
            "current policy, one micro-batch at a time; use ppo_clip, dapo, gspo or cispo, or normalize=false",
        )

    def of_tokens(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, None]:
        return -weight_BT * advantage_BT * logp_BT, None
