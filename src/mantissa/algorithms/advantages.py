"""Advantages: how much better a response was than the other responses to its prompt.

Responses to one prompt form a group; ``group_B`` names it by any integer, in any order, and groups may differ in size.
With n rewards r in a group, mean m and unbiased standard deviation s (divided by n - 1, as TRL and verl do):

============  ========================================  =============================
name          A_i                                       source
============  ========================================  =============================
grpo          (r_i - m) / (s + 1e-6)                    arXiv 2402.03300, section 4.1
dr_grpo       r_i - m                                   arXiv 2503.20783
rloo          r_i - mean of others = (r_i - m) n/(n-1)  arXiv 2402.14740
reinforce_pp  (r_i - m) / (s + 1e-6) of the batch       arXiv 2501.03262
reinforce_pp  (r_i - m) / (S + 1e-6), S that of the     arXiv 2501.03262, "-baseline"
_baseline     batch's r_i - m
gdpo          a_i / (S + 1e-6), S that of the batch's   arXiv 2601.05242, equations 4 to 6
              a_i = sum_k w_k * grpo of reward k
============  ========================================  =============================

REINFORCE++ has two published variants: one baseline for the whole batch, so that one sample a prompt is enough, and one
for each prompt followed by a normalisation over the batch ("-baseline"). Both are without the KL term that the paper
puts into the reward (that is ``kl_in_reward``, before this), and normalised over responses. Public code normalises over
tokens, which counts a long response more often; here each counts once, like everywhere else.

Two are of each token and know no groups:

- ``distillation``: log p_teacher - log p_old of the sampled token, in the place of rewards, which are only logged. Its
  mean over tokens is the KL divergence of the policy from the teacher, so its policy gradient at theta = old is that of
  each token's KL(theta || teacher), prefixes held fixed. On-policy distillation: Thinking Machines Lab, 2025; Gu et
  al., arXiv 2306.08543; Agarwal et al., arXiv 2306.13649.
- ``gae``: by a value model (``gae.py``).

GDPO is for a reward that is a weighted sum of several: each is normalised within its group before they are added, so
that (right, long) and (wrong, short) are told apart though their sums are equal, and a reward of large spread does not
drown the others. What a reward counts is its weight w_k, for its own scale cancels. So a penalty whose size is its
meaning (of length, of the distance from a reference) is none of its rewards, and a recipe that has one is refused. The
published a_i also has its mean over the batch taken off, which is 0 here: every group's is.

A group whose rewards are all equal (a group of one included) carries no gradient. Its advantages are exactly 0, decided
by comparing its largest and smallest reward: the float64 mean of three rewards of 0.1 is not 0.1, and a rounding error
divided by 1e-6 is a gradient. To ``reinforce_pp`` the batch is the group: it counts the groups without a difference of
their own like the others, but only a batch without any difference has no gradient.

Sums are float64, so that the order of the batch does not show in an fp32 result beyond its last bit. A reward that is
not finite makes its own group's advantages non-finite and no other's (``reinforce_pp`` and its ``_baseline``: the
batch's), those of a group of equal infinities too: what is unknown is not 0, and nothing is hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.precision import Accumulator

STD_EPSILON = 1e-6
AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gdpo"]
TokenAdvantageKind = Literal["distillation", "gae"]


@dataclass(frozen=True)
class Estimator:
    """``formula``: of r - mean, std and n of its group. ``of_batch``: the whole batch is the group.
    ``over_batch``: what comes of it is divided by the batch's standard deviation of it, 0 staying 0. ``decoupled``: the
    formula is of each summand of the reward by itself."""

    formula: Callable[[Tensor, Tensor, Tensor], Tensor]
    of_batch: bool = False
    over_batch: bool = False
    decoupled: bool = False

    @property
    def normalises(self) -> bool:
        """Whether a common factor of all rewards cancels."""
        half, std = torch.tensor([0.5, 1.0], dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
        one, twice = self.formula(half, std, torch.full_like(half, 2.0))
        return self.over_batch or abs(float(twice - one)) < STD_EPSILON


ADVANTAGES: dict[AdvantageKind, Estimator] = {
    "grpo": Estimator(lambda centred, std, count: centred / (std + STD_EPSILON)),
    "dr_grpo": Estimator(lambda centred, std, count: centred),  # belongs with ``seq_mean_token_sum_norm``
    "rloo": Estimator(lambda centred, std, count: centred * count / (count - 1).clamp(min=1)),
    "reinforce_pp": Estimator(lambda centred, std, count: centred / (std + STD_EPSILON), of_batch=True),
    "reinforce_pp_baseline": Estimator(lambda centred, std, count: centred, over_batch=True),
    "gdpo": Estimator(lambda centred, std, count: centred / (std + STD_EPSILON), over_batch=True, decoupled=True),
}


def advantage(
    rewards_B: Tensor,
    group_B: Tensor,
    kind: AdvantageKind,
    terms_BK: Tensor | None = None,
    term_weights_BK: Tensor | None = None,
) -> tuple[Tensor, dict[str, Accumulator]]:
    """Advantage of each response within its group (or the batch), by the estimator named ``kind``.

    ``rewards_B``: fp32 or float64. ``group_B``: int64, equal numbers share a prompt; every response of a prompt must be
    in this batch. ``terms_BK``, ``term_weights_BK``: the summands of each reward and their weights, for ``gdpo``; None:
    it is the only one. Returns ``advantage_B`` in the rewards' dtype, and metrics ``advantage/...``, ``reward/...``.
    """
    estimator = ADVANTAGES[kind]
    if estimator.decoupled and terms_BK is not None and term_weights_BK is not None:
        each = [_advantage(term_B.double(), group_B, estimator.formula) for term_B in terms_BK.unbind(1)]
        weighted = torch.stack([found for found, _ in each], 1) * term_weights_BK.double()
        result, degenerate_G = weighted.sum(1), torch.stack([flat for _, flat in each]).all(0)
    else:
        result, degenerate_G = _advantage(rewards_B, group_B, estimator.formula)
    if estimator.of_batch:
        result, _ = _advantage(rewards_B, torch.zeros_like(group_B), estimator.formula)
    if estimator.over_batch and result.numel():
        std = result.double().std(correction=1) if result.numel() > 1 else torch.zeros_like(result.double()[0])
        result = result.double() / (std + STD_EPSILON)
    result = result.to(rewards_B.dtype)
    return result, {
        "advantage/degenerate_group_fraction": Accumulator.of("mean", degenerate_G),
        "advantage/abs_max": Accumulator.of("max", result.abs()),
        **of_rewards(rewards_B),
    }


def distillation(
    old_logp_BT: Tensor, teacher_logp_BT: Tensor | None, mask_BT: Tensor, rewards_B: Tensor
) -> tuple[Tensor, dict[str, Accumulator]]:
    """``teacher - old`` of each response token, BT, 0 where masked, and metrics.

    Log-probs fp32 or float64, of one dtype; nothing carries a gradient. A valid one that is not finite gives an
    advantage that is not. Raises ``MantissaError`` where the teacher's are missing.
    """
    if teacher_logp_BT is None:
        raise MantissaError("advantage=distillation needs the teacher's log-probs and got none; score the batch by it")
    old, teacher = (torch.where(mask_BT, x.detach(), 0.0) for x in (old_logp_BT, teacher_logp_BT))
    result_BT = teacher - old
    return result_BT, {"advantage/abs_max": Accumulator.of("max", result_BT.abs(), mask_BT), **of_rewards(rewards_B)}


def of_rewards(rewards_B: Tensor) -> dict[str, Accumulator]:
    """The metrics ``reward/...``."""
    return {
        "reward/mean": Accumulator.of("mean", rewards_B),
        "reward/min": Accumulator.of("min", rewards_B),
        "reward/max": Accumulator.of("max", rewards_B),
    }


def _advantage(
    rewards_B: Tensor, group_B: Tensor, formula: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """``formula`` within each of G groups, with exact zeros for degenerate ones; and which these are (G)."""
    if rewards_B.dtype not in (torch.float32, torch.float64) or group_B.dtype != torch.int64:
        raise TypeError(f"expected fp32 rewards and int64 groups, not {rewards_B.dtype} and {group_B.dtype}")
    if rewards_B.shape != group_B.shape or rewards_B.dim() != 1:
        raise ValueError(f"expected one reward and one group each, not {rewards_B.shape} and {group_B.shape}")
    reward = rewards_B.double()  # exact
    names_G, index_B = torch.unique(group_B, return_inverse=True)
    zeros_G = reward.new_zeros(len(names_G))
    count_G = zeros_G.index_add(0, index_B, torch.ones_like(reward))
    centred = reward - (zeros_G.index_add(0, index_B, reward) / count_G)[index_B]
    variance_G = zeros_G.index_add(0, index_B, centred.square()) / (count_G - 1).clamp(min=1)
    largest_G = zeros_G.scatter_reduce(0, index_B, reward, "amax", include_self=False)
    smallest_G = zeros_G.scatter_reduce(0, index_B, reward, "amin", include_self=False)
    degenerate_G = (largest_G == smallest_G) & largest_G.isfinite()
    result = formula(centred, variance_G.sqrt()[index_B], count_G[index_B])
    return torch.where(degenerate_G[index_B], 0.0, result).to(rewards_B.dtype), degenerate_G  # the one rounding
