"""The catalogue declares what is logged, once; and what the plots draw is computed from rows as sums by hand say."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from mantissa.mismatch.metrics import gap_metrics
from mantissa.mismatch.tables import ALL_METRICS
from mantissa.runs.catalogue import BY_NAME, LOOP_METRICS, METRICS, TRAINER_METRICS, undeclared
from mantissa.runs.directory import deterministic
from mantissa.runs.metrics import (
    PHASES,
    ends,
    fit_line,
    phase_times,
    recent_rollouts,
    sequence_log_ratios,
    series,
    token_logps,
)


def test_everything_the_loop_logs_is_declared_once_and_explained() -> None:
    assert max(Counter(metric.name for metric in METRICS).values()) == 1
    assert set(METRICS) == {*LOOP_METRICS, *TRAINER_METRICS, *ALL_METRICS}
    timed = {m.name for m in METRICS if m.name.startswith("time/")}
    assert {f"time/{phase}" for phase in PHASES} == timed - {"time/step", "time/background"}, (
        "beside it, no phase of it"
    )
    for metric in METRICS:
        assert metric.formula, metric.name
        assert metric.unit, metric.name
        low, high = metric.healthy
        assert low is None or high is None or low <= high, metric.name
        assert metric.source or not metric.gated, f"{metric.name} has a range without a source"


def test_undeclared_names_are_found() -> None:
    for row, found in (
        ({"step": 3, "policy/loss": 0.1, "policy/lost": 0.1, "new": 1}, ["new", "policy/lost"]),
        ({"train/loss": 0.1, "precision/format": "fp16", "precision/formats": "fp16"}, ["precision/formats"]),
        ({"reward_part/brevity": 0.1, "reward_part/brevity/chars": 3, "reward_parts": 1}, ["reward_parts"]),
    ):
        assert undeclared(row) == found
    logp_BT = torch.zeros(2, 3)
    assert undeclared(gap_metrics(logp_BT, logp_BT, torch.ones(2, 3, dtype=torch.bool))) == []


def test_only_the_clock_is_outside_the_promise_of_resume() -> None:
    row = dict.fromkeys(BY_NAME, 1.0) | {"step": 1}
    dropped = row.keys() - deterministic(row).keys()
    assert dropped == {name for name in BY_NAME if name.split("/")[0] in ("time", "rate")}
    assert len(dropped) == 15


def test_series_keeps_what_is_there_and_finite() -> None:
    values = [{"a": 1}, {}, {"a": math.nan}, {"a": None}, {"a": -2.5}]
    x, y = series([{"step": i} | value for i, value in enumerate(values, start=1)], "a")
    assert (x.tolist(), y.tolist()) == ([1, 5], [1, -2.5])
    assert series([], "a")[0].size == 0


def test_ends_are_means_of_tenths() -> None:
    assert ends(np.arange(40.0)) == (np.mean([0, 1, 2, 3]), np.mean([36, 37, 38, 39]))
    assert ends(np.arange(1000.0)) == (4.5, 994.5)
    assert ends(np.array([3.0])) == (3.0, 3.0)
    assert ends(np.array([])) is None


def test_slope_agrees_with_numpy_and_with_the_metric() -> None:
    generator = np.random.default_rng(1)
    lengths = generator.integers(5, 60, 50)
    old_BT = torch.from_numpy(-generator.exponential(1, (50, 60)).astype(np.float32))
    new_BT = old_BT + torch.from_numpy(generator.normal(-0.02, 0.1, (50, 60)).astype(np.float32))
    both = list(zip(lengths, old_BT.tolist(), new_BT.tolist(), strict=True))
    rows = [{"rollout_logp": old[:n], "learner_logp": new[:n]} for n, old, new in both]
    length, total = sequence_log_ratios(rows)
    slope, intercept = fit_line(length, total) or (None, None)
    assert np.allclose((slope, intercept), np.polyfit(length, total, 1), rtol=1e-9)
    metric = gap_metrics(old_BT, new_BT, torch.arange(60) < torch.from_numpy(lengths)[:, None])
    assert metric["gap/seq_log_ratio_slope"].item() == pytest.approx(1000 * slope, rel=1e-9)
    assert metric["gap/seq_log_ratio_std"].item() == pytest.approx(total.std(), rel=1e-9)
    assert fit_line(np.array([7.0, 7.0]), np.array([1.0, 2.0])) is None, "no slope without different lengths"
    assert fit_line(np.array([7.0]), np.array([1.0])) is None


def test_log_ratios_are_learner_less_rollout_of_usable_pairs() -> None:
    length, total = sequence_log_ratios([{"rollout_logp": [-1.0, -2.0, -3.0], "learner_logp": [-1.5, -2.0, -2.75]}])
    assert (length.tolist(), total.tolist()) == ([3.0], [-0.25])
    rows = [
        {"rollout_logp": [-1.0], "learner_logp": None},
        {"rollout_logp": [-1.0, -2.0], "learner_logp": [-1.0]},
        {"rollout_logp": [], "learner_logp": []},
        {"rollout_logp": [-1.0, -2.0], "learner_logp": [math.nan, -2.5]},
        {"rollout_logp": [-3.0, None], "learner_logp": [-3.5, -1.0]},
    ]
    assert sequence_log_ratios(rows)[0].size == 0
    old, new = token_logps(rows)
    assert (old.tolist(), new.tolist()) == ([-2.0, -3.0], [-2.5, -3.5]), "single tokens that are finite still count"
    assert token_logps([])[0].size == 0


def test_phase_times_add_up_to_the_step() -> None:
    generator = np.random.default_rng(2)
    rows = []
    for step in range(1, 206):
        parts = {f"time/{name}": float(generator.random()) for name in ("rollout", "update")}
        if step % 10 == 0:
            parts["time/eval"] = 2.0
        rows.append({"step": step, **parts, "time/step": sum(parts.values()) + 0.25})
    times = phase_times(rows, bars=50)
    assert times is not None
    assert times.names == ("rollout", "update", "eval", "other")
    assert (times.per_bar, times.steps.size, times.steps[0], times.steps[-1]) == (5, 41, 3.0, 203.0)
    for found, name in ((times.seconds.sum(axis=0), "time/step"), (times.seconds[0], "time/rollout")):
        assert np.allclose(found, np.array([row[name] for row in rows]).reshape(41, 5).mean(axis=1), rtol=1e-12)
    assert np.allclose(times.seconds[3], 0.25, rtol=1e-9)
    times = phase_times([{"step": i, "time/step": float(i), "time/rollout": float(i)} for i in range(1, 8)], bars=3)
    assert (times.names, times.seconds.tolist()) == (("rollout",), [[2.0, 5.0, 7.0]]), "a last bar of fewer steps"
    assert phase_times([{"step": 1}]) is None


def test_recent_rollouts_stop_when_there_are_enough_tokens(make_run) -> None:
    run = make_run(steps=5)
    assert recent_rollouts(run, tokens=1) == run.read_rollouts(5)
    assert [row["step"] for row in recent_rollouts(run, tokens=10**9)] == [5] * 64 + [4] * 64 + [3] * 64
    run.rollouts_path(4).write_bytes(b"torn")
    assert [row["step"] for row in recent_rollouts(run, tokens=10**9)] == [5] * 64 + [3] * 64
