"""Numbers of a comparison: the curve of a group, its ends, its final accuracies, its times and events.

Seeds count equally: a group's figure is the mean over its runs of each run's own figure. What a run did not log is
nothing here (None, or left out), never 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from statistics import fmean, median
from typing import Any

import numpy as np

from mantissa.runs.compare_data import Group, Run
from mantissa.runs.compare_stats import Estimate, of_seeds
from mantissa.runs.series import PHASES, Array, series

ENDS = 10  # steps at each end whose mean a table shows
_POINTS = 120  # of a curve at most; beyond that each is the mean of several steps


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
    if per_point > 1:
        starts = np.arange(0, steps.size, per_point)
        sizes = np.diff(np.append(starts, steps.size))
        values = np.add.reduceat(values, starts, axis=1) / sizes
        steps = np.add.reduceat(steps, starts) / sizes
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
    if len(found) == 1:
        return Estimate(estimate.value, None, None, "one run")
    return estimate


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
