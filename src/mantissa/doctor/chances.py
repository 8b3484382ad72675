"""Probabilities of the tests' laws, of single numbers: Student's t, the normal, binomial and Poisson laws.

To a relative error of 1e-10, tails included; a test holds them to scipy's, whose import takes longer than all else that
the doctor does with a small dump.
"""

from __future__ import annotations

import functools
import math

_LITTLE = 1e-16  # of a value: a further term is not seen
_TINY = 1e-300
_STEPS = 100_000


def normal(z: float) -> float:
    """P(Z <= z)."""
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


def student(t: float, degrees: float) -> float:
    """P(T <= t): each tail is I_x(degrees / 2, 1 / 2) / 2 with x = degrees / (degrees + t^2)."""
    tail = 0.5 * _beta(degrees / 2, 0.5, degrees / (degrees + t * t))
    return tail if t < 0 else 1.0 - tail


@functools.lru_cache(maxsize=1024)
def student_quantile(p: float, degrees: float) -> float:
    """t with P(T <= t) = p, 0 < p < 1, by Newton's steps from 0: above, the law is concave, and none goes too far."""
    if p < 0.5:
        return -student_quantile(1.0 - p, degrees)
    log_at_0 = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    t, upper = 0.0, 1.0 - p
    for _ in range(200):
        density = math.exp(log_at_0 - (degrees + 1) / 2 * math.log1p(t * t / degrees))
        step = (student(-t, degrees) - upper) / density
        t += step
        if abs(step) <= 1e-14 * max(t, 1e-3):
            break
    return t


def binomial_above(k: int, n: int, p: float) -> float:
    """P(X > k) of n draws of probability p: I_p(k + 1, n - k)."""
    return 1.0 if k < 0 else 0.0 if k >= n else _beta(k + 1, n - k, p)


def poisson_above(k: int, mean: float) -> float:
    """P(X > k)."""
    return _poisson(k + 1, mean, 1) if k + 1 > mean else 1.0 - _poisson(k, mean, -1)


def poisson_up_to(k: int, mean: float) -> float:
    """P(X <= k)."""
    return _poisson(k, mean, -1) if k < mean else 1.0 - _poisson(k + 1, mean, 1)


@functools.lru_cache(maxsize=1024)
def poisson_mean(k: int, p: float) -> float:
    """The mean with P(X <= k) = p, 0 < p < 1, by halving."""
    low, high = 0.0, k + 1.0
    while poisson_up_to(k, high) > p:
        high *= 2
    while high - low > 4e-16 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if poisson_up_to(k, middle) > p else (low, middle)
    return (low + high) / 2


def _poisson(k: int, mean: float, way: int) -> float:
    """The sum of exp(-m) m^j / j! from j = k away from the mean, up or down."""
    if mean <= 0:
        return float(k <= 0 if way > 0 else k >= 0)
    if k < 0:
        return float(way > 0)
    term = total = math.exp(k * math.log(mean) - mean - math.lgamma(k + 1))
    while term > _LITTLE * total and (way > 0 or k > 0):
        term *= mean / (k + 1) if way > 0 else k / mean
        total += term
        k += way
    return total


def _beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), the regularised incomplete beta function, by its continued fraction (Numerical Recipes, 6.4)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )  # fmt: skip
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1.0 - front * _fraction(b, a, 1.0 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    """Lentz's way through the continued fraction of I_x(a, b)."""
    c, d = 1.0, 1.0 / _away(1.0 - (a + b) * x / (a + 1))
    found = d
    for m in range(1, _STEPS):
        n = a + 2 * m
        for over in (m * (b - m) / (n - 1) / n, -(a + m) * (a + b + m) / n / (n + 1)):
            d, c = 1.0 / _away(1.0 + over * x * d), _away(1.0 + over * x / c)
            found *= c * d
        if abs(c * d - 1.0) < 2 * _LITTLE:
            break
    return found


def _away(value: float) -> float:
    """``value``, away from 0."""
    return value if abs(value) > _TINY else _TINY
