"""One optimiser step's micro-batches, and what must be put back before they are computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LossFunction = Callable[[nn.Module, Any], Tensor]


@dataclass
class Micro:
    """One batch of a window. A weight of 0 takes part in every exchange and changes nothing. Without ``loss_fn`` it was
    computed elsewhere and cannot be computed again."""

    batch: Any
    loss_fn: LossFunction | None
    weight: float
    loss: Tensor | None = None


def mean_loss(window: Sequence[Micro]) -> Tensor:
    """Weighted mean loss of this rank's micro-batches, sum_i w_i L_i / sum_i w_i; 0 where all only take part."""
    total = sum(micro.weight for micro in window)
    losses = [(m.loss, m.weight / total) for m in window if m.loss is not None and m.weight > 0]
    return sum((loss * share for loss, share in losses), torch.zeros(()))


class Keeper:
    """What a forward changes besides gradients: torch's generators (dropout), and the model's persistent buffers (a
    batch norm's running statistics, which a repeated batch would count twice)."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._slots = [
            (module, name)
            for module in model.modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self.remember()

    def remember(self) -> None:
        """Keep the present state, in place of what was kept before."""
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        present = ((module, name, module._buffers[name]) for module, name in self._slots)
        self._buffers = [(module, name, buffer.clone()) for module, name, buffer in present if buffer is not None]

    def restore(self) -> None:
        """Put generators and buffers back."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        self.restore_buffers()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Put the buffers back, and let the generators go on."""
        for module, name, value in self._buffers:
            buffer = module._buffers[name]
            if buffer is not None:
                buffer.copy_(value)
