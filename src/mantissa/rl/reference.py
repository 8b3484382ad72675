"""The reference: a frozen copy of the policy that some algorithms hold the learner to, in a precision of its own.

It is taken from the fp32 masters when RL begins (after any warm start), rounded once to its format and kept in its
kernels' dtype: on a GPU a bf16 reference takes two bytes a weight. The learner rounds the same masters by the same rule
where it uses them, so in the learner's own format an unchanged policy and its reference have equal log-probs to the
last bit, and their KL begins at exactly 0. In another format it begins at the rounding error of the two.

``refresh_every`` makes the reference follow: after that many optimiser steps it becomes a copy of the policy as it then
is. What it is a copy of is part of a checkpoint, tensors and all: they cannot be had from the masters of a later step.

Legend: B sequences, R response tokens right-padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mantissa.bounds import count
from mantissa.kernels import Kernels
from mantissa.model import CopiedPolicy, ModelConfig
from mantissa.ranks import ALONE, Ranks
from mantissa.rl.experience import Sequences
from mantissa.rl.forward import score
from mantissa.training import load_weights


class Reference:
    """A frozen policy. ``version``: the learner's version that it is a copy of; -1 before the first ``take``.

    ``refresh_every``: optimiser steps after which it is taken anew; None: never. ``refreshes``: how often it was.
    ``micro_batch_tokens``: padded tokens that a forward holds.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        *,
        temperature: float,
        micro_batch_tokens: int,
        refresh_every: int | None = None,
        device: torch.device | str = "cpu",
        ranks: Ranks = ALONE,
    ) -> None:
        self.kernels, self.temperature, self.ranks = kernels, temperature, ranks
        self.micro_batch_tokens, self.refresh_every = micro_batch_tokens, refresh_every
        self._copies = CopiedPolicy(config, kernels, device, "reference")
        self.version, self.refreshes = -1, 0

    def take(self, masters: Mapping[str, Tensor], version: int) -> None:
        """Become a copy of the policy with these fp32 masters, rounded or quantised once.

        A master that the format cannot hold is an error: comparing with such a policy would compare with nothing.
        """
        self.version = -1  # until every tensor is there: half a copy is nobody's policy
        self._copies.take(masters)
        self.version = version

    def follow(self, masters: Mapping[str, Tensor], version: int) -> bool:
        """Be taken anew where ``refresh_every`` updates have passed since the last time; whether it was."""
        if self.refresh_every is None or version - self.version < self.refresh_every:
            return False
        self.take(masters, version)
        self.refreshes += 1
        return True

    def score(self, sequences: Sequences) -> Tensor:
        """Log-prob of every response token under the reference; B, R, fp32, 0 at padding."""
        if self.version < 0:
            raise RuntimeError("the reference holds no weights yet: take it first")
        return score(
            self._copies.decoder,
            self.kernels,
            sequences,
            self.temperature,
            micro_batch_tokens=self.micro_batch_tokens,
            ranks=self.ranks,
        )

    @property
    def weights(self) -> dict[str, Tensor]:
        """The copy, by parameter name, as the kernels hold it."""
        return self._copies.weights

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; the tensors are ``weights``."""
        return {"version": self.version, "refreshes": self.refreshes}

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """The inverse of ``state_dict`` and ``weights``, bit for bit."""
        version, refreshes = (count(state[name], f"reference's {name}") for name in ("version", "refreshes"))
        self._copies.make_room(tensors)
        load_weights(self.weights, tensors)
        self.version, self.refreshes = version, refreshes
