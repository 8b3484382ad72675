"""Small models, data and losses that several tests share."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.dropin import PrecisionTrainer

Batch = tuple[Tensor, Tensor]


def quiet(line: str) -> None:
    pass


def mlp(seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


def data(count: int, rows: int = 8, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator))
        for _ in range(count)
    ]


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trainer_of(model: nn.Module, precision: str = "fp32", lr: float = 0.05, **options) -> PrecisionTrainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return PrecisionTrainer(model, optimizer, precision, say=options.pop("say", quiet), **options)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class OverflowsAbove(nn.Module):
    """A layer whose gradient is inf where |gradient| is above ``limit``: an overflow at the time of our choosing."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = math.inf

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: torch.where(grad.abs().max() > self.limit, math.inf, grad).to(grad.dtype))
        return x


def fragile(seed: int = 0, dropout: float = 0.5) -> tuple[nn.Sequential, OverflowsAbove]:
    trap = OverflowsAbove()
    return nn.Sequential(mlp(seed, dropout), trap), trap
