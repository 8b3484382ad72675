"""How sure a final accuracy is, and whether two of them can be told apart.

One run's held-out accuracy is k of n problems, and its 95% interval is Wilson's: unlike p +- z sqrt(p (1 - p) / n) it
has a width where k is 0 or n, and stays inside [0, 1]. The mean of k samples a problem is a mean of n shares in [0, 1],
whose variance is at most that of a coin, p (1 - p): the same interval with n problems (not n k samples, which are not
independent) is then at least as wide as it need be. It says how well n problems measure this policy, not how
another seed would have done.

Over seeds the interval is Student's, mean +- t s / sqrt(n) with n - 1 degrees of freedom, cut to [0, 1]: it holds what
differs from seed to seed. Two seeds make it wide (t = 12.7), rightly. Where all seeds agree to the last digit there is
no spread to estimate, and Wilson's interval of one evaluation is given in its place.

Two results are called different only where their intervals do not overlap. That is stricter than a test at 5%: for two
of equal width, about 0.6%. It leaves room for the several pairs that a page of runs compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist, fmean, stdev

from mantissa.mismatch.estimates import student_quantile

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A fraction with its interval, and in words where the interval is from, or why there is none (low, high None)."""

    value: float
    low: float | None
    high: float | None
    how: str

    @property
    def interval(self) -> str:
        """``0.412 to 0.585``, or ``no interval``."""
        if self.low is None or self.high is None:
            return "no interval"
        return f"{self.low:.3f} to {self.high:.3f}"


def wilson(share: float, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's score interval of a fraction ``share`` = k / n (Wilson 1927).

    (p + z^2/2n +- z sqrt(p (1 - p)/n + z^2/4n^2)) / (1 + z^2/n), z the normal quantile of ``level``.
    """
    if n < 1 or not 0 <= share <= 1:
        raise ValueError(f"expected a fraction of at least one, got {share} of {n}")
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    whole = 1 + z * z / n
    low = 0.0 if share == 0 else (middle - half) / whole  # there the two terms cancel exactly
    high = 1.0 if share == 1 else (middle + half) / whole
    return low, high


def of_one(share: float, problems: int | None) -> Estimate:
    """One run's accuracy; ``problems`` is None where their number is not known."""
    if problems is None:
        return Estimate(share, None, None, "number of problems not known")
    return Estimate(share, *wilson(share, problems), f"Wilson, {problems} problems")


def of_seeds(shares: Sequence[float], problems: int | None) -> Estimate:
    """The mean over seeds, each a run's accuracy on ``problems`` problems; one share is one run."""
    if len(shares) == 1:
        return of_one(shares[0], problems)
    mean, n = fmean(shares), len(shares)
    if len(set(shares)) == 1:
        one = of_one(shares[0], problems)
        return Estimate(one.value, one.low, one.high, f"{n} seeds, all equal; {one.how}")
    half = student_quantile(n - 1) * stdev(shares) / math.sqrt(n)
    return Estimate(mean, max(0.0, mean - half), min(1.0, mean + half), f"t, {n} seeds")


def apart(one: Estimate, other: Estimate) -> bool:
    """True where both have intervals, and these do not even touch."""
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return one.high < other.low or other.high < one.low


def distinguish(named: Sequence[tuple[str, Estimate]]) -> str:
    """Which results differ, in a sentence; no order is given to results whose intervals overlap."""
    pairs = list(combinations(named, 2))
    if not pairs:
        return "Only one of them logged it: there is nothing to compare it with."
    differing = [(a, b) if a[1].value > b[1].value else (b, a) for a, b in pairs if apart(a[1], b[1])]
    if not differing:
        if any(estimate.low is None for _, estimate in named):
            return "Not distinguishable: no two intervals are apart, and some have none."
        return "Not distinguishable: " + ("the intervals overlap." if len(pairs) == 1 else "all intervals overlap.")
    above: dict[str, list[str]] = {}
    for (higher, _), (lower, _) in differing:
        above.setdefault(higher, []).append(lower)
    said = "; ".join(f"{higher} is above {_listed(lower)}" for higher, lower in above.items())
    said += ": their intervals do not overlap."
    rest = len(pairs) - len(differing)
    if rest:
        said += " The other pair is" if rest == 1 else f" The other {rest} pairs are"
        said += " not distinguishable."
    return said


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
