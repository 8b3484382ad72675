"""The automatic loss scale: its quantile against the truth, its rules one by one, and its claim against the dynamic
rule, in simulation with the benchmark's own code."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from mantissa.base.errors import MantissaError
from mantissa.precision import FP16, round_to_format
from mantissa.training import AutoRule, AutoScaler, LossScaler, OptimizerStep, ScalerConfig
from mantissa.training import scaler as scaler_module
from mantissa.training.scaler import predicted_peak

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """benchmarks/auto_scale.py, which is not a package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("auto_scale_benchmark", BENCHMARKS / "auto_scale.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


def feed(scaler: LossScaler, log2_peak: float) -> bool:
    """One step whose unscaled peak is 2^log2_peak of the format's largest; True where it overflowed."""
    scaled = log2_peak + math.log2(scaler.scale)
    if scaled > 0:
        scaler.overflowed()
        return True
    scaler.stepped(2.0**scaled)
    return False


@pytest.mark.parametrize("index", [2.0, 4.0])
def test_the_prediction_is_the_quantile_of_a_power_tail(index: float) -> None:
    """Peaks with P(x > q) = 2^(-index q): the prediction is exceeded at the rate asked for, on average over windows.

    The exact exceedance of each prediction is 2^(-index q), so no sampling error but that of the windows.
    """
    rule = AutoRule()
    rng = np.random.default_rng(0)
    exceeded = [
        2.0 ** (-index * predicted_peak(list(rng.exponential(1 / (index * math.log(2)), rule.window)), rule))
        for _ in range(300)
    ]
    assert 0.3 * rule.rate < np.mean(exceeded) < 1.5 * rule.rate


def test_fewer_observations_widen_the_margin() -> None:
    margins = [predicted_peak([0.0] * n, AutoRule()) for n in (1, 10, 100, 400)]
    assert margins == sorted(margins, reverse=True)
    # One peak: a = 7, b = 3 bits, share = 1; the closed form by hand.
    assert margins[0] == pytest.approx(3 * (2000 ** (1 / 7) - 1))
    assert margins[-1] < 2.0


@pytest.mark.parametrize("slope", [0.01, -0.01])
def test_drift_is_extrapolated_to_now(slope: float) -> None:
    """The same peaks with a slope predict what they would without, moved by the slope's length."""
    noise = list(np.random.default_rng(1).normal(0, 0.1, 400))
    drifting = [x + slope * i for i, x in enumerate(noise)]
    assert predicted_peak(drifting, AutoRule()) == pytest.approx(
        predicted_peak(noise, AutoRule()) + slope * 400, abs=0.1
    )


@pytest.mark.parametrize(
    ("peaks", "scale"),
    [
        ([], 65536.0),
        ([-30.0], 2.0 ** math.floor(30 - 3 * (2000 ** (1 / 7) - 1))),  # the range, less the one-step margin
        ([-1000.0] * 20, 2.0**126),  # where fp32 can unscale
        ([200.0] * 20, 1.0),
        ([-math.inf], 65536.0),  # gradients of zero teach nothing
    ],
)
def test_the_scale_that_peaks_lead_to(peaks: list[float], scale: float) -> None:
    scaler = AutoScaler()
    for peak in peaks:
        feed(scaler, peak)
    assert scaler.scale == scale


def test_larger_peaks_lower_the_scale_at_once_and_smaller_ones_wait() -> None:
    rule = AutoRule(patience=10)
    scaler = AutoScaler(rule=rule)
    for _ in range(rule.window):
        feed(scaler, -20.0)
    settled = scaler.scale
    assert settled == 2.0**19
    steps_needed = next(n for n in range(1, 30) if not feed(scaler, -19.25) and scaler.scale < settled)
    assert steps_needed < rule.tail * rule.window  # sooner than the tail consists of them
    lowered = scaler.scale
    scaler.peaks = [-20.0] * rule.window  # as when it has left the window
    for _ in range(rule.patience - 1):
        feed(scaler, -20.0)
        assert scaler.scale == lowered
    feed(scaler, -20.0)
    assert scaler.scale == settled


def test_overflows_in_a_row_gallop() -> None:
    """2^16 to 2 in four: the default retries reach any range that the first scale can be wrong by."""
    scaler = AutoScaler()
    scales = []
    for _ in range(5):
        scaler.overflowed()
        scales.append(scaler.scale)
    assert scales == [2.0**15, 2.0**13, 2.0**9, 2.0, 1.0]
    assert scaler.at_floor
    assert scaler.bucket == 0.0  # one batch, one overflow


def test_hidden_overflows_lower_the_scale_until_they_are_rare() -> None:
    """Inside the network gradients are 2^6 of any parameter's: peaks look harmless, yet 2^L above 2^14 overflows.

    Without the bucket the scale returns to 2^19 ten steps after each overflow.
    """
    rule = AutoRule()
    scaler = AutoScaler(rule=rule)
    overflowed = []
    for _ in range(20_000):
        if scaler.scale > 2.0**14:
            scaler.overflowed()
            overflowed.append(True)
        else:
            scaler.stepped(2.0**-20 * scaler.scale)
            overflowed.append(False)
    assert sum(overflowed[10_000:]) <= 1.2 * rule.rate * 10_000
    assert scaler.scale >= 2.0**12


def test_what_cannot_be_avoided_is_not_paid_for_for_ever() -> None:
    """A batch in 100 is non-finite at any scale: headroom stops at its bound, and goes back once they end."""
    rule = AutoRule(most_headroom=4.0)
    scaler = AutoScaler(rule=rule)
    for t in range(5000):
        if t % 100 == 99:
            scaler.overflowed()
        else:
            feed(scaler, -20.0)
    assert 3.0 < scaler.headroom <= 4.0
    assert scaler.scale >= 2.0**10
    for _ in range(9000):
        feed(scaler, -20.0)
    assert scaler.headroom == 0.0
    assert scaler.scale >= 2.0**18


@pytest.mark.parametrize("at", [3, 500])
def test_a_resumed_run_takes_the_same_decisions(at: int) -> None:
    rng = np.random.default_rng(2)
    peaks = [float(x) for x in -18 + 0.8 * rng.standard_t(3, 900)]
    whole, first, second = AutoScaler(), AutoScaler(), AutoScaler()
    for peak in peaks[:at]:
        feed(first, peak)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for peak in peaks[:at]:
        feed(whole, peak)
    for peak in peaks[at:]:
        assert feed(whole, peak) == feed(second, peak)
        assert whole.state_dict() == second.state_dict()


def test_states_of_the_dynamic_rule_are_continued() -> None:
    dynamic = LossScaler(ScalerConfig(initial=2.0**9))
    scaler = AutoScaler()
    feed(scaler, -5.0)
    scaler.load_state_dict(dynamic.state_dict())
    assert (scaler.scale, scaler.peaks, scaler.bucket) == (2.0**9, [], -1.0)
    dynamic.load_state_dict(AutoScaler().state_dict())
    assert dynamic.scale == 65536.0


def test_the_optimiser_step_tells_it_the_peak() -> None:
    """Through OptimizerStep: the peak it remembers is the unscaled gradient in units of 65504."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    scaler = AutoScaler()
    step = OptimizerStep({"w": parameter}, torch.optim.SGD([parameter], lr=1.0), scaler, FP16, lambda update: 1.0)

    def backward(scale: float) -> None:
        parameter.grad = round_to_format(torch.tensor([0.25, -0.125]) * scale, FP16)

    assert step.run(backward).kind == "stepped"
    assert scaler.peaks == [pytest.approx(math.log2(0.25 / 65504))]


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"window": 0}, {"tail": 0.0}, {"patience": 0}, {"prior_excess": 0.0}])
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(MantissaError, match=r"automatic loss scaling: .*expected"):
        AutoRule(**wrong)


def test_the_benchmark_counts_what_a_cast_to_fp16_does(bench: ModuleType) -> None:
    """Its binades against the real rounding of the same gradients: overflow and fraction flushed, at five scales."""
    steps, size = 3, 4096
    peaks, below = bench.stream("t3", "right", 0.0, steps, seed=5)
    rng = np.random.default_rng(5)
    level = -np.median(bench.draw("t3", rng, 256, size).max(1)) - 4.0
    common = level + 0.5 * rng.standard_normal(steps)
    gradients = torch.from_numpy(2.0 ** (bench.draw("t3", rng, steps, size) + common[:, None]))
    for exponent in (8, 12, 16, 20, 24):
        scaled = round_to_format(gradients * 2.0**exponent, FP16)
        flushed = (scaled == 0).double().mean(1).numpy()
        assert np.array_equal(flushed, below[:, -25 - exponent - bench.LOWEST])
        assert np.array_equal(scaled.isinf().any(1).numpy(), 2.0 ** (peaks + exponent) >= bench.OVERFLOW)


def totals(bench: ModuleType, runs: list) -> tuple[float, float]:
    """Over all runs: steps skipped, and the mean fraction flushed."""
    result = {row["metric"]: row["per_seed"] for row in bench.summary("steady", "emulated", "auto", runs)}
    return sum(result["skipped_steps"]), float(np.mean(result["flushed_fraction"]))


def test_lower_on_both_counts_pooled_over_drifts_of_one_noise(bench: ModuleType) -> None:
    """Student-t gradients of 3 degrees of freedom, steady, rising and falling, seeds 0-2: fewer steps skipped and less
    flushed than the dynamic rule, at its interval of 2000 with the default rate and at 400 with a rate of 1/600.

    Pooled, and of this noise: case by case one count is usually traded for the other (results/auto_scale.jsonl).
    """
    streams = [bench.stream("t3", "right", d, 3000, seed, size=1024) for seed in range(3) for d in (0.0, 1e-3, -1e-3)]
    for dynamic, auto in (("dynamic 2000", "auto"), ("dynamic 400", "auto 1/600")):
        (skips, flushed), (auto_skips, auto_flushed) = (
            totals(bench, [bench.replay(bench.CONTENDERS[name](), *s) for s in streams]) for name in (dynamic, auto)
        )
        assert auto_skips < 0.85 * skips, (dynamic, auto_skips, skips)
        assert auto_flushed < 0.9 * flushed, (dynamic, auto_flushed, flushed)


@pytest.mark.parametrize(
    ("above", "bits"),
    [(-0.25, 0), (-0.5, 0), (-0.75, -1), (-1.25, -1), (-1.5, -1), (-1.75, -2), (-2.5, -2), (-2.75, -3)],
)
def test_a_target_below_lowers_the_scale_to_the_nearest_integer(
    monkeypatch: pytest.MonkeyPatch, above: float, bits: int
) -> None:
    """More than half a bit below; a half counts as the integer above."""
    monkeypatch.setattr(scaler_module, "predicted_peak", lambda peaks, rule: -(10.0 + above))
    scaler = AutoScaler(ScalerConfig(initial=2.0**10))
    feed(scaler, -30.0)
    assert math.log2(scaler.scale) - 10 == bits
    assert scaler.clean_steps == (0 if bits else 1)  # since it last changed


@pytest.mark.parametrize(("above", "bits"), [(0.0, 0), (0.75, 0), (1.0, 1), (1.75, 1), (2.0, 2), (3.9375, 3)])
def test_a_target_above_raises_the_scale_to_the_integer_below_after_patience(
    monkeypatch: pytest.MonkeyPatch, above: float, bits: int
) -> None:
    """A bit or more above, in each of ``patience`` steps, and no sooner; then the count begins anew."""
    monkeypatch.setattr(scaler_module, "predicted_peak", lambda peaks, rule: -(10.0 + above))
    scaler = AutoScaler(ScalerConfig(initial=2.0**10), AutoRule(patience=4))
    scaler.peaks = [-30.0] * 50
    for _ in range(3):
        feed(scaler, -30.0)
        assert scaler.scale == 2.0**10
    feed(scaler, -30.0)
    assert math.log2(scaler.scale) - 10 == bits
    assert scaler.steps_above == 0


def test_one_step_without_a_target_above_begins_the_wait_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    above = iter([2.0, 2.0, 2.0, 0.5, 2.0, 2.0, 2.0, 2.0])
    monkeypatch.setattr(scaler_module, "predicted_peak", lambda peaks, rule: -(10.0 + next(above)))
    scaler = AutoScaler(ScalerConfig(initial=2.0**10), AutoRule(patience=4))
    scaler.peaks = [-30.0] * 50
    exponents = []
    for _ in range(8):
        feed(scaler, -30.0)
        exponents.append(math.log2(scaler.scale))
    assert exponents == [10.0] * 7 + [12.0]


@pytest.mark.parametrize("at", range(1, 12))
def test_a_run_resumed_while_it_waits_raises_the_scale_at_the_same_step(at: int) -> None:
    """Peaks 16 bits lower than the scale is for; saved after each of the steps that patience lasts, and around them."""
    rule = AutoRule(patience=10)
    scalers = AutoScaler(ScalerConfig(initial=2.0**4), rule), AutoScaler(rule=rule)
    for each in scalers:
        each.peaks = [-20.0] * 100
    raised = []
    for step in range(1, 14):
        for each in scalers[: 1 + (step > at)]:
            feed(each, -20.0)
        if step == at:
            scalers[1].load_state_dict(json.loads(json.dumps(scalers[0].state_dict())))
        if step >= at:
            assert scalers[1].state_dict() == scalers[0].state_dict()
        raised.append(scalers[0].scale > 2.0**4)
    assert raised == [False] * 9 + [True] * 4


@pytest.mark.parametrize("overflows", range(1, 5))
def test_a_run_resumed_amid_overflows_lowers_the_scale_as_far(overflows: int) -> None:
    """1, 2, 4, 8 bits in a row, whichever of them the state was saved after, and the same headroom afterwards."""
    whole, resumed = AutoScaler(ScalerConfig(initial=2.0**40)), AutoScaler()
    for _ in range(overflows):
        whole.overflowed()
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for each in (whole, resumed):
        each.overflowed()
        assert each.scale == 2.0 ** (40 - (2 ** (overflows + 1) - 1))
        feed(each, -60.0)
        each.overflowed()
    assert resumed.state_dict() == whole.state_dict()
    assert resumed.headroom == pytest.approx(1.0 - AutoRule().rate)
