"""What a step minimises: a batch weighed, and the loss of a part of it, the policy's and its terms'.

A batch meets the reference in up to three places: in the reward (``algorithm.kl.where: reward``), in the loss (``where:
loss``), or inside FlowRL's own loss. Wherever it does, and where it is only there to be measured, ``reference/kl`` and
its like are of the weights before the update, over every response token.

With ``bypass`` the loss's ratio is to the rollout's log-probs, not to ``old``. Scoring goes on as before: the gap is
measured and rejection decided under the weights before the update, as in every other run.

Legend: B completions of a batch or micro-batch, R response tokens right-padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mantissa.algorithms import (
    AlgorithmConfig,
    FlowRLConfig,
    OfTeacher,
    ReinforceConfig,
    Selecting,
    advantage,
    correction,
    distillation,
    gae,
    importance_weights,
    kl_reward,
    of_rewards,
    off_policy_mask,
    reference_drift,
)
from mantissa.model import Decoder
from mantissa.rl.experience import Scored, Weighed
from mantissa.rl.terms.base import Made, Micro, Tallies, Term
from mantissa.rl.terms.centering import Centering
from mantissa.rl.terms.critic import Critic
from mantissa.rl.terms.flow import Partition
from mantissa.rl.terms.reference import Penalty, Reference, Teacher
from mantissa.rl.terms.small import EntropyBonus, Selection


def terms_of(made: Made) -> list[Term]:
    """The terms that a recipe asks for, in the order in which they are added up. A new one is a file in ``terms/``, and
    here the line that says when it is one."""
    algorithm, loss, policy, reference = made.algorithm, made.algorithm.loss, made.model, made.reference
    terms: list[Term] = []
    if algorithm.critic is not None:
        assert isinstance(policy, Decoder)  # the configuration's own check, as of the next
        terms.append(Critic(policy, algorithm.critic, made))
    if isinstance(loss, FlowRLConfig):
        assert isinstance(policy, Decoder)
        terms.append(Partition(policy, loss, made.seed))
    if isinstance(loss, Selecting):
        terms.append(Selection(loss, made.seed))
    if isinstance(loss, ReinforceConfig) and loss.centering is not None:
        terms.append(Centering(loss.centering, algorithm.correction, made.temperature))
    if reference is not None:
        terms.append(Reference(reference))
        if isinstance(loss, OfTeacher):
            terms.append(Teacher(reference, loss, made.temperature))
    if algorithm.kl is not None and algorithm.kl.where == "loss":
        terms.append(Penalty(algorithm.kl))
    if algorithm.entropy is not None:
        terms.append(EntropyBonus(algorithm.entropy))
    return terms


def weigh(experience: Scored, algorithm: AlgorithmConfig) -> Weighed:
    """A scored batch with its advantages, each token's correction weight, and which tokens count; with what it counted.

    Advantages are after the KL penalty where it is taken off the reward; ``reward/...`` is before it.
    """
    old, ref, mask = experience.old_logp_BR, experience.columns.get("ref_logp_BR"), experience.mask_BR
    kind = algorithm.advantage
    if kind == "distillation":
        advantages, tallies = distillation(old, ref, mask, experience.reward_B)
    elif kind == "gae":
        critic, value_BR = algorithm.critic, experience.column("value_BR")
        assert critic is not None  # the configuration's own check
        advantages, target_BR, tallies = gae(experience.reward_B, value_BR, mask, critic.gamma, critic.lam)
        experience, tallies = experience.having(target_BR=target_BR), {**tallies, **of_rewards(experience.reward_B)}
    else:
        terms = experience.terms_BK, experience.term_weights_BK
        advantages, tallies = advantage(experience.reward_B, experience.group_B, kind, *terms)
        if algorithm.kl is not None and algorithm.kl.where == "reward":
            shaped_B, penalty = kl_reward(experience.reward_B, old, ref, mask, algorithm.kl)
            advantages, shaped = advantage(shaped_B, experience.group_B, kind)
            tallies = {**shaped, **of_rewards(experience.reward_B), **penalty}
    weight_BR, valid_BR, weights = correction(
        old, experience.rollout_logp_BR, mask, algorithm.correction, whole=algorithm.loss.of_sequences
    )
    drift = {} if ref is None else reference_drift(old, ref, mask)
    return experience.with_weights(advantages, weight_BR, valid_BR, {**tallies, **weights, **drift})


def micro_loss(
    micro: Micro, algorithm: AlgorithmConfig, terms: Sequence[tuple[Term, Tensor]] = ()
) -> tuple[Tensor, Tallies]:
    """Loss of a weighed micro-batch, and tallies; losses and gradients of all of a step's micro-batches add up.

    ``terms``: with the numbers of the logits that each asked for; B,R,M, 0 at padding, M 0 where it asked for none.
    """
    given = {name: tensor for term, numbers in terms for name, tensor in term.gives(micro, numbers).items()}
    micro, value, tallies = _policy_loss(micro, algorithm, given)
    for term, numbers in terms:
        if (added := term.adds(micro, numbers)) is not None:
            value, tallies = value + added[0], {**tallies, **added[1]}
    return value, tallies


def _policy_loss(micro: Micro, algorithm: AlgorithmConfig, given: dict[str, Tensor]) -> tuple[Micro, Tensor, Tallies]:
    """The policy's loss, and the micro-batch with the weights that it took. ``given``: what it needs besides."""
    loss, batch, logp_BR = algorithm.loss, micro.batch, micro.logp_BR
    rollout_BR, mask_BR, valid_BR = batch.rollout_logp_BR, batch.mask_BR, batch.valid_BR
    parts = loss.ratio_parts(logp_BR, batch.old_logp_BR, rollout_BR, batch.advantage_BR, mask_BR, valid_BR)
    weights: Tallies = {}
    if loss.weighs_itself:
        # No ratio in this loss: its importance weight is of the current policy, not of the one before the update.
        weight_BR, weights = importance_weights(logp_BR.detach(), rollout_BR, mask_BR, valid_BR, algorithm.correction)
        micro = replace(micro, weight_BR=weight_BR)
    kept_BR = micro.weight_BR
    if (above := algorithm.correction.mask_negative_above) is not None:
        kept_B, masked = off_policy_mask(logp_BR, rollout_BR, batch.advantage_B, mask_BR, above)
        kept_BR, weights = torch.where(kept_B.unsqueeze(-1), kept_BR, 0.0), {**weights, **masked}
    known = (logp_BR, micro.below_BR, batch.advantage_BR, valid_BR, kept_BR, micro.scale_BR)
    value, tallies = loss.loss(*known, **given)
    return micro, value, {**tallies, **parts, **weights}
