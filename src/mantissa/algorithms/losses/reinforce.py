"""``reinforce``: the policy gradient with detached importance weights; and score centering, which it may have.

Centering: what a policy gradient would do to the policy if every reward were equal, taken off it.

Tokens are drawn from the rollout's q, the gradient is of the learner's p, and each token's score s_v = d log p(v) is
weighed by w_v = f(p(v) / q(v)). At a prefix, with an advantage A that the token does not change, the mean of the
gradient is

    E_q[A w s] = E_q[A] mu + Cov_q(A, w s),        mu = sum_v q(v) w_v s_v

and mu, the drift, is 0 where p = q or w = p / q, but not otherwise: it moves p towards q or away, whatever the rewards
say, at every step in the same direction. Centering takes A mu off each token's gradient:

    loss of a token = -A (w_y log p(y) - sum_v sg(q(v) w_v) log p(v))

The sum is over the K most probable tokens H of the sampler, whose log-probs were kept. Beyond them q is taken to be p
scaled to the sampler's mass there, q(v) = rho p(v) with rho = (1 - q(H)) / (1 - p(H)), and since sum_v p(v) s_v = 0

    mu = sum_{v in H} (q(v) w_v - alpha p(v)) s_v,        alpha = rho f(1 / rho)

which is exact where H is all that is drawn from, as with a top-k of K or less.

Numerics. Coefficients are taken in float64 and carry no gradient; masses beyond H are held above 1e-6, below which they
are rounding errors of the sums; a token that the rollout could not draw has coefficient 0.

Source: arXiv 2609.20807, equations 3 and 7 to 12; its claim that this drift is what makes training unstable is
disputed (NovaSky-AI/SkyRL, pull request 2244). Legend: n tokens, K most probable ones of the sampler.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from mantissa.algorithms.correction import CorrectionConfig, ratio_weights
from mantissa.algorithms.losses.base import Around, TokenLoss
from mantissa.base.config import Refusals


class ReinforceConfig(TokenLoss):
    """``-w * A * logp``: no ratio, no clip; meant for few optimiser steps a batch, with a correction.

    Williams 1992; with sequence weights it is PG-IS of arXiv 2510.26788. Its w is of the current policy over the
    rollout's, made anew for each micro-batch. ``centering`` takes the drift of such a gradient off it, score centering
    of arXiv 2609.20807 (``algorithms/losses/reinforce.py``): alone with ``correction: none``, or with token weights.
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


_LEAST_MASS = 1e-6


def centre(logp_nK: Tensor, rollout_logp_nK: Tensor, correction: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """``sum_v c_v log p(v)`` of each token (differentiable in ``logp_nK`` alone), and ``sum_v |c_v|``; both n.

    ``logp_nK``: the current policy's log-probs of the sampler's most probable tokens, fp32 or float64.
    ``rollout_logp_nK``: the sampler's, -inf where there are fewer than K. ``correction``: whose weights f are.
    """
    known_nK = rollout_logp_nK.isfinite()
    logp_nK = torch.where(known_nK, logp_nK, 0.0)
    with torch.no_grad():
        log_q = torch.where(known_nK, rollout_logp_nK.double(), -torch.inf)
        log_p = torch.where(known_nK, logp_nK.double(), -torch.inf)
        p, q = log_p.exp(), log_q.exp()
        weight = ratio_weights(torch.where(known_nK, log_p - log_q, 0.0), correction)
        rho_n1 = (1 - q.sum(-1, keepdim=True)).clamp(min=_LEAST_MASS) / (1 - p.sum(-1, keepdim=True)).clamp(
            min=_LEAST_MASS
        )
        alpha_n1 = rho_n1 * ratio_weights(-rho_n1.log(), correction)
        coefficient_nK = torch.where(known_nK, q * weight - alpha_n1 * p, 0.0)
    return (coefficient_nK.to(logp_nK.dtype) * logp_nK).sum(-1), coefficient_nK.abs().sum(-1).to(logp_nK.dtype)
