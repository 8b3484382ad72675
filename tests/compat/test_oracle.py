"""Scales, steps and weights against ``torch.amp.GradScaler("cpu")`` with ``clip_grad_norm_(1.0)``, on one sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mantissa.compat import FP16Trainer, FP16TrainingConfig
from mantissa.kernels import autocast_for
from mantissa.precision import PRESETS, resolve
from toys import cross_entropy, data, fragile


@dataclass
class Trace:
    scales: list[float]
    stepped: list[bool]
    weights: list[dict[str, Tensor]]


def limits(steps: int, seed: int) -> list[float]:
    """How large an activation's scaled gradient may be, step by step: mostly anything, sometimes little or nothing."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(steps, generator=generator)
    return [0.0 if d < 0.1 else 64.0 if d < 0.25 else math.inf for d in draws.tolist()]


def ours(config: FP16TrainingConfig, steps: int, seed: int) -> Trace:
    model, trap = fragile(dropout=0.2)
    trainer = FP16Trainer(model, torch.optim.AdamW(model.parameters(), lr=0.01), config)
    assert trainer.scaler is not None
    trace = Trace([], [], [])
    torch.manual_seed(seed)
    for batch, trap.limit in zip(data(steps), limits(steps, seed), strict=True):
        loss = trainer.training_step(batch, cross_entropy)
        trace.stepped.append(trainer.backward_and_step(loss))
        trace.scales.append(trainer.scaler.get_scale())
        trace.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return trace


def oracle(config: FP16TrainingConfig, steps: int, seed: int) -> Trace:
    """The loop of torch's documentation. Its steps are seen by whether Adam counted one."""
    model, trap = fragile(dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    autocast = autocast_for(resolve(PRESETS["fp16"], "cpu").learner, "cpu")
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=config.loss_scale,
        growth_factor=config.growth_factor,
        backoff_factor=config.backoff_factor,
        growth_interval=config.growth_interval,
    )
    trace = Trace([], [], [])
    torch.manual_seed(seed)
    first = next(model.parameters())
    for batch, trap.limit in zip(data(steps), limits(steps, seed), strict=True):
        before = int(optimizer.state[first]["step"]) if first in optimizer.state else 0
        optimizer.zero_grad()
        with autocast.forward():
            loss = cross_entropy(model, batch)
        with autocast.backward():
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        after = int(optimizer.state[first]["step"]) if first in optimizer.state else 0
        trace.stepped.append(after > before)
        trace.scales.append(scaler.get_scale())
        trace.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return trace


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_scales_steps_and_weights_are_gradscalers(seed: int) -> None:
    config = FP16TrainingConfig(loss_scale=2.0**12, growth_interval=4)
    a, b = ours(config, 60, seed), oracle(config, 60, seed)
    assert a.scales == b.scales
    assert a.stepped == b.stepped
    for mine, theirs in zip(a.weights, b.weights, strict=True):
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert a.stepped.count(False) > 5
    assert any(after < before for before, after in zip(a.scales, a.scales[1:], strict=False))
    assert any(after > before for before, after in zip(a.scales, a.scales[1:], strict=False))


def test_factors_that_are_no_powers_of_two_too() -> None:
    """GradScaler keeps its scale in fp32 and we in double, hence the last digits."""
    config = FP16TrainingConfig(loss_scale=3000.0, growth_interval=3, growth_factor=1.7, backoff_factor=0.6)
    a, b = ours(config, 40, 5), oracle(config, 40, 5)
    assert a.scales == pytest.approx(b.scales, rel=1e-5)
    assert a.stepped == b.stepped
    for name, value in a.weights[-1].items():
        torch.testing.assert_close(value, b.weights[-1][name], rtol=0, atol=0.02)
