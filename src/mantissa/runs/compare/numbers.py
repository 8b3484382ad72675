"""The numbers of a comparison: the curve of a group, its ends, its final accuracies, its times and events.

Seeds count equally: a group's figure is the mean over its runs of each run's own figure. What a run did not log is
nothing here (None, or left out), never 0.

How sure a final accuracy is, and whether two of them can be told apart.

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
from functools import reduce
from itertools import combinations
from statistics import NormalDist, fmean, median, stdev
from typing import Any

import numpy as np

from mantissa.mismatch.estimates import LEVEL, Estimate, student_interval
from mantissa.runs.compare.data import Group, Run, listed
from mantissa.runs.metrics import PHASES, Array, binned, series

ENDS = 10  # steps at each end whose mean a table shows
_POINTS = 120  # of a curve at most; beyond that each is the mean of several steps


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
    low, high = student_interval(mean, stdev(shares) / math.sqrt(n), n - 1)
    return Estimate(mean, max(0.0, low), min(1.0, high), f"t, {n} seeds")


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
    said = "; ".join(f"{higher} is above {listed(lower)}" for higher, lower in above.items())
    said += ": their intervals do not overlap."
    rest = len(pairs) - len(differing)
    if rest:
        said += " The other pair is" if rest == 1 else f" The other {rest} pairs are"
        said += " not distinguishable."
    return said


@dataclass(frozen=True)
class Curve:
    """A group's metric by step: mean over its runs, with the smallest and the largest run's value.

    It has the steps that all runs with this metric have. ``per_point`` steps were averaged into each point.
    """

    steps: Array
    mean: Array
    low: Array
    high: Array
    runs: int
    per_point: int


@dataclass(frozen=True)
class Ends:
    """Means over the first and the last steps that logged a metric; NaN or infinite where a value among them was."""

    first: float
    last: float
    runs: int


def curve_of(group: Group, name: str, points: int = _POINTS) -> Curve | None:
    """The curve of one metric, or None where no run of the group has it."""
    found = [both for both in (series(run.rows, name) for run in group.runs) if both[0].size]
    if not found:
        return None
    steps = reduce(np.intersect1d, [x for x, _ in found])
    if steps.size == 0:
        return None
    values = np.array([y[np.searchsorted(x, steps)] for x, y in found])
    per_point = -(-steps.size // points)
    values, steps = binned(values, per_point), binned(steps, per_point)
    return Curve(steps, values.mean(axis=0), values.min(axis=0), values.max(axis=0), len(found), per_point)


def logged(run: Run, name: str) -> list[float]:
    """The values of a metric in the order of steps, those that are not finite too."""
    return [float(row[name]) for row in run.rows if isinstance(row.get(name), int | float)]


def ends_of(group: Group, name: str) -> Ends | None:
    """The ends of one metric, or None where no run has it."""
    found = [values for values in (logged(run, name) for run in group.runs) if values]
    if not found:
        return None
    return Ends(_mean([_mean(v[:ENDS]) for v in found]), _mean([_mean(v[-ENDS:]) for v in found]), len(found))


def problems_of(run: Run) -> int | None:
    """The number of held-out problems of each evaluation; None where it is not known.

    ``evaluation.problems`` of the recipe, at most ``task.heldout_size``. A data set may hold fewer, and the accuracies
    say so: each must be a whole number of problems.
    """
    config = run.config or {}
    evaluation, task = config.get("evaluation"), config.get("task")
    asked = evaluation.get("problems") if isinstance(evaluation, dict) else None
    if not isinstance(asked, int) or asked < 1:
        return None
    there = task.get("heldout_size") if isinstance(task, dict) else None
    n = min(asked, there) if isinstance(there, int) and there > 0 else asked
    whole = all(abs(n * share - round(n * share)) < 1e-6 for share in _finite(logged(run, "eval/greedy_accuracy")))
    return n if whole else None


def final_accuracy(group: Group, name: str) -> tuple[Estimate, list[int]] | None:
    """The last evaluation, ``eval/greedy_accuracy`` or ``eval/avg_at_k``, of each run: estimate and its steps."""
    last = [_last(run, name) for run in group.runs]
    found = [(run, *point) for run, point in zip(group.runs, last, strict=True) if point is not None]
    if not found:
        return None
    numbers = {problems_of(run) for run, _, _ in found}
    problems = numbers.pop() if len(numbers) == 1 else None
    return of_seeds([share for _, _, share in found], problems), sorted({step for _, step, _ in found})


def training_accuracy(group: Group) -> Estimate | None:
    """Mean of ``reward/accuracy`` over the last steps; over seeds with Student's interval, of one run without any."""
    found = [_mean(values[-ENDS:]) for values in (logged(run, "reward/accuracy") for run in group.runs) if values]
    found = [value for value in found if math.isfinite(value)]
    if not found:
        return None
    estimate = of_seeds(found, None)
    return estimate if len(found) > 1 else Estimate(estimate.value, None, None, "one run")


def seconds_by_phase(group: Group) -> dict[str, float] | None:
    """Mean seconds a step of each phase, ``other`` and ``step`` (all of it), over the steps that were timed."""
    per_run = []
    for run in group.runs:
        timed = [row for row in run.rows if _is_finite(row.get("time/step"))]
        if timed:
            parts = {p: [float(row[f"time/{p}"]) for row in timed if _is_finite(row.get(f"time/{p}"))] for p in PHASES}
            seconds = {phase: sum(values) / len(timed) for phase, values in parts.items() if values}
            step = fmean(float(row["time/step"]) for row in timed)
            if seconds:
                seconds["other"] = max(0.0, step - sum(seconds.values()))
            per_run.append(seconds | {"step": step})
    if not per_run:
        return None
    names = [name for name in (*PHASES, "other", "step") if any(name in run for run in per_run)]
    return {name: fmean(run[name] for run in per_run if name in run) for name in names}


def wall_clock(group: Group) -> float | None:
    """Mean over runs of the seconds that all steps took; without the warm start, which is not timed."""
    totals = [sum(_finite(values)) for values in (logged(run, "time/step") for run in group.runs) if values]
    return fmean(totals) if totals else None


def rate(group: Group, name: str) -> float | None:
    """Mean over runs of a rate's median over steps."""
    medians = [median(values) for values in (_finite(logged(run, name)) for run in group.runs) if values]
    return fmean(medians) if medians else None


def total(run: Run, name: str) -> int | None:
    """The sum of a count over a run's steps; None where it was not logged."""
    values = _finite(logged(run, name))
    return int(sum(values)) if values else None


def _last(run: Run, name: str) -> tuple[int, float] | None:
    """Step and value of the last evaluation that gave a fraction."""
    steps, values = series(run.rows, name)
    keep = (values >= 0) & (values <= 1)
    return (int(steps[keep][-1]), float(values[keep][-1])) if keep.any() else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # NaN and infinity stay visible; fmean would raise for inf - inf


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
