"""What a step minimises, put together from pure functions: advantages of shaped rewards, the loss of a micro-batch.

A batch meets the reference in up to three places: in the reward (``algorithm.kl.where: reward``), in the loss (``where:
loss``), or inside FlowRL's own loss. Wherever it does, and where it is only there to be measured, ``reference/kl`` and
its like are of the weights before the update, over every response token.

Legend: B completions of a micro-batch, R response tokens right-padded.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mantissa.algorithms import (
    Accumulator,
    FlowRLConfig,
    advantage,
    flowrl_loss,
    importance_weights,
    kl_loss,
    kl_reward,
    log_ratio_parts,
    policy_loss,
    reference_drift,
)
from mantissa.rl.config import AlgorithmConfig
from mantissa.rl.experience import Experience

Tallies = dict[str, Accumulator]


@dataclass(frozen=True)
class Micro:
    """What the loss needs of each completion of a micro-batch; floats fp32.

    ``logp_BR``: the current policy's, with gradient. ``old_logp_BR``: the policy's before the update.
    ``mask_BR``: response tokens; ``valid_BR``, ``weight_BR``: from ``correction``. ``log_z_B``: with FlowRL only.
    """

    logp_BR: Tensor
    old_logp_BR: Tensor
    rollout_logp_BR: Tensor
    ref_logp_BR: Tensor | None
    advantage_B: Tensor
    mask_BR: Tensor
    valid_BR: Tensor
    weight_BR: Tensor
    scale_BR: Tensor
    log_z_B: Tensor | None = None


def advantages(experience: Experience, algorithm: AlgorithmConfig) -> tuple[Tensor, Tallies]:
    """Advantages of a scored batch, after the KL penalty where it is taken off the reward; ``reward/...`` is before it.

    Tallies also of the distance from the reference, where there is one.
    """
    old, ref, mask = experience.old_logp_BR, experience.ref_logp_BR, experience.sequences.mask_BR
    assert old is not None, "score the experience first"
    advantage_B, tallies = advantage(experience.reward_B, experience.group_B, algorithm.advantage)
    if algorithm.kl is not None and algorithm.kl.where == "reward":
        shaped_B, penalty = kl_reward(experience.reward_B, old, ref, mask, algorithm.kl)
        advantage_B, shaped = advantage(shaped_B, experience.group_B, algorithm.advantage)
        rewards = {name: tally for name, tally in tallies.items() if name.startswith("reward/")}
        tallies = {**shaped, **rewards, **penalty}
    return advantage_B, tallies


def drift_from_reference(experience: Experience) -> Tallies:
    """``reference/...`` of a scored batch, before its update; nothing where there is no reference."""
    old, ref = experience.old_logp_BR, experience.ref_logp_BR
    assert old is not None, "score the experience first"
    return {} if ref is None else reference_drift(old, ref, experience.sequences.mask_BR)


def every_row_counts(algorithm: AlgorithmConfig) -> bool:
    """Whether a completion whose advantage is zero has a gradient all the same: the reference pulls at it."""
    return isinstance(algorithm.loss, FlowRLConfig) or (algorithm.kl is not None and algorithm.kl.where == "loss")


def micro_loss(micro: Micro, algorithm: AlgorithmConfig) -> tuple[Tensor, Tallies]:
    """Loss of a micro-batch, and tallies; losses and gradients of all of a step's micro-batches add up."""
    config = algorithm.loss
    below_BR = micro.rollout_logp_BR if algorithm.correction.bypass else micro.old_logp_BR  # below the loss's ratio
    parts = log_ratio_parts(
        micro.logp_BR,
        micro.old_logp_BR,
        micro.rollout_logp_BR,
        micro.advantage_B,
        micro.mask_BR,
        micro.valid_BR,
        config,
    )
    if isinstance(config, FlowRLConfig):
        loss, tallies = flowrl_loss(
            micro.logp_BR,
            below_BR,
            micro.ref_logp_BR,
            micro.log_z_B,
            micro.advantage_B,
            micro.valid_BR,
            micro.weight_BR,
            micro.scale_BR,
            config,
        )
        return loss, {**tallies, **parts}
    weight_BR, weights = micro.weight_BR, dict[str, Accumulator]()
    if config.kind == "reinforce":
        # No ratio in this loss: its importance weight is of the current policy, not of the one before the update.
        weight_BR, weights = importance_weights(
            micro.logp_BR.detach(), micro.rollout_logp_BR, micro.mask_BR, micro.valid_BR, algorithm.correction
        )
    loss, tallies = policy_loss(
        micro.logp_BR, below_BR, micro.advantage_B, micro.valid_BR, weight_BR, micro.scale_BR, config
    )
    if algorithm.kl is not None and algorithm.kl.where == "loss":
        penalty, distance = kl_loss(
            micro.logp_BR, micro.ref_logp_BR, micro.valid_BR, weight_BR, micro.scale_BR, algorithm.kl
        )
        loss, tallies = loss + penalty, {**tallies, **distance}
    return loss, {**tallies, **parts, **weights}
