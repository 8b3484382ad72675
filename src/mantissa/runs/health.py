"""Is the run well? Every metric against its declared healthy range, over all steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mantissa.mismatch.metrics import Metric
from mantissa.runs.metrics import BY_NAME

Verdict = Literal["healthy", "watch", "unhealthy"]
_BRIEF = 0.1  # a metric out of its range for at most this share of the steps, and back by the end, is one to watch


@dataclass(frozen=True)
class Excursion:
    """One metric that left its range. ``worst`` is the value farthest outside; non-finite values are the worst."""

    metric: Metric
    steps_out: int
    steps: int
    first_step: int
    worst: float
    worst_step: int
    last: float
    serious: bool


def in_range(metric: Metric, value: float) -> bool:
    """Whether ``value`` is finite and inside the metric's healthy range; without a range, whether it is finite."""
    return _excess(metric, value) == 0.0


def check(rows: Sequence[dict[str, Any]]) -> list[Excursion]:
    """Every declared metric that was out of its range or not finite on some step, serious ones first.

    Serious: out on the last step that has it, or on more than a tenth of its steps, or ever not finite.
    """
    excursions = []
    for name, metric in BY_NAME.items():
        points = [(row["step"], float(row[name])) for row in rows if isinstance(row.get(name), int | float)]
        out = [(step, value, _excess(metric, value)) for step, value in points if not in_range(metric, value)]
        if not out:
            continue
        worst_step, worst, _ = max(out, key=lambda point: point[2])
        last = points[-1][1]
        serious = not in_range(metric, last) or len(out) > _BRIEF * len(points) or not math.isfinite(worst)
        excursions.append(Excursion(metric, len(out), len(points), out[0][0], worst, worst_step, last, serious))
    return sorted(excursions, key=lambda f: (not f.serious, f.metric.name))


def verdict(excursions: Sequence[Excursion]) -> Verdict:
    """``healthy`` without excursions, ``watch`` when all were brief and are over, ``unhealthy`` otherwise."""
    if not excursions:
        return "healthy"
    return "unhealthy" if any(f.serious for f in excursions) else "watch"


def _excess(metric: Metric, value: float) -> float:
    """How far ``value`` lies outside; 0 inside, infinite for what is not finite."""
    if not math.isfinite(value):
        return math.inf
    low, high = metric.healthy
    below = 0.0 if low is None else low - value
    above = 0.0 if high is None else value - high
    return max(0.0, below, above)
