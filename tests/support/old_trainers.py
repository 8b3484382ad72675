"""Trainers of the old interface on toy models, which its tests share: simulated, as a CPU's fallback is fp32."""

from __future__ import annotations

import torch
from torch import nn

from mantissa.dropin.compat import ExtendedFP16Config, ExtendedFP16Trainer, FP16Trainer, FP16TrainingConfig
from toys import Batch, cross_entropy, mlp


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def basic(model: nn.Module | None = None, **fields) -> FP16Trainer:
    model = mlp() if model is None else model
    return FP16Trainer(model, sgd(model), FP16TrainingConfig(**({"backend": "simulated"} | fields)))


def extended(model: nn.Module | None = None, **fields) -> ExtendedFP16Trainer:
    model = mlp() if model is None else model
    return ExtendedFP16Trainer(model, sgd(model), ExtendedFP16Config(**({"backend": "simulated"} | fields)))


def learn(trainer: FP16Trainer, batch: Batch) -> bool:
    return trainer.backward_and_step(trainer.training_step(batch, cross_entropy))
