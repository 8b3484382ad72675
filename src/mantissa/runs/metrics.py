"""What the plots draw, as numpy arrays computed from rows: no drawing here.

Legend: log r = logp_learner - logp_rollout of one token; S = the sum of log r over one sequence. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mantissa.base.bounds import LARGEST_FLOAT
from mantissa.base.errors import MantissaError
from mantissa.runs.directory import RunDirectory

Array = NDArray[np.float64]
Axis = Literal["linear", "fraction", "log", "power of two"]


@dataclass(frozen=True)
class Series:
    """How a metric is drawn: its words in a legend, the unit at its axis, and the kind of that axis."""

    metric: str
    title: str
    unit: str
    axis: Axis = "linear"

    @property
    def heading(self) -> str:
        """The title of a figure that is of this metric alone."""
        if self.metric.startswith("gap/"):
            return f"Gap: {self.title}"
        return self.title[0].upper() + self.title[1:]


# The one table of what is drawn: the report, a comparison and whatever else draws a run takes its words from here.
SERIES: dict[str, Series] = {
    one.metric: one
    for one in (
        Series("reward/accuracy", "accuracy of training samples", "fraction correct", "fraction"),
        Series("reward/mean", "mean reward", "reward"),
        Series("eval/greedy_accuracy", "held-out accuracy, greedy", "fraction correct", "fraction"),
        Series("eval/avg_at_k", "held-out accuracy, mean of k samples", "fraction correct", "fraction"),
        Series("warm_start/accuracy", "accuracy in the warm start", "fraction correct", "fraction"),
        Series("train/loss", "training loss", "loss"),
        Series("gap/abs_logp_diff_max", "max |log-prob difference|", "nats", "log"),
        Series("gap/abs_logp_diff_mean", "mean |log-prob difference|", "nats", "log"),
        Series("gap/k3_kl", "k3 KL", "nats a token", "log"),
        Series("gap/seq_log_ratio_std", "spread of sequence log-ratios", "nats", "log"),
        Series("gap/engine_abs_logp_diff_mean", "mean, the engine's part", "nats", "log"),
        Series("gap/other_abs_logp_diff_mean", "mean, everything else", "nats", "log"),
        Series("policy/alpha_abs_mean", "|alpha|, moved by learning", "nats", "log"),
        Series("policy/beta_abs_mean", "|beta|, kernels and formats", "nats", "log"),
        Series("policy/clip_fraction", "clipped", "fraction of tokens"),
        Series("policy/phantom_clip_fraction", "phantom: for beta alone", "fraction of tokens"),
        Series("precision/loss_scale", "loss scale", "scale", "power of two"),
        Series("precision/overflows", "overflow", "count"),
        Series("precision/retries", "retry", "count"),
        Series("precision/skipped", "given up", "count"),
        Series("waltz/attack_success", "attack success", "fraction", "fraction"),
        Series("waltz/over_refusal", "over-refusal", "fraction", "fraction"),
        Series("waltz/first_attack_success", "attack success, first answers", "fraction", "fraction"),
        Series("waltz/first_over_refusal", "over-refusal, first answers", "fraction", "fraction"),
        Series("waltz/eval_attack_success", "attack success, held out", "fraction", "fraction"),
        Series("waltz/eval_over_refusal", "over-refusal, held out", "fraction", "fraction"),
        Series("waltz/label_accuracy", "both labels right", "fraction", "fraction"),
        Series("waltz/format", "whole JSON objects", "fraction", "fraction"),
        Series("waltz/triggered", "dialogues with another answer", "fraction", "fraction"),
        Series("waltz/dir_mean", "improvement a feedback", "R_dir"),
        Series("policy/entropy", "entropy of the policy", "nats a token"),
        Series("length/max", "longest response", "tokens"),
        Series("length/mean", "mean response length", "tokens"),
        Series("optim/grad_norm", "gradient norm before clipping", "2-norm", "log"),
    )
}
PHASES = (
    "rollout", "reward", "feedback", "learner_logp", "critic", "reference_logp", "engine_share", "update", "sync",
    "eval", "checkpoint",
)  # fmt: skip


def series(rows: Iterable[dict[str, Any]], name: str) -> tuple[Array, Array]:
    """Steps and values of one metric, where it was logged and is finite in fp32: what is beyond was inf where it was
    computed, and no axis holds its square."""
    points = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
    both = np.array(points, dtype=np.float64).reshape(-1, 2)
    both = both[np.abs(both[:, 1]) <= LARGEST_FLOAT]
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
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(intercept)


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds a step, by phase: ``seconds[i, j]`` is phase ``names[i]`` in bar j, the mean of ``per_bar`` steps."""

    names: tuple[str, ...]
    steps: Array
    seconds: Array
    per_bar: int


def phase_times(rows: Sequence[dict[str, Any]], bars: int = 80) -> PhaseTimes | None:
    """Where the time went, in at most ``bars`` bars; what no phase accounts for is ``other``. None without times."""
    times = ("time/step", *(f"time/{phase}" for phase in PHASES))
    timed = [
        row for row in rows
        if isinstance(row.get("time/step"), int | float) and all(0 <= (row.get(t) or 0) <= LARGEST_FLOAT for t in times)
    ]  # fmt: skip
    if not timed:
        return None
    parts = np.array([[float(row.get(f"time/{phase}") or 0.0) for row in timed] for phase in PHASES])
    whole = np.array([float(row["time/step"]) for row in timed])
    parts = np.vstack([parts, np.maximum(whole - parts.sum(axis=0), 0.0)])
    per_bar = -(-len(timed) // bars)
    seconds = binned(parts, per_bar)
    steps = binned(np.array([row["step"] for row in timed], dtype=np.float64), per_bar)
    used = seconds.sum(axis=1) > 0
    names = tuple(name for name, keep in zip((*PHASES, "other"), used, strict=True) if keep)
    return PhaseTimes(names, steps, seconds[used], per_bar)


def binned(values: Array, size: int) -> Array:
    """Means of every ``size`` neighbours along the last axis; the last one is of what is left."""
    starts = np.arange(0, values.shape[-1], size)
    means: Array = np.add.reduceat(values, starts, axis=-1) / np.diff(np.append(starts, values.shape[-1]))
    return means


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
