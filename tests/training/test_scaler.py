"""The loss scaler against ``torch.amp.GradScaler`` as the oracle, and its own rules: floor, validation, state."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mantissa.errors import MantissaError
from mantissa.precision import BF16, FP16, FP32
from mantissa.training import LossScaler, ScalerConfig


def torch_scales(overflows: list[bool], interval: int) -> list[float]:
    """The sequence of scales of torch's own scaler when these steps overflow."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=interval)
    scales = []
    for overflow in overflows:
        scaler.scale(parameter.sum()).backward()
        assert parameter.grad is not None
        if overflow:
            parameter.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_scales_follow_torch(overflows: list[bool], interval: int) -> None:
    ours = LossScaler(ScalerConfig(growth_interval=interval, floor=2.0**-60))
    scales = []
    for overflow in overflows:
        if overflow:
            ours.overflowed()
        else:
            ours.stepped()
        scales.append(ours.scale)
    assert scales == torch_scales(overflows, interval)


def test_scale_stops_at_the_floor() -> None:
    scaler = LossScaler(ScalerConfig(initial=4.0, floor=1.0))
    for _ in range(5):
        scaler.overflowed()
    assert scaler.scale == 1.0
    assert scaler.at_floor


def test_scale_never_grows_to_infinity() -> None:
    scaler = LossScaler(ScalerConfig(initial=1e308, growth_interval=1, growth_factor=4.0))
    scaler.stepped()
    assert scaler.scale == 1e308


def test_disabled_scaler_scales_by_one_for_ever() -> None:
    scaler = LossScaler.disabled()
    for _ in range(1000):
        scaler.stepped()
    assert scaler.scale == 1.0
    assert scaler.at_floor


@pytest.mark.parametrize(("fmt", "initial"), [(FP16, 1024.0), (BF16, 1.0), (FP32, 1.0)])
def test_only_formats_of_small_range_are_scaled(fmt, initial) -> None:
    assert LossScaler.for_format(fmt, ScalerConfig(initial=1024.0)).scale == initial


def test_state_survives_a_round_trip() -> None:
    scaler = LossScaler(ScalerConfig(growth_interval=10))
    scaler.overflowed()
    for _ in range(7):
        scaler.stepped()
    other = LossScaler(ScalerConfig(growth_interval=10))
    other.load_state_dict(scaler.state_dict())
    for _ in range(3):
        scaler.stepped()
        other.stepped()
    assert scaler.state_dict() == other.state_dict() == {"scale": 65536.0, "clean_steps": 0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial": 0.5},
        {"growth_factor": 0.5},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
        {"retries": -1},
        {"floor": 0.0},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(MantissaError, match=r"loss scaling: .*expected"):
        ScalerConfig(**wrong)
