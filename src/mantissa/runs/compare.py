"""The numbers of groups of runs side by side: curves, accuracies, times; and which of them differ.

Two results are called different only where their intervals do not overlap. That is stricter than a test at 5%: for two
of equal width, about 0.6%. It leaves room for the several pairs that a page of runs compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import combinations
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from mantissa.mismatch.intervals import Estimate
from mantissa.runs.groups import Group, Run, listed, of_seeds
from mantissa.runs.metrics import PHASES, Array, binned, phase_times, series

ENDS = 10  # steps at each end whose mean a table shows
_POINTS = 120  # of a curve at most; beyond that each is the mean of several steps


def apart(one: Estimate, other: Estimate) -> bool:
    """True where both have intervals, and these do not even touch."""
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return one.high < other.low or other.high < one.low


class Distinction(NamedTuple):
    """Which results differ, in a sentence, and whether any do."""

    said: str
    differ: bool = False


def distinguish(named: Sequence[tuple[str, Estimate]]) -> Distinction:
    """Which results differ; no order is given to results whose intervals overlap."""
    pairs = list(combinations(named, 2))
    if not pairs:
        return Distinction("Only one of them logged it: there is nothing to compare it with.")
    differing = [(a, b) if a[1].value > b[1].value else (b, a) for a, b in pairs if apart(a[1], b[1])]
    if not differing:
        if any(estimate.low is None for _, estimate in named):
            return Distinction("Not distinguishable: no two intervals are apart, and some have none.")
        which = "the intervals" if len(pairs) == 1 else "all intervals"
        return Distinction(f"Not distinguishable: {which} overlap.")
    above: dict[str, list[str]] = {}
    for (higher, _), (lower, _) in differing:
        above.setdefault(higher, []).append(lower)
    said = "; ".join(f"{higher} is above {listed(lower)}" for higher, lower in above.items())
    said += ": their intervals do not overlap."
    rest = len(pairs) - len(differing)
    if rest:
        said += " The other pair is" if rest == 1 else f" The other {rest} pairs are"
        said += " not distinguishable."
    return Distinction(said, differ=True)


class Curve(NamedTuple):
    """A group's metric by step: mean over its runs, with the smallest and the largest run's value.

    It has the steps that all runs with this metric have. ``per_point`` steps were averaged into each point.
    """

    steps: Array
    mean: Array
    low: Array
    high: Array
    runs: int
    per_point: int


class Ends(NamedTuple):
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
    solved = n * series(run.rows, "eval/greedy_accuracy")[1]
    return n if (np.abs(solved - solved.round()) < 1e-6).all() else None


def final_accuracy(group: Group, name: str) -> tuple[Estimate, list[int]] | None:
    """The last evaluation, ``eval/greedy_accuracy`` or ``eval/avg_at_k``, of each run: estimate and its steps."""
    found = []
    for run in group.runs:
        points = np.stack(series(run.rows, name), axis=1)
        points = points[(points[:, 1] >= 0) & (points[:, 1] <= 1)]
        found += [(problems_of(run), int(step), float(share)) for step, share in points[-1:]]
    if not found:
        return None
    numbers = {problems for problems, _, _ in found}
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


def spread_of(group: Group, name: str) -> float | None:
    """Mean over the runs of a metric's standard deviation over its last steps; None where none has two of them."""
    found = [stdev(last) for run in group.runs if len(last := series(run.rows, name)[1][-ENDS:].tolist()) > 1]
    return fmean(found) if found else None


def seconds_by_phase(group: Group) -> dict[str, float] | None:
    """Mean seconds a step of each phase, ``other`` and ``step`` (all of it), over the steps that were timed."""
    per_run = []
    for run in group.runs:
        times = phase_times(run.rows, bars=1)
        if times is not None:
            seconds = dict(zip(times.names, times.seconds[:, 0].tolist(), strict=True))
            # A trainer's run times whole steps only.
            per_run.append(({} if list(seconds) == ["other"] else seconds) | {"step": sum(seconds.values())})
    if not per_run:
        return None
    names = [name for name in (*PHASES, "other", "step") if any(name in run for run in per_run)]
    return {name: fmean(run[name] for run in per_run if name in run) for name in names}


def total(run: Run, name: str) -> int | None:
    """The sum of a count over a run's steps; None where it was not logged."""
    values = series(run.rows, name)[1]
    return int(values.sum()) if values.size else None


def over_runs(group: Group, name: str, of: Callable[[Array], Any]) -> float | None:
    """The mean over the runs that logged a metric of one figure ``of`` its values; None where none did."""
    found = [float(of(values)) for run in group.runs if (values := series(run.rows, name)[1]).size]
    return fmean(found) if found else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # NaN and infinity stay visible; fmean would raise for inf - inf
