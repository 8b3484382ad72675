"""A comparison's numbers against sums by hand; its intervals against printed tables and their own promise."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from mantissa.mismatch.estimates import Estimate, student_interval
from mantissa.runs.compare.data import Group, Run
from mantissa.runs.compare.numbers import (
    apart,
    curve_of,
    distinguish,
    ends_of,
    final_accuracy,
    of_one,
    of_seeds,
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


Z = 1.959963984540054


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [  # Newcombe 1998, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_is_newcombes_table(k: int, n: int, low: float, high: float) -> None:
    assert wilson(k / n, n) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("n", [1, 2, 16, 128, 1000])
def test_wilson_ends_are_where_the_score_test_turns(n: int) -> None:
    """By definition an end p0 is a root of |p - p0| = z sqrt(p0 (1 - p0) / n)."""
    for k in range(0, n + 1, max(1, n // 16)):
        for end in wilson(k / n, n):
            assert abs(k / n - end) == pytest.approx(Z * math.sqrt(end * (1 - end) / n), abs=1e-12)
    assert wilson(0.0, n)[0] == 0
    assert wilson(1.0, n)[1] == 1


def test_wilson_covers_about_what_it_says() -> None:
    rng = np.random.default_rng(0)
    for p in (0.05, 0.3, 0.5, 0.9):
        hits = [low <= p <= high for low, high in (wilson(k / 128, 128) for k in rng.binomial(128, p, 4000))]
        assert 0.93 < np.mean(hits) < 0.98


def test_mean_of_k_samples_is_covered_at_least_as_often() -> None:
    """Problems that are solved always or never make the k samples of each worth one; easy mixtures make them more."""
    rng = np.random.default_rng(1)
    for spread in (0.01, 100.0):  # nearly 0 or 1 each; nearly the same for all
        rates = rng.beta(0.4 * spread, 0.6 * spread, (3000, 64))
        means = (rng.binomial(4, rates) / 4).mean(axis=1)
        hits = [low <= 0.4 <= high for low, high in (wilson(float(m), 64) for m in means)]
        assert np.mean(hits) > 0.93


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.706205), (2, 4.302653), (3, 3.182446), (4, 2.776445), (9, 2.262157), (30, 2.042272), (120, 1.979930)],
)
def test_student_is_the_printed_table(freedom: int, t: float) -> None:
    assert student_interval(2.0, 0.5, freedom) == pytest.approx((2 - t / 2, 2 + t / 2), abs=1e-6)


def test_over_seeds_it_is_students_interval() -> None:
    got = of_seeds([0.5, 0.6, 0.7], 128)
    half = 4.302652730 * 0.1 / math.sqrt(3)  # the standard deviation of the three is 0.1
    assert (got.value, got.low, got.high) == pytest.approx((0.6, 0.6 - half, 0.6 + half))
    assert got.how == "t, 3 seeds"
    assert of_seeds([0.1, 0.9], 128).interval == "0.000 to 1.000", "two seeds far apart tell nothing"


def test_seeds_that_agree_exactly_get_the_interval_of_one_evaluation() -> None:
    got = of_seeds([0.75, 0.75], 16)
    assert (got.low, got.high) == wilson(0.75, 16)
    assert got.how == "2 seeds, all equal; Wilson, 16 problems"
    assert of_seeds([0.75], 16) == of_one(0.75, 16)


def test_without_a_number_of_problems_there_is_no_interval_and_no_difference() -> None:
    unknown = of_one(0.9, None)
    assert (unknown.low, unknown.high, unknown.interval) == (None, None, "no interval")
    assert not apart(unknown, of_one(0.1, 1000))
    assert "some have none" in distinguish([("a", unknown), ("b", of_one(0.1, 1000))])


def made(low: float, high: float) -> Estimate:
    return Estimate((low + high) / 2, low, high, "")


def test_overlap_is_never_a_difference() -> None:
    assert not apart(made(0.1, 0.3), made(0.3, 0.5)), "touching is overlapping"
    assert apart(made(0.1, 0.3), made(0.31, 0.5))
    assert apart(made(0.31, 0.5), made(0.1, 0.3))
    a, b, c = ("a", made(0.1, 0.3)), ("b", made(0.2, 0.5)), ("c", made(0.4, 0.6))
    assert distinguish([a, b]) == "Not distinguishable: the intervals overlap."
    assert distinguish([a, c]) == "c is above a: their intervals do not overlap."
    assert (
        distinguish([a, b, c])
        == "c is above a: their intervals do not overlap. The other 2 pairs are not distinguishable."
    )
    d = ("d", made(0.55, 0.7))
    assert distinguish([a, b, d]).startswith("d is above a and b: their intervals do not overlap. The other pair is")
    assert distinguish([a]) == "Only one of them logged it: there is nothing to compare it with."
