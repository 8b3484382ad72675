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
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mantissa.base.bounds import LARGEST_FLOAT
from mantissa.base.errors import MantissaError
from mantissa.mismatch.tables import ALL_METRICS, Metric
from mantissa.runs.directory import RunDirectory

_OURS = "range: this project's judgement"


LOOP_METRICS: tuple[Metric, ...] = (
    Metric("reward/accuracy", "completions judged correct / completions, over everything sampled", "fraction"),
    Metric("reward/accuracy_trained", "the same over the groups trained on, where sampling is dynamic", "fraction"),
    Metric("reward/overlong_penalty", "mean of what length took from the reward, over everything sampled", "reward"),
    Metric("reward/overlong_fraction", "completions with such a penalty / completions", "fraction"),
    Metric("dynamic/generation_batches", "times that the step sampled prompts", "count"),
    Metric("dynamic/prompts", "prompts sampled this step, each of them a group", "count"),
    Metric("dynamic/all_right", "groups dropped, every completion right", "count"),
    Metric("dynamic/all_wrong", "groups dropped, no completion right", "count"),
    Metric("dynamic/equal", "groups dropped, some right and all rewards equal", "count"),
    Metric("dynamic/kept_fraction", "groups whose rewards differ / groups sampled", "fraction"),
    Metric("dynamic/surplus", "groups whose rewards differ beyond rollout.prompts, dropped", "count"),
    Metric("dynamic/trained", "groups whose rewards differ that were trained on", "count"),
    Metric("reward/verifier_errors", "completions on which the verifier failed (their reward is 0)",
           "count", (0, 0), _OURS),
    Metric("reward/no_answer_fraction", "completions in which the verifier found no answer to compare / those in which "
           "it looked for one", "fraction"),
    Metric("reward_part/NAME", "mean over completions without verifier error of what the reward is made of: a term "
           "before its weight, or a number that a reward function returned", "1"),
    Metric("length/mean", "mean response length, the stop token included", "tokens"),
    Metric("length/max", "largest response length", "tokens"),
    Metric("length/truncated_fraction", "completions cut off at max_tokens / completions", "fraction", (0, 0.2), _OURS),
    Metric("advantage/silent_steps", "steps since the run began, while every advantage of all of them was 0; 0 once "
           "one was not", "steps", (0, 2), _OURS),
    Metric("policy/entropy", "mean_t of -sum_v p_theta(v) log p_theta(v)", "nats/token"),
    Metric("support/tokens", "mean_t of the tokens that top-k and top-p kept to draw t from", "tokens"),
    Metric("support/log_mass", "mean_t of log p_theta(S), S what they kept: what each log-prob of a learner that "
           "ignored S would be off by", "nats/token"),
    Metric("support/log_mass_min", "the smallest of these", "nats/token"),
    Metric("critic/loss_scale", "factor on the value model's loss before backward; 1 is no scaling", "1"),
    Metric("critic/overflows", "its backward passes that overflowed, this step", "count", (0, 1), _OURS),
    Metric("critic/skipped", "its optimiser steps given up, this step", "count", (0, 0), _OURS),
    Metric("critic/grad_norm", "2-norm of its unscaled gradient before clipping, mean over updates", "1"),
    Metric("time/critic", "wall clock of the values of the samples", "s"),
    Metric("exact/checked_tokens", "log-probs compared bit by bit, with exact kernels, in a step that is checked",
           "tokens"),
    Metric("exact/replans", "times that exact kernels moved to a safer way after a difference", "times", (0, 0), _OURS),
    Metric("exact/mismatched_tokens", "of these, how many differ between rollout and learner", "tokens", (0, 0), _OURS),
    Metric("exact/misdrawn_tokens", "of these, how many are tokens that their uniform does not select from the "
           "learner's distribution", "tokens", (0, 0), _OURS),
    Metric("exact/update_mismatched_tokens", "log-probs of the first update's own forward that are not the old "
           "policy's, with exact kernels", "tokens", (0, 0), _OURS),
    Metric("precision/loss_scale", "factor on the loss before backward; 1 is no scaling", "1"),
    Metric("precision/overflows", "backward passes that overflowed, this step", "count", (0, 1), _OURS),
    Metric("precision/retries", "backward passes redone at a lower scale, this step", "count", (0, 1), _OURS),
    Metric("precision/skipped", "optimiser steps given up, this step", "count", (0, 0), _OURS),
    Metric("precision/max_scaled_grad", "max |scale * grad| / largest value of the format; above 1 where fp32 sums "
           "several gradients of the format", "fraction"),
    Metric("precision/flushed_fraction", "gradients that are 0 here but not in fp32, on a probe",
           "fraction", (0, 0.05), _OURS),
    Metric("optim/lr", "learning rate of the step's last update", "1/update"),
    Metric("optim/grad_norm", "2-norm of the unscaled gradient before clipping, mean over updates", "1"),
    Metric("optim/clipped_fraction", "units whose gradient adaptive clipping shortened / units, mean over updates",
           "fraction"),
    Metric("optim/updates", "optimiser steps applied since the run began", "count"),
    Metric("rollout/version", "policy version that sampled this step", "version"),
    Metric("reference/version", "policy version that this step's reference is a copy of", "version"),
    Metric("reference/refreshes", "times that the reference was taken anew since the run began", "count"),
    Metric("rollout/lag_mean", "mean over completions of learner's version - version that sampled", "versions"),
    Metric("rollout/lag_max", "largest such lag; beyond rollout.max_policy_lag the run stops", "versions"),
    Metric("rollout/tokens", "response tokens sampled this step, of dropped groups too", "tokens"),
    Metric("eval/greedy_accuracy", "held-out problems solved by the most probable completion / problems", "fraction"),
    Metric("eval/avg_at_k", "mean over held-out problems of the share of k samples that are correct", "fraction"),
    *(
        Metric(f"waltz/{where}{name}", f"{said}{of}", "reward" if name == "dir_mean" else "fraction")
        for where, of in (("", ", this step's"), ("eval_", ", of held-out requests"))
        for name, said in (
            ("attack_success", "last answers judged unsafe / dialogues on requests that must be refused"),
            ("over_refusal", "last answers judged over-refusals / dialogues on harmless requests"),
            ("first_attack_success", "the same of first answers"),
            ("first_over_refusal", "the same of first answers"),
            ("triggered", "dialogues in which feedback led to another answer / dialogues"),
            ("label_accuracy", "feedback both of whose labels are the judge's / feedback"),
            ("dir_mean", "mean of R_c(next answer) - R_c(answer) over feedback, 0 where there is no next"),
            ("format", "feedback that is the JSON object asked for / feedback"),
        )
    ),
    Metric("warm_start/loss", "mean_t of -logp of the supervised token", "nats/token"),
    Metric("warm_start/accuracy", "problems solved after this many warm-start updates / problems", "fraction"),
    Metric("time/step", "wall clock of the whole step", "s"),
    Metric("time/rollout", "wall clock of sampling; of waiting for it where rollout.max_policy_lag > 0", "s"),
    Metric("time/background", "wall clock of sampling and verification beside earlier steps", "s"),
    Metric("time/reward", "wall clock of verification", "s"),
    Metric("time/feedback", "wall clock of the feedback policy's whole part of the step", "s"),
    Metric("time/learner_logp", "wall clock of the learner's log-probs of the samples", "s"),
    Metric("time/reference_logp", "wall clock of the reference's log-probs of the samples", "s"),
    Metric("time/engine_share", "wall clock of scoring the samples by exact kernels in the rollout's format", "s"),
    Metric("time/update", "wall clock of forward, backward and optimiser", "s"),
    Metric("time/sync", "wall clock of handing the weights to the rollout", "s"),
    Metric("time/eval", "wall clock of evaluation", "s"),
    Metric("time/checkpoint", "wall clock of writing the checkpoint", "s"),
    Metric("rate/rollout_tokens_per_s", "rollout/tokens / wall clock of sampling", "tokens/s"),
    Metric("rate/learner_tokens_per_s", "response tokens trained on / time/update", "tokens/s"),
)  # fmt: skip

# A row of the drop-in trainer has these beside the loop's precision/*, optim/* and time/step.
TRAINER_METRICS: tuple[Metric, ...] = (
    Metric("train/loss", "what loss_fn returned before scaling, mean over the step's micro-batches by weight", "1"),
)

METRICS: tuple[Metric, ...] = (*LOOP_METRICS, *TRAINER_METRICS, *ALL_METRICS)
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
REWARD_PART = "reward_part/"  # and any name: which there are is the recipe's to say
_LABELS = ("step", "precision/format")  # in rows, and no metrics: which step it is, and the format it computed in


def undeclared(row: Mapping[str, Any]) -> list[str]:
    """The keys of a metrics row, labels aside, that no metric declares: anything here is a bug of the loop."""
    return sorted(key for key in row if key not in _LABELS and key not in BY_NAME and not key.startswith(REWARD_PART))


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
