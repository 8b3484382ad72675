"""The log-ratio of the current policy to the one that sampled, in its two parts, and the clipping that one part causes.

    logp_theta - logp_rollout = alpha + beta
    alpha = logp_theta - logp_old      the learner against itself: how far it has moved since it was scored
    beta  = logp_old - logp_rollout    two sets of kernels and formats, at equal weights

``old`` is the learner under the weights before the update, which are those that sampled; with ``max_policy_lag`` they
are newer, and what moved meanwhile is in beta. With one update a batch alpha is 0, but for the order of sums in another
split into micro-batches. Both are taken raw: over every response token that the update computed, before a clamp, a
weight's truncation or rejection.

A clip cannot tell the two apart where its ratio is to the rollout (``bypass``). A token is clipped by the phantom where

    C(alpha + beta) and not C(alpha)

C being the loss's own test, with its own bounds, the sign of the advantage and the clamp:

========  ==========================================================================  =========================
loss      C(x), true where                                                            what it takes
========  ==========================================================================  =========================
ppo_clip  A > 0 and exp x > 1 + high, or A < 0 and exp x < 1 - low                    the token's gradient
dapo      the same, or A < 0 and exp x > dual_clip                                    the token's gradient
gspo      the same as ppo_clip, with x's mean over the sequence                       its tokens' gradients
cispo     exp x > 1 + high, whatever A                                                the excess of its weight
flowrl    exp x outside of bounds, x by token or the sequence's sum or mean           the excess of its weight
========  ==========================================================================  =========================

``reinforce`` has no clip, and no such fraction. With bypass these tokens are among those that ``policy/clip_fraction``
counts; without it none of them was cut, and the fraction says what the clip would have cut.

Source of alpha, beta and the name: "Defeating the trainer-generator precision mismatch in TRL" (A. Dirhoussi, 2026),
where alpha is taken in the rollout's format; here it is in the learner's, for that forward is there anyway.

Legend: B sequences, T response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mantissa.algorithms.aggregation import Accumulator
from mantissa.algorithms.flowrl import FlowRLConfig, bounded
from mantissa.algorithms.losses import GSPOConfig, PolicyLoss, ReinforceConfig, clipped


def log_ratio_parts(
    logp_BT: Tensor, old_logp_BT: Tensor, rollout_logp_BT: Tensor, advantage_B: Tensor, mask_BT: Tensor,
    valid_BT: Tensor, config: PolicyLoss | FlowRLConfig,
) -> dict[str, Accumulator]:  # fmt: skip
    """``policy/alpha_...`` and ``policy/beta_...`` (nats) and, but for ``reinforce``, ``policy/phantom_clip_fraction``.

    Log-probs BT, one dtype (fp32, or float64), detached here. ``mask_BT``: response tokens, over which the parts are.
    ``valid_BT``: those in the loss, over which the fraction is. A token with a log-prob that is not finite leaves
    numerator and denominator, and its whole sequence those of the fraction where the clip is by sequence.
    """
    logps = [x.detach() for x in (logp_BT, old_logp_BT, rollout_logp_BT)]
    finite_BT = mask_BT & torch.stack([x.isfinite() for x in logps]).all(0)
    logp, old, rollout = (torch.where(finite_BT, x, 0.0) for x in logps)
    metrics = {}
    for name, part in (("alpha", logp.double() - old.double()), ("beta", old.double() - rollout.double())):  # exact
        metrics[f"policy/{name}_mean"] = Accumulator.of("mean", part, finite_BT)
        metrics[f"policy/{name}_abs_mean"] = Accumulator.of("mean", part.abs(), finite_BT)
    if isinstance(config, ReinforceConfig):
        return metrics
    known_BT = valid_BT & finite_BT
    by_token = config.importance == "token" if isinstance(config, FlowRLConfig) else not isinstance(config, GSPOConfig)
    if not by_token:
        known_BT = known_BT & (known_BT == valid_BT).all(-1, keepdim=True)

    def cut(anchor: Tensor) -> Tensor:
        logp_BT, anchor_BT = (torch.where(known_BT, x, 0.0) for x in (logp, anchor))
        if isinstance(config, FlowRLConfig):
            return bounded(logp_BT, anchor_BT, known_BT, config)
        return clipped(logp_BT, anchor_BT, advantage_B.detach(), known_BT, config)

    phantom_BT = cut(rollout) & ~cut(old)
    return metrics | {"policy/phantom_clip_fraction": Accumulator.of("mean", phantom_BT, known_BT)}
