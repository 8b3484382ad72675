"""Two terms of a few lines: a bonus on the policy's entropy, and the tokens that a loss treats otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mantissa.algorithms import Accumulator, EntropyConfig, Selecting
from mantissa.base.seeds import generator
from mantissa.precision import masked_sum
from mantissa.rl.experience import Weighed
from mantissa.rl.terms.base import Micro, Tallies, Term


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
