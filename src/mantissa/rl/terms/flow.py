"""FlowRL's log-partition head in a run.

It (``model/partition.py``) reads the mean hidden state of each prompt from the forward that computes the log-probs
anyway, and its gradient flows back into the policy through that state (unless ``detach_partition``). It is trained by
the learner's own optimiser step, so it overflows, is retried, clipped and skipped together with the policy; its
learning rate follows the same schedule, from a value of its own if one is given. It has no weight decay: log Z is a
number to be found, and nothing says that it is near 0. All samples of a prompt see the same log Z, for its dropout is
named by the run's seed, the step and the prompt's group.

Legend: B completions, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mantissa.algorithms import FlowRLConfig, PartitionSettings
from mantissa.base.seeds import derive_seed, generator
from mantissa.model import Decoder, LogPartition
from mantissa.rl.terms.base import Micro, Term
from mantissa.training import Checkpoint, load_weights

PREFIX = "partition."  # of its parameters' names among the optimiser step's: no decoder has any that begin so


class Flow:
    """The head of one run. ``seed``: the run's; the first weights and every dropout follow from it."""

    def __init__(self, hidden_size: int, settings: PartitionSettings, seed: int, device: torch.device) -> None:
        self.settings, self.seed = settings, seed
        head = LogPartition(hidden_size, settings.dropout)
        self.head = head.initialize(generator(seed, "partition")).to(device)

    def keys(self, group_B: Tensor, step: int) -> Tensor:
        """What names each row's dropout: int64, B; equal within a group, different between groups and steps."""
        names, index_B = torch.unique(group_B, return_inverse=True)
        keys = [derive_seed(self.seed, "partition dropout", step, group) for group in names.tolist()]
        return torch.tensor(keys, dtype=torch.int64, device=group_B.device)[index_B]

    def log_z(self, prompt_BE: Tensor, key_B: Tensor) -> Tensor:
        """log Z of each row's prompt, fp32, B, differentiable; ``prompt_BE``: the prompts' mean hidden states."""
        log_z_B: Tensor = self.head(prompt_BE, key_B, detach=self.settings.detach)
        return log_z_B

    def join(self, optimizer: torch.optim.Optimizer, lr: float) -> dict[str, nn.Parameter]:
        """Add the head to the policy's optimiser, whose rate is ``lr``; returns its parameters under their names."""
        scale = 1.0 if self.settings.lr is None else self.settings.lr / lr
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


class Partition(Term):
    """The head as a term of the learner's: log Z of each prompt, of a loss that asks for it."""

    prompts = True

    def __init__(self, policy: Decoder, loss: FlowRLConfig, seed: int) -> None:
        self.flow = Flow(policy.config.hidden_size, loss.partition, seed, next(policy.parameters()).device)

    def gives(self, micro: Micro, numbers_BRM: Tensor) -> Mapping[str, Tensor]:
        return {"log_z_B": self.flow.log_z(micro.passed["prompt_BE"], self.flow.keys(micro.batch.group_B, micro.step))}

    def join(self, optimizer: torch.optim.Optimizer, lr: float) -> Mapping[str, nn.Parameter]:
        return self.flow.join(optimizer, lr)

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {"partition": self.flow.head}

    @property
    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {"partition": self.flow.weights}

    def load(self, checkpoint: Checkpoint) -> None:
        self.flow.load(checkpoint.part("partition"))
