"""Intervals against printed tables, against the equations that define them, and against their own promise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mantissa.mismatch.estimates import student_quantile, student_within
from mantissa.runs.compare.stats import (
    Estimate,
    apart,
    distinguish,
    of_one,
    of_seeds,
    wilson,
)

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
    assert student_quantile(freedom) == pytest.approx(t, abs=1e-6)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 10, 31])
def test_student_is_the_integral_of_its_density(freedom: int) -> None:
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    for t in (0.1, 1.0, 2.5, 12.0):
        x = np.linspace(-t, t, 200_001)
        density = scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)
        assert student_within(t, freedom) == pytest.approx(float(np.trapezoid(density, x)), abs=1e-8)


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
