"""What the plots draw, as numpy arrays computed from rows: no drawing here.

Legend: log r = logp_learner - logp_rollout of one token; S = the sum of log r over one sequence. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mantissa.errors import MantissaError
from mantissa.runs.directory import RunDirectory

Array = NDArray[np.float64]
PHASES = (
    "rollout", "reward", "learner_logp", "reference_logp", "engine_share", "update", "sync", "eval", "checkpoint",
)  # fmt: skip


def series(rows: Iterable[dict[str, Any]], name: str) -> tuple[Array, Array]:
    """Steps and values of one metric, where it was logged and is finite."""
    points = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
    both = np.array(points, dtype=np.float64).reshape(-1, 2)
    both = both[np.isfinite(both[:, 1])]
    return both[:, 0], both[:, 1]


def ends(values: Array) -> tuple[float, float] | None:
    """Means of the first and of the last tenth of ``values`` (at least one, at most ten of each); None if empty."""
    if values.size == 0:
        return None
    share = min(10, max(1, values.size // 10))
    return float(values[:share].mean()), float(values[-share:].mean())


def recent_rollouts(run: RunDirectory, tokens: int = 50_000) -> list[dict[str, Any]]:
    """Completions of the latest steps, newest step first, until they hold ``tokens`` tokens. Unreadable steps are left
    out: a report on a damaged run is worth more than none."""
    rows: list[dict[str, Any]] = []
    total = 0
    for step in reversed(run.rollout_steps()):
        try:
            newest = run.read_rollouts(step)
        except MantissaError:
            continue
        rows.extend(newest)
        total += sum(row["length"] for row in newest)
        if total >= tokens:
            break
    return rows


def token_logps(rollouts: Sequence[dict[str, Any]]) -> tuple[Array, Array]:
    """(rollout, learner) log-probs of every token, in nats, where both are finite."""
    pairs = [pair for row in rollouts if (pair := _pair(row)) is not None]
    if not pairs:
        return np.empty(0), np.empty(0)
    rollout = np.concatenate([pair[0] for pair in pairs])
    learner = np.concatenate([pair[1] for pair in pairs])
    finite = np.isfinite(rollout) & np.isfinite(learner)
    return rollout[finite], learner[finite]


def sequence_log_ratios(rollouts: Sequence[dict[str, Any]]) -> tuple[Array, Array]:
    """(length in tokens, S in nats) of every sequence whose log-probs are all finite."""
    points = []
    for row in rollouts:
        pair = _pair(row)
        if pair is None or pair[0].size == 0:
            continue
        total = float(np.sum(pair[1] - pair[0]))
        if np.isfinite(total):
            points.append((pair[0].size, total))
    both = np.array(points, dtype=np.float64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def fit_line(x: Array, y: Array) -> tuple[float, float] | None:
    """Slope and intercept of the least-squares line, as ``gap/seq_log_ratio_slope`` has it; None if all x are equal."""
    if x.size < 2 or x.min() == x.max():
        return None
    from_mean = x - x.mean()
    slope = float((from_mean * (y - y.mean())).sum() / np.square(from_mean).sum())
    return slope, float(y.mean() - slope * x.mean())


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds a step, by phase: ``seconds[i, j]`` is phase ``names[i]`` in bar j, the mean of ``per_bar`` steps."""

    names: tuple[str, ...]
    steps: Array
    seconds: Array
    per_bar: int


def phase_times(rows: Sequence[dict[str, Any]], bars: int = 80) -> PhaseTimes | None:
    """Where the time went, in at most ``bars`` bars; what no phase accounts for is ``other``. None without times."""
    timed = [row for row in rows if isinstance(row.get("time/step"), int | float)]
    if not timed:
        return None
    parts = np.array([[float(row.get(f"time/{phase}") or 0.0) for row in timed] for phase in PHASES])
    whole = np.array([float(row["time/step"]) for row in timed])
    parts = np.vstack([parts, np.maximum(whole - parts.sum(axis=0), 0.0)])
    per_bar = -(-len(timed) // bars)
    starts = np.arange(0, len(timed), per_bar)
    sizes = np.diff(np.append(starts, len(timed)))
    seconds = np.add.reduceat(parts, starts, axis=1) / sizes
    steps = np.add.reduceat(np.array([row["step"] for row in timed], dtype=np.float64), starts) / sizes
    used = seconds.sum(axis=1) > 0
    names = tuple(name for name, keep in zip((*PHASES, "other"), used, strict=True) if keep)
    return PhaseTimes(names, steps, seconds[used], per_bar)


def where_measured(measured: int, steps: int) -> str:
    """What a statement about ``measured`` values covers: ``every step``, or how many of the run's ``steps``."""
    return "every step" if measured == steps else f"the {measured} of {steps} steps where it was measured"


def _pair(row: dict[str, Any]) -> tuple[Array, Array] | None:
    """The two log-prob arrays of one completion; None where the learner's are absent or of another length."""
    rollout, learner = row.get("rollout_logp"), row.get("learner_logp")
    if rollout is None or learner is None or len(rollout) != len(learner):
        return None
    nan = float("nan")
    return (
        np.array([nan if v is None else v for v in rollout], dtype=np.float64),
        np.array([nan if v is None else v for v in learner], dtype=np.float64),
    )
