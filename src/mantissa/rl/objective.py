"""What a step minimises: a batch weighed, and the loss of a part of it; pure functions of tensors and configuration.

A batch meets the reference in up to three places: in the reward (``algorithm.kl.where: reward``), in the loss (``where:
loss``), or inside FlowRL's own loss. Wherever it does, and where it is only there to be measured, ``reference/kl`` and
its like are of the weights before the update, over every response token.

With ``bypass`` the loss's ratio is to the rollout's log-probs, not to ``old``. Scoring goes on as before: the gap is
measured and rejection decided under the weights before the update, as in every other run.

Legend: B completions of a batch or micro-batch, R response tokens right-padded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mantissa.algorithms import (
    Accumulator,
    AlgorithmConfig,
    advantage,
    correction,
    distillation,
    gae,
    importance_weights,
    kl_loss,
    kl_reward,
    of_rewards,
    off_policy_mask,
    reference_drift,
)
from mantissa.precision.numerics import masked_sum
from mantissa.rl.experience import Scored, Weighed


def weigh(experience: Scored, algorithm: AlgorithmConfig) -> Weighed:
    """A scored batch with its advantages, each token's correction weight, and which tokens count; with what it counted.

    Advantages are after the KL penalty where it is taken off the reward; ``reward/...`` is before it.
    """
    old, ref, mask = experience.old_logp_BR, experience.ref_logp_BR, experience.mask_BR
    kind, target_BR = algorithm.advantage, None
    if kind == "distillation":
        advantages, tallies = distillation(old, ref, mask, experience.reward_B)
    elif kind == "gae":
        assert algorithm.critic is not None
        assert experience.value_BR is not None, "score the values first"
        how = algorithm.critic.gamma, algorithm.critic.lam
        advantages, target_BR, tallies = gae(experience.reward_B, experience.value_BR, mask, *how)
        tallies = {**tallies, **of_rewards(experience.reward_B)}
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
    return experience.with_weights(advantages, weight_BR, valid_BR, {**tallies, **weights, **drift}, target_BR)


def micro_loss(
    logp_BR: Tensor,
    batch: Weighed,
    scale_BR: Tensor,
    log_z_B: Tensor | None,
    algorithm: AlgorithmConfig,
    entropy_BR: Tensor | None = None,
    centre_BR: Tensor | None = None,
    divergence_BR: Tensor | None = None,
) -> tuple[Tensor, dict[str, Accumulator]]:
    """Loss of a weighed micro-batch, and tallies; losses and gradients of all of a step's micro-batches add up.

    ``logp_BR``: the current policy's, with gradient. ``scale_BR``: each token's weight in the step's loss. ``log_z_B``:
    with FlowRL only. ``entropy_BR``: the current policy's, with gradient, where there is a bonus on it.
    ``centre_BR``: of a loss that centres the score, its drift, with gradient. ``divergence_BR``: of one that is of a
    teacher's distributions, with gradient.
    """
    loss, old_BR, rollout_BR = algorithm.loss, batch.old_logp_BR, batch.rollout_logp_BR
    advantage_BR, weight_BR, valid_BR = batch.advantage_BR, batch.weight_BR, batch.valid_BR
    below_BR = rollout_BR if algorithm.correction.bypass else old_BR  # below the loss's ratio
    parts = loss.ratio_parts(logp_BR, old_BR, rollout_BR, advantage_BR, batch.mask_BR, valid_BR)
    weights = dict[str, Accumulator]()
    if loss.weighs_itself:
        # No ratio in this loss: its importance weight is of the current policy, not of the one before the update.
        weight_BR, weights = importance_weights(
            logp_BR.detach(), rollout_BR, batch.mask_BR, valid_BR, algorithm.correction
        )
    kept_BR = weight_BR
    if (above := algorithm.correction.mask_negative_above) is not None:
        kept_B, masked = off_policy_mask(logp_BR, rollout_BR, batch.advantage_B, batch.mask_BR, above)
        kept_BR, weights = torch.where(kept_B.unsqueeze(-1), weight_BR, 0.0), {**weights, **masked}
    value, tallies = loss.loss(
        logp_BR,
        below_BR,
        advantage_BR,
        valid_BR,
        kept_BR,
        scale_BR,
        ref_logp_BT=batch.ref_logp_BR,
        log_z_B=log_z_B,
        chosen_BT=batch.chosen_BR,
        divergence_BT=divergence_BR,
    )
    if loss.most_probable:
        assert centre_BR is not None, "forward with the sampler's most probable tokens first"
        drift_BR = torch.where(valid_BR, scale_BR * advantage_BR, 0.0).detach() * centre_BR
        value = value + masked_sum(drift_BR, valid_BR)
    if algorithm.kl is not None and algorithm.kl.where == "loss":
        penalty, distance = kl_loss(logp_BR, batch.ref_logp_BR, valid_BR, weight_BR, scale_BR, algorithm.kl, below_BR)
        value, tallies = value + penalty, {**tallies, **distance}
    if algorithm.entropy is not None:
        assert entropy_BR is not None, "forward with the entropy's gradient first"
        bonus = algorithm.entropy.coefficient * masked_sum(scale_BR * entropy_BR, valid_BR)
        value, tallies = value - bonus, {**tallies, "policy/entropy_bonus": Accumulator.of("sum", bonus)}
    return value, {**tallies, **parts, **weights}
