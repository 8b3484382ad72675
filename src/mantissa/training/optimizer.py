"""The optimiser and its learning rate, as functions of a model and of the number of updates applied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def adamw(model: nn.Module, *, betas: tuple[float, float], eps: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over a model's parameters; weight decay on matrices only (norms and biases are left alone)."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def warmup_then_constant(lr: float, warmup: int) -> Callable[[int], float]:
    """Learning rate of update n: lr * min(1, (n + 1) / warmup). A function of applied updates: skips do not move it."""

    def lr_at(update: int) -> float:
        return lr * min(1.0, (update + 1) / warmup) if warmup else lr

    return lr_at
