from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mantissa.mismatch import gap_metrics
from mantissa.runs.metrics import ends, fit_line, phase_times, recent_rollouts, sequence_log_ratios, series, token_logps


def rollout(length: int, generator: np.random.Generator, step: int = 1) -> dict:
    rollout_T = -generator.exponential(1, length).astype(np.float32)
    learner_T = (rollout_T + generator.normal(0, 0.1, length) - 0.02).astype(np.float32)
    return {"step": step, "length": length, "rollout_logp": rollout_T.tolist(), "learner_logp": learner_T.tolist()}


def test_series_keeps_what_is_there_and_finite() -> None:
    rows = [
        {"step": 1, "a": 1},
        {"step": 2},
        {"step": 3, "a": math.nan},
        {"step": 4, "a": None},
        {"step": 7, "a": -2.5},
    ]
    x, y = series(rows, "a")
    assert x.tolist() == [1, 7]
    assert y.tolist() == [1, -2.5]
    assert series([], "a")[0].size == 0


def test_ends_are_means_of_tenths() -> None:
    values = np.arange(40.0)
    assert ends(values) == (np.mean([0, 1, 2, 3]), np.mean([36, 37, 38, 39]))
    assert ends(np.arange(1000.0)) == (4.5, 994.5)
    assert ends(np.array([3.0])) == (3.0, 3.0)
    assert ends(np.array([])) is None


def test_slope_agrees_with_numpy_and_with_the_metric() -> None:
    generator = np.random.default_rng(1)
    rows = [rollout(int(n), generator) for n in generator.integers(5, 60, 50)]
    length, total = sequence_log_ratios(rows)
    slope, intercept = fit_line(length, total) or (None, None)
    assert np.allclose((slope, intercept), np.polyfit(length, total, 1), rtol=1e-9)

    widest = max(len(row["rollout_logp"]) for row in rows)
    old_BT, new_BT = torch.zeros(len(rows), widest), torch.zeros(len(rows), widest)
    mask_BT = torch.zeros(len(rows), widest, dtype=torch.bool)
    for b, row in enumerate(rows):
        n = len(row["rollout_logp"])
        old_BT[b, :n] = torch.tensor(row["rollout_logp"])
        new_BT[b, :n] = torch.tensor(row["learner_logp"])
        mask_BT[b, :n] = True
    metric = gap_metrics(old_BT, new_BT, mask_BT)
    assert metric["gap/seq_log_ratio_slope"].item() == pytest.approx(1000 * slope, rel=1e-9)
    assert metric["gap/seq_log_ratio_std"].item() == pytest.approx(total.std(), rel=1e-9)


def test_no_slope_without_different_lengths() -> None:
    assert fit_line(np.array([7.0, 7.0]), np.array([1.0, 2.0])) is None
    assert fit_line(np.array([7.0]), np.array([1.0])) is None


def test_log_ratios_are_learner_less_rollout_summed_in_float64() -> None:
    row = {"rollout_logp": [-1.0, -2.0, -3.0], "learner_logp": [-1.5, -2.0, -2.75]}
    length, total = sequence_log_ratios([row])
    assert (length.tolist(), total.tolist()) == ([3.0], [-0.25])


def test_rows_without_a_usable_pair_are_left_out() -> None:
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
    assert times.per_bar == 5
    assert times.steps.size == 41
    assert times.steps[0] == 3.0
    assert times.steps[-1] == 203.0
    whole = np.array([row["time/step"] for row in rows])
    assert np.allclose(times.seconds.sum(axis=0), whole.reshape(41, 5).mean(axis=1), rtol=1e-12)
    rollout_s = np.array([row["time/rollout"] for row in rows]).reshape(41, 5).mean(axis=1)
    assert np.allclose(times.seconds[0], rollout_s, rtol=1e-12)
    assert np.allclose(times.seconds[3], 0.25, rtol=1e-9)


def test_phase_times_with_a_last_bar_of_fewer_steps() -> None:
    rows = [{"step": i, "time/step": float(i), "time/rollout": float(i)} for i in range(1, 8)]
    times = phase_times(rows, bars=3)
    assert times is not None
    assert times.names == ("rollout",)
    assert times.seconds.tolist() == [[2.0, 5.0, 7.0]]
    assert phase_times([{"step": 1}]) is None


def test_recent_rollouts_stop_when_there_are_enough_tokens(make_run) -> None:
    run = make_run(steps=5)
    last = run.read_rollouts(5)
    assert recent_rollouts(run, tokens=1) == last
    everything = recent_rollouts(run, tokens=10**9)
    assert [row["step"] for row in everything] == [5] * 64 + [4] * 64 + [3] * 64
    run.rollouts_path(4).write_bytes(b"torn")
    assert [row["step"] for row in recent_rollouts(run, tokens=10**9)] == [5] * 64 + [3] * 64
