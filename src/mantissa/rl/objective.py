"""What a step minimises: a batch weighed, and the loss of a part of it; pure functions of tensors and configuration.

A batch meets the reference in up to three places: in the reward (``algorithm.kl.where: reward``), in the loss (``where:
loss``), or inside FlowRL's own loss. Wherever it does, and where it is only there to be measured, ``reference/kl`` and
its like are of the weights before the update, over every response token.

With ``bypass`` the loss's ratio is to the rollout's log-probs, not to ``old``. Scoring goes on as before: the gap is
measured and rejection decided under the weights before the update, as in every other run.

Legend: B completions of a batch or micro-batch, R response tokens right-padded.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from mantissa.algorithms import (
    Accumulator,
    FlowRLConfig,
    GSPOConfig,
    advantage,
    correction,
    flowrl_loss,
    importance_weights,
    kl_loss,
    kl_reward,
    log_ratio_parts,
    policy_loss,
    reference_drift,
)
from mantissa.rl.config.sections import AlgorithmConfig
from mantissa.rl.experience import Experience


# What a step minimises, of pure functions; and FlowRL's head
def weigh(experience: Experience, algorithm: AlgorithmConfig) -> Experience:
    """A scored batch with its advantages, each token's correction weight, and which tokens count; with what it counted.

    Advantages are after the KL penalty where it is taken off the reward; ``reward/...`` is before it.
    """
    old, ref, mask = experience.old_logp, experience.ref_logp_BR, experience.mask_BR
    advantage_B, tallies = advantage(experience.reward_B, experience.group_B, algorithm.advantage)
    if algorithm.kl is not None and algorithm.kl.where == "reward":
        shaped_B, penalty = kl_reward(experience.reward_B, old, ref, mask, algorithm.kl)
        advantage_B, shaped = advantage(shaped_B, experience.group_B, algorithm.advantage)
        rewards = {name: tally for name, tally in tallies.items() if name.startswith("reward/")}
        tallies = {**shaped, **rewards, **penalty}
    whole = isinstance(algorithm.loss, (GSPOConfig, FlowRLConfig))  # a loss about sequences
    weight_BR, valid_BR, weights = correction(old, experience.rollout_logp_BR, mask, algorithm.correction, whole=whole)
    drift = {} if ref is None else reference_drift(old, ref, mask)
    tallies = {**tallies, **weights, **drift}
    return replace(experience, advantage_B=advantage_B, weight_BR=weight_BR, valid_BR=valid_BR, tallies=tallies)


def every_row_counts(algorithm: AlgorithmConfig) -> bool:
    """Whether a completion whose advantage is zero has a gradient all the same: the reference pulls at it."""
    return isinstance(algorithm.loss, FlowRLConfig) or (algorithm.kl is not None and algorithm.kl.where == "loss")


def micro_loss(
    logp_BR: Tensor, batch: Experience, scale_BR: Tensor, log_z_B: Tensor | None, algorithm: AlgorithmConfig
) -> tuple[Tensor, dict[str, Accumulator]]:
    """Loss of a weighed micro-batch, and tallies; losses and gradients of all of a step's micro-batches add up.

    ``logp_BR``: the current policy's, with gradient. ``scale_BR``: each token's weight in the step's loss. ``log_z_B``:
    with FlowRL only.
    """
    config, old_BR, rollout_BR = algorithm.loss, batch.old_logp, batch.rollout_logp_BR
    advantage_B, weight_BR, valid_BR = batch.weighed
    below_BR = rollout_BR if algorithm.correction.bypass else old_BR  # below the loss's ratio
    parts = log_ratio_parts(logp_BR, old_BR, rollout_BR, advantage_B, batch.mask_BR, valid_BR, config)
    if isinstance(config, FlowRLConfig):
        ref_BR = batch.ref_logp_BR
        loss, tallies = flowrl_loss(
            logp_BR, below_BR, ref_BR, log_z_B, advantage_B, valid_BR, weight_BR, scale_BR, config
        )
        return loss, {**tallies, **parts}
    weights = dict[str, Accumulator]()
    if config.kind == "reinforce":
        # No ratio in this loss: its importance weight is of the current policy, not of the one before the update.
        weight_BR, weights = importance_weights(
            logp_BR.detach(), rollout_BR, batch.mask_BR, valid_BR, algorithm.correction
        )
    loss, tallies = policy_loss(logp_BR, below_BR, advantage_B, valid_BR, weight_BR, scale_BR, config)
    if algorithm.kl is not None and algorithm.kl.where == "loss":
        penalty, distance = kl_loss(logp_BR, batch.ref_logp_BR, valid_BR, weight_BR, scale_BR, algorithm.kl)
        loss, tallies = loss + penalty, {**tallies, **distance}
    return loss, {**tallies, **parts, **weights}
