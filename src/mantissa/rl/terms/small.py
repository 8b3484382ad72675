"""Terms of a few lines: a bonus on the policy's entropy, the tokens that a loss treats otherwise, score centering, the
reference, the teacher, the penalty of the distance from it, and FlowRL's head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mantissa.algorithms import (
    CorrectionConfig,
    FlowRLConfig,
    KLConfig,
    OfTeacher,
    PartitionSettings,
    Selecting,
    centre,
    kl_loss,
)
from mantissa.base.seeds import derive_seed, generator
from mantissa.model import Decoder, LogPartition
from mantissa.precision import Accumulator, masked_sum
from mantissa.rl.config.sections import EntropyConfig
from mantissa.rl.experience import Scored, Weighed
from mantissa.rl.score import OfLogits, ReferencePolicy
from mantissa.rl.terms.base import Micro, Tallies, Term
from mantissa.training import Checkpoint, load_weights


class EntropyBonus(Term):
    """``-coefficient * sum scale * H`` over the valid tokens, with its gradient."""

    entropies = True

    def __init__(self, config: EntropyConfig) -> None:
        self.coefficient = config.coefficient

    def adds(self, micro: Micro, numbers_BRM: Tensor) -> tuple[Tensor, Tallies]:
        bonus = self.coefficient * masked_sum(micro.scale_BR * micro.passed["entropy_BR"], micro.batch.valid_BR)
        return -bonus, {"policy/entropy_bonus": Accumulator.of("sum", bonus)}


class Selection(Term):
    """The tokens that a loss which is ``Selecting`` has chosen of each whole optimiser step."""

    def __init__(self, loss: Selecting, seed: int) -> None:
        self.loss, self.seed = loss, seed

    def choose(self, batch: Weighed, parts: Sequence[Tensor], step: int) -> Mapping[str, Tensor]:
        chosen_BR = torch.zeros_like(batch.mask_BR)
        for number, rows in enumerate(parts):
            draw = generator(self.seed, "chosen tokens", step, number)
            old_BR, valid_BR = batch.old_logp_BR[rows], batch.valid_BR[rows]
            chosen_BR[rows] = self.loss.select(old_BR, batch.advantage_BR[rows], valid_BR, draw)
        return {"chosen_BR": chosen_BR}

    def gives(self, micro: Micro, numbers_BRM: Tensor) -> Mapping[str, Tensor]:
        return {"chosen_BT": micro.batch.column("chosen_BR")}


class Centering(Term):
    """``sum scale * A * drift`` over the valid tokens. ``count``: most probable tokens of the sampler."""

    numbers = 2  # a token's drift, and the size of its coefficients

    def __init__(self, count: int, correction: CorrectionConfig, temperature: float) -> None:
        self.most_probable, self.correction, self.temperature = count, correction, temperature

    def of_logits(self, batch: Weighed) -> OfLogits:
        ids_NK, rollout_NK = (batch.column(name)[batch.mask_BR] for name in ("top_ids_BRK", "top_logp_BRK"))

        def drift(start: int, logits_nV: Tensor) -> Tensor:
            here = slice(start, start + len(logits_nV))
            logp_nV = torch.log_softmax(logits_nV if self.temperature == 1.0 else logits_nV / self.temperature, -1)
            logp_nK = logp_nV.gather(-1, ids_NK[here].long())
            return torch.stack(centre(logp_nK, rollout_NK[here], self.correction), -1)

        return drift

    def adds(self, micro: Micro, numbers_BRM: Tensor) -> tuple[Tensor, Tallies]:
        batch, valid_BR = micro.batch, micro.batch.valid_BR
        drift_BR, sizes_BR = numbers_BRM[..., 0], numbers_BRM[..., 1].detach()
        pulled_BR = torch.where(valid_BR, micro.scale_BR * batch.advantage_BR, 0.0).detach() * drift_BR
        return masked_sum(pulled_BR, valid_BR), {"policy/centering": Accumulator.of("mean", sizes_BR, valid_BR)}


class Reference(Term):
    """Scores every batch; by itself it is measured only. A loss may ask for its log-probs."""

    phase = "reference_logp"

    def __init__(self, policy: ReferencePolicy) -> None:
        self.policy = policy

    def score(self, scored: Scored) -> Mapping[str, Tensor]:
        return {"ref_logp_BR": self.policy.score(scored)}

    def gives(self, micro: Micro, numbers_BRM: Tensor) -> Mapping[str, Tensor]:
        columns = micro.batch.columns  # a loss that cannot do without says so itself
        return {"ref_logp_BT": columns["ref_logp_BR"]} if "ref_logp_BR" in columns else {}

    def begin(self, weights: Mapping[str, Tensor], version: int) -> None:
        if self.policy.teacher is None:
            self.policy.take(weights, version)

    @property
    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {"reference": kept} if (kept := self.policy.kept) else {}

    @property
    def state(self) -> Mapping[str, Mapping[str, object]]:
        return {"reference": self.policy.state_dict()}

    def load(self, checkpoint: Checkpoint) -> None:
        kept = {} if self.policy.teacher is not None else checkpoint.part("reference")
        self.policy.load(checkpoint.state["reference"], kept)


class Penalty(Term):
    """``algorithm.kl`` in the loss: ``kl_loss``."""

    def __init__(self, config: KLConfig) -> None:
        self.config = config

    def adds(self, micro: Micro, numbers_BRM: Tensor) -> tuple[Tensor, Tallies]:
        batch = micro.batch
        known = (batch.column("ref_logp_BR"), batch.valid_BR, micro.weight_BR, micro.scale_BR, self.config)
        return kl_loss(micro.logp_BR, *known, micro.below_BR)


class Teacher(Term):
    """The policy's divergence from the reference after each prefix, of a loss that is of whole distributions."""

    numbers = 1

    def __init__(self, policy: ReferencePolicy, loss: OfTeacher, temperature: float) -> None:
        self.policy, self.loss, self.temperature = policy, loss, temperature

    def of_logits(self, batch: Weighed) -> OfLogits:
        logits_of = self.policy.logits(batch)

        def divergence(start: int, logits_nV: Tensor) -> Tensor:
            taught_nV = logits_of(start, start + len(logits_nV))
            return self.loss.from_teacher(logits_nV, taught_nV, self.temperature).unsqueeze(-1)

        return divergence

    def gives(self, micro: Micro, numbers_BRM: Tensor) -> Mapping[str, Tensor]:
        return {"divergence_BT": numbers_BRM[..., 0]}


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
    """FlowRL's log-partition head (``model/partition.py``): log Z of each prompt, of a loss that asks for it.

    It reads the mean hidden state of each prompt from the forward that computes the log-probs anyway, and its gradient
    flows back into the policy through that state (unless ``detach_partition``). It is trained by the learner's own
    optimiser step, so it overflows, is retried, clipped and skipped together with the policy; its learning rate follows
    the same schedule, from a value of its own if one is given. It has no weight decay: log Z is a number to be found,
    and nothing says that it is near 0. All samples of a prompt see the same log Z, for its dropout is named by the
    run's seed, the step and the prompt's group.
    """

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
