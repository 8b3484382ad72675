"""``reinforce``: the policy gradient with detached importance weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from mantissa.algorithms.losses.base import Around, TokenLoss
from mantissa.base.config import Refusals


class ReinforceConfig(TokenLoss):
    """``-w * A * logp``: no ratio, no clip; meant for few optimiser steps a batch, with a correction.

    Williams 1992; with sequence weights it is PG-IS of arXiv 2510.26788. Its w is of the current policy over the
    rollout's, made anew for each micro-batch. ``centering`` takes the drift of such a gradient off it, score centering
    of arXiv 2609.20807 (``algorithms/centering.py``): alone with ``correction: none``, or with token weights.
    """

    kind: Literal["reinforce"] = Field("reinforce", description="Policy gradient with detached importance weights.")

    centering: int | None = Field(
        None, ge=1, description="Most probable tokens of the sampler that the score is centred over, 128 for example "
        "(8 bytes each a token); null: it is not."
    )  # fmt: skip

    source = "Williams 1992; PG-IS of arXiv 2510.26788 with sequence w"
    weighs_itself = True
    verl_mode = "vanilla"

    def refusals(self, algorithm: Around) -> Refusals:
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

        yield (
            self.centering is not None and algorithm.correction.level == "sequence",
            "loss.centering with correction.level=sequence: the drift that is taken off is of a token, by weights of "
            "tokens; use level=token, or leave centering out",
        )

    def of_tokens(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, None]:
        return -weight_BT * advantage_BT * logp_BT, None
