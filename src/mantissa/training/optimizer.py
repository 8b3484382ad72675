"""The optimiser and its learning rate, as functions of a model and of the number of updates applied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from mantissa.training.moments import Moments, eight_bit_adamw


def adamw(
    model: nn.Module,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    moments: Moments = "fp32",
) -> torch.optim.Optimizer:
    """AdamW over a model's parameters that train; weight decay on matrices only (norms and biases are left alone).

    ``moments``: fp32, or 8bit block by block by torchao (``moments.py``), which keeps each group's rate as a tensor.
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if moments == "8bit":
        return eight_bit_adamw(groups, betas=betas, eps=eps)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def learning_rate(lr: float, warmup: int, decay_until: int | None = None) -> Callable[[int], float]:
    """Learning rate of update n, as a function of applied updates: a skipped step does not move it.

    lr * min(1, (n + 1) / warmup), and with ``decay_until`` also times max(0, 1 - n / decay_until): linear to zero.
    """

    def lr_at(update: int) -> float:
        rising = min(1.0, (update + 1) / warmup) if warmup else 1.0
        falling = max(0.0, 1 - update / decay_until) if decay_until else 1.0
        return lr * rising * falling

    return lr_at
