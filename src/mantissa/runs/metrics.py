"""The catalogue of everything a run logs, each metric declared once: name, formula, unit, healthy range, source.

The metrics of algorithms and of the gap are declared where they are computed (``mantissa.mismatch``); here are those of
the loop around them, and of the drop-in trainer. The loop treats a key that nobody declares as a bug, and the report
prints the whole table. A healthy range is what a run that is going well stays in, not a law; without one, no number is
good or bad by itself.

Legend: t one response token, v one word of the vocabulary, theta the current policy.

What the plots draw, as numpy arrays computed from rows: no drawing here.

Legend: log r = logp_learner - logp_rollout of one token; S = the sum of log r over one sequence. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mantissa.errors import MantissaError
from mantissa.mismatch import ALL_METRICS, Metric
from mantissa.runs.directory import RunDirectory

_OURS = "range: this project's judgement"


def _plain(name: str, formula: str, unit: str) -> Metric:
    return Metric(name=name, formula=formula, unit=unit)


def _ranged(name: str, formula: str, unit: str, healthy: tuple[float | None, float | None]) -> Metric:
    return Metric(name=name, formula=formula, unit=unit, healthy=healthy, source=_OURS)


LOOP_METRICS: tuple[Metric, ...] = (
    _plain("reward/accuracy", "completions judged correct / completions, over everything sampled", "fraction"),
    _plain("reward/accuracy_trained", "the same over the groups trained on, where sampling is dynamic", "fraction"),
    _plain("reward/overlong_penalty", "mean of what length took from the reward, over everything sampled", "reward"),
    _plain("reward/overlong_fraction", "completions with such a penalty / completions", "fraction"),
    _plain("dynamic/generation_batches", "times that the step sampled prompts", "count"),
    _plain("dynamic/prompts", "prompts sampled this step, each of them a group", "count"),
    _plain("dynamic/all_right", "groups dropped, every completion right", "count"),
    _plain("dynamic/all_wrong", "groups dropped, no completion right", "count"),
    _plain("dynamic/equal", "groups dropped, some right and all rewards equal", "count"),
    _plain("dynamic/kept_fraction", "groups whose rewards differ / groups sampled", "fraction"),
    _plain("dynamic/surplus", "groups whose rewards differ beyond rollout.prompts, dropped", "count"),
    _plain("dynamic/trained", "groups whose rewards differ that were trained on", "count"),
    _ranged("reward/verifier_errors", "completions on which the verifier failed (their reward is 0)", "count", (0, 0)),
    _plain(
        "reward_part/NAME",
        "mean over completions without verifier error of what the reward is made of: a term before its weight, or a "
        "number that a reward function returned",
        "1",
    ),
    _plain("length/mean", "mean response length, the stop token included", "tokens"),
    _plain("length/max", "largest response length", "tokens"),
    _ranged("length/truncated_fraction", "completions cut off at max_tokens / completions", "fraction", (0, 0.2)),
    _ranged(
        "advantage/silent_steps",
        "steps since the run began, while every advantage of all of them was 0; 0 once one was not",
        "steps",
        (0, 2),
    ),
    _plain("policy/entropy", "mean_t of -sum_v p_theta(v) log p_theta(v)", "nats/token"),
    _plain(
        "exact/checked_tokens", "log-probs compared bit by bit, with exact kernels, in a step that is checked", "tokens"
    ),
    _ranged("exact/replans", "times that exact kernels moved to a safer way after a difference", "times", (0, 0)),
    _ranged("exact/mismatched_tokens", "of these, how many differ between rollout and learner", "tokens", (0, 0)),
    _ranged(
        "exact/misdrawn_tokens",
        "of these, how many are tokens that their uniform does not select from the learner's distribution",
        "tokens",
        (0, 0),
    ),
    _ranged(
        "exact/update_mismatched_tokens",
        "log-probs of the first update's own forward that are not the old policy's, with exact kernels",
        "tokens",
        (0, 0),
    ),
    _plain("precision/loss_scale", "factor on the loss before backward; 1 is no scaling", "1"),
    _ranged("precision/overflows", "backward passes that overflowed, this step", "count", (0, 1)),
    _ranged("precision/retries", "backward passes redone at a lower scale, this step", "count", (0, 1)),
    _ranged("precision/skipped", "optimiser steps given up, this step", "count", (0, 0)),
    _plain(
        "precision/max_scaled_grad",
        "max |scale * grad| / largest value of the format; above 1 where fp32 sums several gradients of the format",
        "fraction",
    ),
    _ranged(
        "precision/flushed_fraction", "gradients that are 0 here but not in fp32, on a probe", "fraction", (0, 0.05)
    ),
    _plain("optim/lr", "learning rate of the step's last update", "1/update"),
    _plain("optim/grad_norm", "2-norm of the unscaled gradient before clipping, mean over updates", "1"),
    _plain(
        "optim/clipped_fraction",
        "units whose gradient adaptive clipping shortened / units, mean over updates",
        "fraction",
    ),
    _plain("optim/updates", "optimiser steps applied since the run began", "count"),
    _plain("rollout/version", "policy version that sampled this step", "version"),
    _plain("reference/version", "policy version that this step's reference is a copy of", "version"),
    _plain("reference/refreshes", "times that the reference was taken anew since the run began", "count"),
    _plain("rollout/lag_mean", "mean over completions of learner's version - version that sampled", "versions"),
    _plain("rollout/lag_max", "largest such lag; beyond rollout.max_policy_lag the run stops", "versions"),
    _plain("rollout/tokens", "response tokens sampled this step, of dropped groups too", "tokens"),
    _plain("eval/greedy_accuracy", "held-out problems solved by the most probable completion / problems", "fraction"),
    _plain("eval/avg_at_k", "mean over held-out problems of the share of k samples that are correct", "fraction"),
    _plain("warm_start/loss", "mean_t of -logp of the supervised token", "nats/token"),
    _plain("warm_start/accuracy", "problems solved after this many warm-start updates / problems", "fraction"),
    _plain("time/step", "wall clock of the whole step", "s"),
    _plain("time/rollout", "wall clock of sampling; of waiting for it where rollout.max_policy_lag > 0", "s"),
    _plain("time/background", "wall clock of sampling and verification beside earlier steps", "s"),
    _plain("time/reward", "wall clock of verification", "s"),
    _plain("time/learner_logp", "wall clock of the learner's log-probs of the samples", "s"),
    _plain("time/reference_logp", "wall clock of the reference's log-probs of the samples", "s"),
    _plain("time/engine_share", "wall clock of scoring the samples by exact kernels in the rollout's format", "s"),
    _plain("time/update", "wall clock of forward, backward and optimiser", "s"),
    _plain("time/sync", "wall clock of handing the weights to the rollout", "s"),
    _plain("time/eval", "wall clock of evaluation", "s"),
    _plain("time/checkpoint", "wall clock of writing the checkpoint", "s"),
    _plain("rate/rollout_tokens_per_s", "rollout/tokens / wall clock of sampling", "tokens/s"),
    _plain("rate/learner_tokens_per_s", "response tokens trained on / time/update", "tokens/s"),
)

# A row of the drop-in trainer has these beside the loop's precision/*, optim/* and time/step.
TRAINER_METRICS: tuple[Metric, ...] = (
    _plain("train/loss", "what loss_fn returned before scaling, mean over the step's micro-batches by weight", "1"),
)

METRICS: tuple[Metric, ...] = (*LOOP_METRICS, *TRAINER_METRICS, *ALL_METRICS)
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
REWARD_PART = "reward_part/"  # and any name: which there are is the recipe's to say
_CLOCK = ("time/", "rate/")
_LABELS = ("step", "precision/format")  # in rows, and no metrics: which step it is, and the format it computed in


def undeclared(row: Mapping[str, Any]) -> list[str]:
    """The keys of a metrics row, labels aside, that no metric declares: anything here is a bug of the loop."""
    return sorted(key for key in row if key not in _LABELS and key not in BY_NAME and not key.startswith(REWARD_PART))


def deterministic(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a row that a resumed run repeats bit for bit: all but what the clock says (``time/``, ``rate/``)."""
    return {key: value for key, value in row.items() if not key.startswith(_CLOCK)}


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
