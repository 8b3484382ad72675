"""A comparison's numbers against sums written out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mantissa.runs.compare.data import Group, Run
from mantissa.runs.compare.stats import (
    curve_of,
    ends_of,
    final_accuracy,
    problems_of,
    rate,
    seconds_by_phase,
    total,
    training_accuracy,
    wall_clock,
    wilson,
)


def run(rows: list[dict], config: dict | None = None) -> Run:
    return Run(Path("run"), rows, config, {})


def group(*runs: Run) -> Group:
    return Group("g", runs, 0)


def rows_of(name: str, values: list, first: int = 1) -> list[dict]:
    return [{"step": i} | ({} if v is None else {name: v}) for i, v in enumerate(values, start=first)]


EVALUATED = {"evaluation": {"problems": 8, "samples": 4}, "task": {"heldout_size": 256}}


def test_a_curve_is_the_mean_over_seeds_where_all_have_it() -> None:
    a, b = run(rows_of("m", [1.0, 2.0, None, 4.0, 9.0])), run(rows_of("m", [3.0, 1.0, 7.0, 8.0]))
    curve = curve_of(group(a, b), "m")
    assert curve is not None
    assert curve.steps.tolist() == [1, 2, 4]
    assert curve.mean.tolist() == [2.0, 1.5, 6.0]
    assert curve.low.tolist() == [1.0, 1.0, 4.0]
    assert curve.high.tolist() == [3.0, 2.0, 8.0]
    assert (curve.runs, curve.per_point) == (2, 1)


def test_a_run_without_the_metric_is_not_a_run_at_zero() -> None:
    a, b = run(rows_of("m", [1.0, 2.0])), run(rows_of("other", [5.0, 5.0]))
    curve, ends = curve_of(group(a, b), "m"), ends_of(group(a, b), "m")
    assert curve is not None
    assert curve.mean.tolist() == [1.0, 2.0]
    assert curve.runs == 1
    assert ends is not None
    assert (ends.first, ends.last, ends.runs) == (1.5, 1.5, 1)
    assert curve_of(group(b), "m") is None
    assert ends_of(group(b), "m") is None
    assert curve_of(group(run(rows_of("m", [1.0])), run(rows_of("m", [1.0], first=5))), "m") is None


def test_long_curves_are_averaged_run_by_run() -> None:
    values = [float(i % 7) for i in range(250)]
    a, b = run(rows_of("m", values)), run(rows_of("m", [v + 1 for v in values]))
    curve = curve_of(group(a, b), "m", points=100)
    assert curve is not None
    assert curve.per_point == 3
    assert len(curve.steps) == 84
    assert curve.steps[0] == 2.0, "the middle of steps 1 to 3"
    assert curve.low[1] == pytest.approx(sum(values[3:6]) / 3)
    assert curve.high[1] == pytest.approx(sum(values[3:6]) / 3 + 1)
    assert curve.low[-1] == values[249], "the last point holds what is left"


def test_ends_are_ten_steps_and_hide_nothing() -> None:
    ends = ends_of(group(run(rows_of("m", [float(i) for i in range(25)]))), "m")
    assert ends is not None
    assert (ends.first, ends.last) == (4.5, 19.5)
    broken = ends_of(group(run(rows_of("m", [math.nan, *[1.0] * 20])), run(rows_of("m", [1.0] * 21))), "m")
    assert broken is not None
    assert math.isnan(broken.first)
    assert broken.last == 1.0
    both = ends_of(group(run(rows_of("m", [math.inf])), run(rows_of("m", [-math.inf]))), "m")
    assert both is not None
    assert math.isnan(both.last)


@pytest.mark.parametrize(
    ("config", "shares", "problems"),
    [
        (EVALUATED, [0.125, 0.5], 8),
        (EVALUATED | {"task": {"heldout_size": 4}}, [0.25], 4),
        (EVALUATED | {"task": {"files": ["x.parquet"]}}, [0.25], 8),
        (EVALUATED | {"task": {"files": ["x.parquet"]}}, [1 / 3], None),
        (EVALUATED | {"evaluation": None}, [0.25], None),
        ({}, [0.25], None),
        (None, [0.25], None),
    ],
)
def test_the_number_of_problems_is_known_or_not(config: dict | None, shares: list, problems: int | None) -> None:
    assert problems_of(run(rows_of("eval/greedy_accuracy", shares), config)) == problems


def test_final_accuracy_is_the_last_evaluation() -> None:
    name = "eval/greedy_accuracy"
    one = run(rows_of(name, [0.25, None, 0.5, None]), EVALUATED)
    final = final_accuracy(group(one), name)
    assert final is not None
    assert (final[0].low, final[0].high) == wilson(0.5, 8)
    assert (final[0].value, final[1]) == (0.5, [3])
    shorter = run(rows_of(name, [0.25, 0.75]), EVALUATED)
    none = run(rows_of("other", [1.0]), EVALUATED)
    both = final_accuracy(group(one, shorter, none), name)
    assert both is not None
    assert (both[0].value, both[0].how, both[1]) == (0.625, "t, 2 seeds", [2, 3])
    assert final_accuracy(group(none), name) is None
    assert final_accuracy(group(run(rows_of(name, [math.nan, 1.5]), EVALUATED)), name) is None


def test_training_accuracy_of_one_run_has_no_interval() -> None:
    values = [0.0] * 5 + [0.5] * 10
    single = training_accuracy(group(run(rows_of("reward/accuracy", values))))
    assert single is not None
    assert (single.value, single.low) == (0.5, None)
    second = run(rows_of("reward/accuracy", [0.6] * 10))
    both = training_accuracy(group(run(rows_of("reward/accuracy", values)), second))
    assert both is not None
    assert both.value == pytest.approx(0.55)
    assert both.low is not None
    assert both.low == pytest.approx(0.0, abs=1e-12), "0.55 - 12.7 x 0.05 is below 0"
    assert training_accuracy(group(run([{"step": 1}]))) is None


def test_times_count_each_phase_where_it_was_logged() -> None:
    rows = [
        {"step": 1, "time/step": 2.0, "time/rollout": 1.0, "time/update": 0.5},
        {"step": 2, "time/step": 4.0, "time/rollout": 1.0, "time/update": 1.5, "time/eval": 1.0},
    ]
    seconds = seconds_by_phase(group(run(rows)))
    assert seconds == {"rollout": 1.0, "update": 1.0, "eval": 0.5, "other": 0.5, "step": 3.0}
    assert wall_clock(group(run(rows))) == 6.0
    assert wall_clock(group(run(rows), run(rows[:1]))) == 4.0
    assert seconds_by_phase(group(run([{"step": 1, "time/step": 3.0}]))) == {"step": 3.0}
    nothing = group(run([{"step": 1}]))
    assert (seconds_by_phase(nothing), wall_clock(nothing), rate(nothing, "rate/x")) == (None, None, None)


def test_rates_are_medians_and_counts_sums() -> None:
    a, b = run(rows_of("n", [1, 100, 3])), run(rows_of("n", [5, 5]))
    assert rate(group(a, b), "n") == 4.0
    assert total(a, "n") == 104
    assert total(a, "m") is None
