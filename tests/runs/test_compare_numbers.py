"""A comparison's numbers against sums by hand; its intervals against what defines them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from mantissa.mismatch.estimates import Estimate
from mantissa.runs.compare import (
    Group,
    Run,
    apart,
    curve_of,
    distinguish,
    ends_of,
    final_accuracy,
    of_seeds,
    over_runs,
    problems_of,
    seconds_by_phase,
    total,
    training_accuracy,
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
    assert (curve.steps.tolist(), curve.mean.tolist()) == ([1, 2, 4], [2.0, 1.5, 6.0])
    assert (curve.low.tolist(), curve.high.tolist()) == ([1.0, 1.0, 4.0], [3.0, 2.0, 8.0])
    assert (curve.runs, curve.per_point) == (2, 1)
    other = run(rows_of("other", [5.0, 5.0]))
    curve, ends = curve_of(group(a, other), "m"), ends_of(group(a, other), "m")
    assert (curve.mean.tolist(), curve.runs, ends.runs) == ([1.0, 2.0, 4.0, 9.0], 1, 1), "no run at zero"
    assert (ends.first, ends.last) == (4.0, 4.0)
    assert (curve_of(group(other), "m"), ends_of(group(other), "m")) == (None, None)
    assert curve_of(group(run(rows_of("m", [1.0])), run(rows_of("m", [1.0], first=5))), "m") is None


def test_long_curves_are_averaged_run_by_run() -> None:
    values = [float(i % 7) for i in range(250)]
    a, b = run(rows_of("m", values)), run(rows_of("m", [v + 1 for v in values]))
    curve = curve_of(group(a, b), "m", points=100)
    assert curve is not None
    assert (curve.per_point, len(curve.steps), curve.steps[0]) == (3, 84, 2.0), "the middle of steps 1 to 3"
    assert curve.low[1] == pytest.approx(sum(values[3:6]) / 3)
    assert curve.high[1] == pytest.approx(sum(values[3:6]) / 3 + 1)
    assert curve.low[-1] == values[249], "the last point holds what is left"


def test_ends_are_ten_steps_and_hide_nothing() -> None:
    ends = ends_of(group(run(rows_of("m", [float(i) for i in range(25)]))), "m")
    assert (ends.first, ends.last) == (4.5, 19.5)
    broken = ends_of(group(run(rows_of("m", [math.nan, *[1.0] * 20])), run(rows_of("m", [1.0] * 21))), "m")
    assert math.isnan(broken.first)
    assert broken.last == 1.0
    both = ends_of(group(run(rows_of("m", [math.inf])), run(rows_of("m", [-math.inf]))), "m")
    assert math.isnan(both.last)


@pytest.mark.parametrize(
    ("config", "shares", "problems"),
    [
        (EVALUATED, [0.125, 0.5], 8),
        (EVALUATED | {"task": {"heldout_size": 4}}, [0.25], 4),
        (EVALUATED | {"task": {"files": ["x.parquet"]}}, [0.25], 8),
        (EVALUATED | {"task": {"files": ["x.parquet"]}}, [1 / 3], None),
        (EVALUATED | {"evaluation": None}, [0.25], None),
        (None, [0.25], None),
    ],
)
def test_the_number_of_problems_is_known_or_not(config: dict | None, shares: list, problems: int | None) -> None:
    assert problems_of(run(rows_of("eval/greedy_accuracy", shares), config)) == problems


def test_final_accuracy_is_the_last_evaluation() -> None:
    name = "eval/greedy_accuracy"
    one = run(rows_of(name, [0.25, None, 0.5, None]), EVALUATED)
    estimate, steps = final_accuracy(group(one), name)
    assert (estimate.low, estimate.high) == wilson(0.5, 8)
    assert (estimate.value, steps) == (0.5, [3])
    shorter, none = run(rows_of(name, [0.25, 0.75]), EVALUATED), run(rows_of("other", [1.0]), EVALUATED)
    estimate, steps = final_accuracy(group(one, shorter, none), name)
    assert (estimate.value, estimate.how, steps) == (0.625, "t, 2 seeds", [2, 3])
    assert final_accuracy(group(none), name) is None
    assert final_accuracy(group(run(rows_of(name, [math.nan, 1.5]), EVALUATED)), name) is None


def test_training_accuracy_of_one_run_has_no_interval() -> None:
    first = run(rows_of("reward/accuracy", [0.0] * 5 + [0.5] * 10))
    single = training_accuracy(group(first))
    assert (single.value, single.low) == (0.5, None)
    both = training_accuracy(group(first, run(rows_of("reward/accuracy", [0.6] * 10))))
    assert both.value == pytest.approx(0.55)
    assert both.low == pytest.approx(0.0, abs=1e-12), "0.55 - 12.7 x 0.05 is below 0"
    assert training_accuracy(group(run([{"step": 1}]))) is None


def test_times_count_each_phase_where_it_was_logged() -> None:
    rows = [
        {"step": 1, "time/step": 2.0, "time/rollout": 1.0, "time/update": 0.5},
        {"step": 2, "time/step": 4.0, "time/rollout": 1.0, "time/update": 1.5, "time/eval": 1.0},
    ]
    seconds = seconds_by_phase(group(run(rows)))
    assert seconds == {"rollout": 1.0, "update": 1.0, "eval": 0.5, "other": 0.5, "step": 3.0}
    assert over_runs(group(run(rows), run(rows[:1])), "time/step", np.sum) == 4.0
    assert seconds_by_phase(group(run([{"step": 1, "time/step": 3.0}]))) == {"step": 3.0}
    nothing = group(run([{"step": 1}]))
    assert (seconds_by_phase(nothing), over_runs(nothing, "rate/x", np.median)) == (None, None)
    a, b = run(rows_of("n", [1, 100, 3])), run(rows_of("n", [5, 5]))
    assert (over_runs(group(a, b), "n", np.median), total(a, "n"), total(a, "m")) == (4.0, 104, None), "medians, sums"


@pytest.mark.parametrize("n", [1, 2, 128])
def test_wilson_ends_are_where_the_score_test_turns(n: int) -> None:
    """By definition an end p0 is a root of |p - p0| = z sqrt(p0 (1 - p0) / n)."""
    for k in range(0, n + 1, max(1, n // 16)):
        for end in wilson(k / n, n):
            spread = 1.959963984540054 * math.sqrt(end * (1 - end) / n)
            assert abs(k / n - end) == pytest.approx(spread, abs=1e-12)
    assert (wilson(0.0, n)[0], wilson(1.0, n)[1]) == (0, 1)
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe 1998, table I, method 3


def test_over_seeds_it_is_students_interval_and_wilsons_where_they_agree_exactly() -> None:
    got = of_seeds([0.5, 0.6, 0.7], 128)
    half = 4.302652730 * 0.1 / math.sqrt(3)  # the standard deviation of the three is 0.1
    assert (got.value, got.low, got.high) == pytest.approx((0.6, 0.6 - half, 0.6 + half))
    assert got.how == "t, 3 seeds"
    assert of_seeds([0.1, 0.9], 128).interval == "0.000 to 1.000", "two seeds far apart tell nothing"
    got = of_seeds([0.75, 0.75], 16)
    assert (got.low, got.high) == wilson(0.75, 16)
    assert got.how == "2 seeds, all equal; Wilson, 16 problems"
    assert of_seeds([0.75], 16).how == "Wilson, 16 problems"


def made(low: float, high: float) -> Estimate:
    return Estimate((low + high) / 2, low, high, "")


def test_overlap_is_never_a_difference() -> None:
    assert not apart(made(0.1, 0.3), made(0.3, 0.5)), "touching is overlapping"
    assert apart(made(0.1, 0.3), made(0.31, 0.5))
    assert apart(made(0.31, 0.5), made(0.1, 0.3))
    unknown, sure = of_seeds([0.9], None), of_seeds([0.1], 1000)
    assert (unknown.low, unknown.interval, apart(unknown, sure)) == (None, "no interval", False)
    a, b, c, d = (("abcd"[i], made(*both)) for i, both in enumerate(((0.1, 0.3), (0.2, 0.5), (0.4, 0.6), (0.55, 0.7))))
    said = "c is above a: their intervals do not overlap."
    for named, words in (
        ([a, b], "Not distinguishable: the intervals overlap."),
        ([("a", unknown), ("b", sure)], "Not distinguishable: no two intervals are apart, and some have none."),
        ([a, c], said),
        ([a, b, c], f"{said} The other 2 pairs are not distinguishable."),
        ([a, b, d], "d is above a and b: their intervals do not overlap. The other pair is not distinguishable."),
        ([a], "Only one of them logged it: there is nothing to compare it with."),
    ):
        assert distinguish(named) == words
