"""A term of the objective: what it needs, what it adds, and what it keeps. The learner knows nothing else of any.

A run's terms are those that its recipe asks for (``rl/learner.py``: ``terms_of``). In a step each is asked in turn,
and each answers only where it has something to say:

    score      of a batch that the learner has scored: columns of its own (a reference's log-probs, values)
    learn      what trains beside the policy learns; ``holds`` where the policy waits for it
    choose     columns that are of whole optimiser steps
    of_logits  numbers of each token's logits, taken in the policy's forward, with their gradient
    gives      of a micro-batch: what the policy's loss needs besides (``Loss.loss``: ``of_terms``)
    adds       of a micro-batch: its own loss, and what it counts

What it needs of a forward it declares: ``prompts``, ``entropies``, ``numbers``. What it keeps are its ``tensors`` and
its ``state``, which a checkpoint holds under their names, and the parameters that it has ``join`` the policy's own
optimiser step.

Legend: B completions of a batch or micro-batch, R response tokens right-padded, n tokens, M numbers of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mantissa.base.ranks import Ranks
from mantissa.kernels import Kernels
from mantissa.model import Decoder
from mantissa.precision import Accumulator
from mantissa.rl.config.sections import AlgorithmConfig
from mantissa.rl.experience import Scored, Weighed
from mantissa.rl.score import OfLogits, ReferencePolicy
from mantissa.rollout.transformers import TransformersPolicy
from mantissa.training import Checkpoint, OptimizerStep

Tallies = dict[str, Accumulator]


@dataclass(frozen=True, kw_only=True)
class Made:
    """What terms are made of. ``step_of``: an optimiser step over a module that trains beside the policy, at a rate.

    ``aggregation_length``: of ``aggregation_scale``. ``reference``: the frozen policy, where the recipe has one.
    """

    algorithm: AlgorithmConfig
    model: Decoder | TransformersPolicy
    kernels: Kernels
    temperature: float
    aggregation_length: float | None
    micro_batch_tokens: int
    seed: int
    ranks: Ranks
    step_of: Callable[[nn.Module, float], OptimizerStep]
    reference: ReferencePolicy | None = None


@dataclass(frozen=True, kw_only=True)
class Micro:
    """A micro-batch of optimiser step ``step``, and the current policy's forward of it.

    ``logp_BR``: with gradient. ``below_BR``: what the loss's ratio is to. ``weight_BR``: the correction's, of whatever
    the loss weighs by. ``scale_BR``: each token's weight in the step's loss. ``passed``: what terms declared that they
    need: ``prompt_BE``, each prompt's mean hidden state, and ``entropy_BR``, both with gradient.
    """

    batch: Weighed
    step: int
    logp_BR: Tensor
    below_BR: Tensor
    weight_BR: Tensor
    scale_BR: Tensor
    passed: Mapping[str, Tensor]


class Term:
    """Base of every term: one that has nothing to say."""

    phase: str | None = None  # what the time of ``score`` is counted as; None: it scores nothing
    prompts = False  # whether it needs ``prompt_BE``
    entropies = False  # whether it needs ``entropy_BR``
    numbers = 0  # how many numbers of each token's logits it needs: ``of_logits``
    most_probable = 0  # how many of the sampler's most probable tokens it needs with each token

    # in a step

    def score(self, scored: Scored) -> Mapping[str, Tensor]:
        """Columns of a batch that the learner has scored."""
        return {}

    def learn(self, batch: Weighed, parts: Sequence[Tensor]) -> Mapping[str, float]:
        """What trains beside the policy learns, a step for each part of the rows; its metrics."""
        return {}

    def holds(self, step: int) -> bool:
        """Whether the policy waits in this step."""
        return False

    def choose(self, batch: Weighed, parts: Sequence[Tensor], step: int) -> Mapping[str, Tensor]:
        """Columns that are of whole optimiser steps, each of one part of the rows; ranks agree."""
        return {}

    def of_logits(self, batch: Weighed) -> OfLogits:
        """``numbers`` of each token's logits; called where there are some."""
        return lambda start, logits_nV: logits_nV[:, : self.numbers]

    def gives(self, micro: Micro, numbers_BRM: Tensor) -> Mapping[str, Tensor]:
        """What the policy's loss needs of a micro-batch. ``numbers_BRM``: this term's own, 0 at padding."""
        return {}

    def adds(self, micro: Micro, numbers_BRM: Tensor) -> tuple[Tensor, Tallies] | None:
        """Its loss of a micro-batch, which adds up over a step's, and what it counts."""
        return None

    # in a run

    def begin(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Where RL begins, after any warm start, with the policy's masters; collective."""

    def join(self, optimizer: torch.optim.Optimizer, lr: float) -> Mapping[str, nn.Parameter]:
        """Have parameters trained by the policy's own optimiser, whose rate is ``lr``; under names of their own."""
        return {}

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Whose parameters have joined: looked through where a gradient is not finite."""
        return {}

    @property
    def alike(self) -> Mapping[str, Tensor]:
        """What must be the same on every rank, as the policy is."""
        return {}

    @property
    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """What a checkpoint holds of it, in files by name; never exported or synced."""
        return {}

    @property
    def state(self) -> Mapping[str, Mapping[str, object]]:
        """What a checkpoint says of it, by name: plain values."""
        return {}

    def load(self, checkpoint: Checkpoint) -> None:
        """The inverse of ``tensors`` and ``state``."""
