"""The tests' own probabilities are scipy's."""

from __future__ import annotations

import itertools

import pytest
from scipy import special

from mantissa.doctor import chances

CLOSE = {"rel": 1e-10, "abs": 1e-290}


def test_of_student_and_the_normal() -> None:
    for degrees, t in itertools.product((7, 11, 19, 63, 127, 1999), (-40.0, -8.0, -2.5, -0.3, 0.0, 0.7, 3.0, 25.0)):
        assert chances.student(t, degrees) == pytest.approx(special.stdtr(degrees, t), **CLOSE), (degrees, t)
    assert chances.student(float("-inf"), 7) == 0.0
    for degrees, p in itertools.product((7, 11, 63, 1999), (0.001, 0.5, 0.8, 0.95, 1 - 0.05 / 41)):
        wanted = special.stdtrit(degrees, p)
        assert chances.student_quantile(p, degrees) == pytest.approx(wanted, rel=1e-8, abs=1e-12), (degrees, p)
    for z in (-30.0, -5.0, -1.0, 0.0, 2.0, 9.0):
        assert chances.normal(z) == pytest.approx(special.ndtr(z), **CLOSE)


def test_of_the_binomial() -> None:
    for n, p in itertools.product((1, 8, 64, 3000), (0.0015, 0.02, 0.3, 0.9)):
        for k in sorted({-1, 0, 1, n // 50, n // 3, n - 1, n}):
            wanted = 1.0 if k < 0 else special.bdtrc(k, n, p)
            assert chances.binomial_above(k, n, p) == pytest.approx(wanted, **CLOSE), (k, n, p)


def test_of_poisson() -> None:
    for mean, k in itertools.product((0.0, 1e-3, 0.7, 5.0, 120.0), (0, 1, 3, 10, 40, 150, 400)):
        assert chances.poisson_above(k, mean) == pytest.approx(special.pdtrc(k, mean), **CLOSE), (k, mean)
        assert chances.poisson_up_to(k, mean) == pytest.approx(special.pdtr(k, mean), **CLOSE), (k, mean)
    for k in (0, 1, 4, 30, 200):
        assert chances.poisson_mean(k, 0.05) == pytest.approx(special.pdtri(k, 0.05), rel=1e-10), k
