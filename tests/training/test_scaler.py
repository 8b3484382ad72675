"""The loss scaler against ``torch.amp.GradScaler`` as the oracle, and its own rules: floor, validation, state."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mantissa.base.errors import MantissaError
from mantissa.precision import BF16, FP16, FP32, NumberFormat, round_to_format
from mantissa.training import AutoScaler, FixedScaler, LossScaler, OptimizerStep, ScalerConfig, scaler_for

TINY = torch.finfo(torch.float32).tiny  # a floor too low to interfere: GradScaler has none


@dataclass
class Trace:
    """Per step: the scale after it, whether it was applied, and the weights, to the last bit."""

    scales: list[float]
    applied: list[bool]
    weights: list[list[float]]


def backward(parameter: nn.Parameter, gradient: list[float], scale: float, fmt: NumberFormat) -> None:
    """What a backward pass in ``fmt`` leaves: scale x gradient, rounded, inf beyond the largest value."""
    scaled = torch.tensor(gradient) * torch.tensor(scale)
    parameter.grad = round_to_format(scaled, fmt)


def torch_trace(gradients: list[list[float]], config: ScalerConfig, fmt: NumberFormat, save_at: int) -> Trace:
    """What ``torch.amp.GradScaler`` does; saved and loaded into a new one before step ``save_at``."""
    options = {
        "init_scale": config.initial,
        "growth_factor": config.growth_factor,
        "backoff_factor": config.backoff_factor,
        "growth_interval": config.growth_interval,
    }
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(i))
    scaler = torch.amp.GradScaler("cpu", **options)
    trace = Trace([], [], [])
    for i, gradient in enumerate(gradients):
        if i == save_at:
            state = scaler.state_dict()
            scaler = torch.amp.GradScaler("cpu", **options)
            scaler.load_state_dict(state)
        scaler.scale(torch.zeros(()))  # creates its tensors
        backward(parameter, gradient, scaler.get_scale(), fmt)
        scaler.step(optimizer)
        scaler.update()
        trace.scales.append(scaler.get_scale())
        trace.applied.append(i in steps)
        trace.weights.append(parameter.tolist())
    return trace


def our_trace(gradients: list[list[float]], config: ScalerConfig, fmt: NumberFormat, save_at: int) -> Trace:
    parameter = nn.Parameter(torch.ones(2))

    def new() -> OptimizerStep:
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        return OptimizerStep({"w": parameter}, optimizer, LossScaler(config), fmt, lambda update: 0.5)

    step = new()
    trace = Trace([], [], [])
    for i, gradient in enumerate(gradients):
        if i == save_at:
            state = json.loads(json.dumps(step.state_dict()))
            step = new()
            step.load_state_dict(state)
        outcome = step.run(lambda scale, gradient=gradient: backward(parameter, gradient, scale, fmt))
        trace.scales.append(step.scaler.scale)
        trace.applied.append(outcome.kind == "stepped")
        trace.weights.append(parameter.tolist())
    return trace


# Gradients of 2^-2 to 2^9 against fp16 and a first scale of 2^10: natural overflows; inf: one that no scale avoids.
magnitudes = st.one_of(st.floats(0.25, 512.0, width=32), st.just(math.inf))


@given(
    st.lists(st.lists(magnitudes, min_size=2, max_size=2), max_size=40),
    st.sampled_from([1024.0, 1000.1]),  # the second is no fp32 value, and 1.1 and 0.7 leave fp32's grid at once
    st.sampled_from([2.0, 4.0, 1.5, 1.1]),
    st.sampled_from([0.5, 0.25, 0.7]),
    st.integers(1, 5),
    st.integers(0, 40),
)
@settings(max_examples=60, deadline=None)
def test_scales_steps_and_skips_are_torch_s(
    gradients: list[list[float]], initial: float, growth: float, backoff: float, interval: int, save_at: int
) -> None:
    factors = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    config = ScalerConfig(initial=initial, floor=TINY, retries=0, **factors)
    assert our_trace(gradients, config, FP16, save_at) == torch_trace(gradients, config, FP16, save_at)


def test_growth_beyond_fp32_is_given_up_as_torch_does() -> None:
    """2^126 -> 2^127 -> 2^128 is inf in fp32, not in a Python float: the scale stays, the count starts again."""
    gradients = [[2.0**-120, 2.0**-121]] * 9
    config = ScalerConfig(initial=2.0**126, growth_interval=2, floor=TINY, retries=0)
    ours = our_trace(gradients, config, FP32, save_at=5)
    assert ours.scales[-1] == 2.0**127
    assert ours == torch_trace(gradients, config, FP32, save_at=5)


def test_scale_stops_at_the_floor() -> None:
    scaler = LossScaler(ScalerConfig(initial=4.0, floor=1.0))
    for _ in range(5):
        scaler.overflowed()
    assert scaler.scale == 1.0
    assert scaler.at_floor


@pytest.mark.parametrize(
    ("name", "wrong", "good"),
    [
        ("initial", [0.5, 1e39, math.nan], 1.0),
        ("growth_factor", [0.5], 1.0),
        ("backoff_factor", [0.0, 1.0], 0.99),
        ("growth_interval", [0], 1),
        ("retries", [-1], 0),
        ("floor", [0.0, math.nan], 2.0**-126),
    ],
)
def test_nonsense_is_refused(name: str, wrong: list[float], good: float) -> None:
    ScalerConfig(**{name: good})  # the bound itself
    for value in wrong:
        with pytest.raises(MantissaError, match=r"loss scaling: .*expected"):
            ScalerConfig(**{name: value})


def test_a_fixed_scale_never_changes_and_reports_overflow() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    step = OptimizerStep({"w": parameter}, optimizer, FixedScaler(1024.0), FP16, lambda update: 0.5)
    outcomes = [
        step.run(lambda scale, size=size: backward(parameter, [size, 0.0], scale, FP16)) for size in (1.0, 100.0, 1.0)
    ]
    assert [(o.kind, o.overflows, o.scale) for o in outcomes] == [
        ("stepped", 0, 1024.0),
        ("skipped", 1, 1024.0),  # no retry: the same scale would overflow again
        ("stepped", 0, 1024.0),
    ]
    assert step.skipped == 1
    assert parameter.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("scale", "patience"), [(1024.0, 10), (1000.0, 10), (1.0, 0), (0.25, 0)])
def test_a_fixed_scale_that_always_overflows_is_not_a_matter_of_scaling(scale: float, patience: int) -> None:
    """After as many overflows in a row as halving down to 1 would have taken; a clean step begins anew."""
    scaler = FixedScaler(scale)
    for _ in range(patience):
        assert not scaler.at_floor
        scaler.overflowed()
    assert scaler.at_floor
    scaler.stepped(0.5)
    assert scaler.at_floor == (patience == 0)


@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**100])
def test_any_number_of_overflows_in_a_row_is_counted(scale: float) -> None:
    """A run that loses every batch for days, and one that goes on from a state with such a count."""
    scaler = FixedScaler(scale)
    for _ in range(1100):
        scaler.overflowed()
    assert scaler.at_floor
    scaler.load_state_dict({"clean_steps": 0, "overflows_in_a_row": 2**63 - 1})
    assert scaler.at_floor
    scaler.stepped(0.5)
    assert scaler.at_floor is (scale <= 1.0)


def test_the_automatic_rule_goes_on_from_any_saved_count() -> None:
    scaler = AutoScaler(ScalerConfig(initial=2.0**16))
    scaler.load_state_dict(scaler.state_dict() | {"overflows_in_a_row": 2**63 - 1, "steps_above": 2**63 - 1})
    scaler.overflowed()
    assert scaler.scale == scaler.floor
    assert scaler.overflows_in_a_row <= 2**8


def test_a_fixed_scale_survives_another_s_state() -> None:
    """A run that fell back from fp16 to bf16 scales by 1, whatever the checkpoint says; counts are continued."""
    scaler = LossScaler.disabled()
    scaler.load_state_dict(LossScaler().state_dict())
    assert scaler.scale == 1.0
    one, other = FixedScaler(64.0), FixedScaler(64.0)
    one.stepped(0.1)
    one.overflowed()
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.state_dict() == one.state_dict() == {"scale": 64.0, "clean_steps": 0, "overflows_in_a_row": 1}


def test_scaler_for_makes_what_was_asked() -> None:
    config = ScalerConfig(initial=256.0)
    assert type(scaler_for("dynamic", FP16)) is LossScaler
    assert type(scaler_for("auto", FP16)) is AutoScaler
    assert scaler_for(config, FP16).scale == 256.0
    assert scaler_for(config, FP16, retries=1).config == ScalerConfig(initial=256.0, retries=1)
    assert scaler_for("auto", FP16, retries=2).config.retries == 2
    assert (scaler_for(1024, FP16).scale, scaler_for(1024, FP16, retries=3).config.retries) == (1024.0, 0)
    assert scaler_for(1000.1, FP16).scale == float(torch.tensor(1000.1))


@pytest.mark.parametrize("fmt", [BF16, FP32])
def test_formats_of_wide_range_are_scaled_only_by_a_number(fmt: NumberFormat) -> None:
    assert [scaler_for(scale, fmt).scale for scale in ("dynamic", "auto", ScalerConfig(), 8.0)] == [1.0, 1.0, 1.0, 8.0]


@pytest.mark.parametrize("wrong", [0, -2.0, math.nan, math.inf, 1e39, 1e-39])
def test_numbers_that_cannot_scale_are_refused(wrong: float) -> None:
    with pytest.raises(MantissaError, match=r"a fixed loss scale of .*expected a positive number that fp32 holds"):
        scaler_for(wrong, FP16)


@pytest.mark.parametrize("wrong", ["dynamc", "1024", True, None])
def test_words_that_name_no_rule_are_refused(wrong) -> None:
    with pytest.raises(MantissaError, match=r"loss scale .*: expected 'dynamic', 'auto'") as error:
        scaler_for(wrong, FP16)
    assert ("did you mean 'dynamic'" in str(error.value)) == (wrong == "dynamc")
