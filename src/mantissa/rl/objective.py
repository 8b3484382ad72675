"""What a step minimises, put together from pure functions: the weighing of a scored batch, the loss of a micro-batch.

A batch meets the reference in up to three places: in the reward (``algorithm.kl.where: reward``), in the loss (``where:
loss``), or inside FlowRL's own loss. Wherever it does, and where it is only there to be measured, ``reference/kl`` and
its like are of the weights before the update, over every response token.

FlowRL's log-partition head in a run: its weights beside the policy's, its dropout, its place in the optimiser. The head
is fp32, whatever the learner's kernels are. It reads the mean hidden state of each prompt from the forward that
computes the log-probs anyway, and its gradient flows back into the policy through that state (unless
``detach_partition``). It is trained by the learner's own optimiser step, so it overflows, is retried, clipped and
skipped together with the policy; its learning rate follows the same schedule, from a value of its own if one is given.
It has no weight decay: log Z is a number to be found, and nothing says that it is near 0.

All samples of a prompt see the same log Z: dropout is a function of the run's seed, the step and the prompt's group,
so a repeated backward, another split into micro-batches and a resumed run drop the same units.

Legend: B completions of a batch or micro-batch, R response tokens right-padded, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

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
from mantissa.model import LogPartition
from mantissa.rl.config import AlgorithmConfig
from mantissa.rl.experience import Experience
from mantissa.rl.seeds import derive_seed, generator
from mantissa.training import load_weights


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


PREFIX = "partition."  # of its parameters' names among the optimiser step's: no decoder has any that begin so


class Flow:
    """The head of one run. ``seed``: the run's; the first weights and every dropout follow from it."""

    def __init__(self, hidden_size: int, config: FlowRLConfig, seed: int, device: torch.device) -> None:
        self.config, self.seed = config, seed
        head = LogPartition(hidden_size, config.partition_dropout)
        self.head = head.initialize(generator(seed, "partition")).to(device)

    def keys(self, group_B: Tensor, step: int) -> Tensor:
        """What names each row's dropout: int64, B; equal within a group, different between groups and steps."""
        names, index_B = torch.unique(group_B, return_inverse=True)
        keys = [derive_seed(self.seed, "partition dropout", step, group) for group in names.tolist()]
        return torch.tensor(keys, dtype=torch.int64, device=group_B.device)[index_B]

    def log_z(self, prompt_BE: Tensor, key_B: Tensor) -> Tensor:
        """log Z of each row's prompt, fp32, B, differentiable; ``prompt_BE``: the prompts' mean hidden states."""
        one_B1 = torch.ones(len(prompt_BE), 1, dtype=torch.bool, device=prompt_BE.device)
        log_z_B: Tensor = self.head(prompt_BE.unsqueeze(1), one_B1, key_B, detach=self.config.detach_partition)
        return log_z_B

    def join(self, optimizer: torch.optim.Optimizer, lr: float) -> dict[str, nn.Parameter]:
        """Add the head to the policy's optimiser, whose rate is ``lr``; returns its parameters under their names."""
        scale = 1.0 if self.config.partition_lr is None else self.config.partition_lr / lr
        parameters = {PREFIX + name: parameter for name, parameter in self.head.named_parameters()}
        optimizer.add_param_group({"params": list(parameters.values()), "weight_decay": 0.0, "lr_scale": scale})
        return parameters

    @property
    def weights(self) -> dict[str, Tensor]:
        """The head's fp32 weights by name, for a file beside the policy's."""
        return {name: parameter.detach() for name, parameter in self.head.named_parameters()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of ``weights``."""
        load_weights(self.weights, tensors)
