"""What is said of a run: is it well (every metric against its declared healthy range, over all steps), how large is its
gap for its formats (``mantissa.mismatch.usual``), and whose is it (``mantissa.mismatch.metrics``)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mantissa.base.bounds import outside
from mantissa.mismatch.tables import K3, Metric
from mantissa.mismatch.usual import Usual, size_sentence, usual
from mantissa.runs.catalogue import BY_NAME
from mantissa.runs.directory import RunDirectory
from mantissa.runs.metrics import series, where_measured

Health = Literal["healthy", "watch", "unhealthy"]
VERDICTS = ("reward/accuracy", "eval/greedy_accuracy", "eval/avg_at_k")  # what a verifier's verdicts are counted in
_BRIEF = 0.1  # a metric out of its range for at most this share of the steps, and back by the end, is one to watch
_LAST = 10  # steps at the end, at most, whose spread is said beside a mean
_HARDLY_ANY = 0.02  # accuracy on the best step below which a run is said to have learned next to nothing
_NOISE = 0.05  # by which a share may leave [0, 1] without anything to be said about it
_SEARCH = ("precision/overflows", "precision/retries")  # how a loss scale that begins too high comes to fit
_SEARCHED = 10  # steps within which one does: larger gradients than the first step's may want it lower still
_HEADLINE = {
    "healthy": "Healthy: every metric is in its range",
    "watch": "Watch: a metric left its range for a while, and is back",
    "unhealthy": "Unhealthy: metrics are out of their range",
}


@dataclass(frozen=True)
class Judgement:
    """The verdict on a run that has done a step, a headline for it, and remarks that no single metric makes."""

    kind: Health
    headline: str
    remarks: tuple[str, ...] = ()


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


def expected_gap(environment: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Usual:
    """What is usual for a run's gap: between the formats that learner and rollout had, the coarsest of all where the
    guard changed them, at the recipe's temperature and policy lag."""
    tables = [environment, *(fell["environment"] for fell in environment.get("fell_back") or ())]
    roles = [row for table in tables for row in table.get("precision") or () if isinstance(row, dict)]
    formats = [row.get("active") for row in roles if row.get("role") in ("learner", "rollout")]
    section = (config or {}).get("rollout")
    rollout = section if isinstance(section, Mapping) else {}
    temperature, lag = rollout.get("temperature"), rollout.get("max_policy_lag")
    return usual(
        (name for name in formats if isinstance(name, str)),
        temperature if isinstance(temperature, float | int) else None,
        lag=isinstance(lag, int) and lag > 0,
    )


def expected_in(folder: Path) -> Usual:
    """What is usual for the gap of the run in ``folder``; of a folder without a recipe bf16's."""
    run = RunDirectory(folder)
    return expected_gap(run.environment, run.config if (folder / "config.yaml").is_file() else None)


def metric_of(name: str, expected: Usual) -> Metric:
    """A declared metric with the range that it has in a run: k3's is its formats'."""
    return replace(BY_NAME[K3], healthy=(None, expected.k3)) if name == K3 else BY_NAME[name]


def gap_sentence(rows: Sequence[dict[str, Any]], expected: Usual) -> str:
    """What is said of the size of a run's gap, by the median of its steps; "" where none was logged."""
    k3 = series(rows, K3)[1]
    return size_sentence(float(np.median(k3)), expected) if k3.size else ""


def check(rows: Sequence[dict[str, Any]], expected: Usual) -> list[Excursion]:
    """Every declared metric that was out of its range or not finite on some step, serious ones first.

    ``expected``: what is usual for the gap. Serious: out on the last step that has it, or on more than a tenth of its
    steps, or ever not finite. Overflows count from the step on that has found a loss scale.
    """
    excursions, searched = [], searching(rows)
    for name in BY_NAME:
        metric, seen = metric_of(name, expected), rows[searched if name in _SEARCH else 0 :]
        points = [(row["step"], float(row[name])) for row in seen if isinstance(row.get(name), int | float)]
        out = [(step, value, far) for step, value in points if (far := outside(value, *metric.healthy)) > 0]
        if not out:
            continue
        worst_step, worst, _ = max(out, key=lambda point: point[2])
        last = points[-1][1]
        serious = not metric.is_healthy(last) or len(out) > _BRIEF * len(points) or not math.isfinite(worst)
        excursions.append(Excursion(metric, len(out), len(points), out[0][0], worst, worst_step, last, serious))
    return sorted(excursions, key=lambda f: (not f.serious, f.metric.name))


def searching(rows: Sequence[dict[str, Any]]) -> int:
    """How many steps a run began with until a first loss scale that was too high had come to fit; 0 where it did not.

    The steps that overflowed from the first on, and whichever of the first ten did while the scale, where it is logged,
    had only fallen; none of them lost a batch, and the next does not overflow.
    """
    last = 0
    for count, row in enumerate(rows[:_SEARCHED], 1):
        scales = series(rows[:count], "precision/loss_scale")[1]
        fell = scales.size == count and all(a >= b for a, b in itertools.pairwise(scales))
        if row.get("precision/overflows") and (count == last + 1 or fell):
            last = count
    lost = any(row.get("precision/skipped") for row in rows[:last])
    return last if last < len(rows) and not rows[last].get("precision/overflows") and not lost else 0


def _found(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """What is to be said where a loss scale was searched for."""
    if not (steps := searching(rows)):
        return ()
    overflows = int(sum(row.get("precision/overflows", 0) for row in rows[:steps]))
    where = "in the first step" if steps == 1 else f"in the first {steps} steps"
    times = "1 overflow" if overflows == 1 else f"{overflows} overflows"
    return (f"The first loss scale was too high: {times} {where}, retried without a lost batch.",)


def judge(rows: Sequence[dict[str, Any]], excursions: Sequence[Excursion], environment: Mapping[str, Any]) -> Judgement:
    """``healthy`` without excursions, ``watch`` when all were brief and are over, ``unhealthy`` otherwise; and so is a
    run on which every advantage was 0, whatever they say. The headline has the mean reward's way.

    ``environment``: the run's; what was correct is said where it records that a verifier decides (``verdicts``).
    """
    kind: Health = "unhealthy" if any(f.serious for f in excursions) else "watch" if excursions else "healthy"
    remarks = (*(_correct(rows) if decides(environment) else ()), *_found(rows))
    advantages = series(rows, "advantage/abs_max")[1]
    if advantages.size and not advantages.any():
        remark = "Within each group all rewards were equal, on every step: there was nothing to learn from."
        return Judgement("unhealthy", "Not learning: every advantage was 0", (*remarks, remark))
    way = reward_way(rows)
    return Judgement(kind, f"{_HEADLINE[kind]}; {way}" if way else _HEADLINE[kind], remarks)


def decides(environment: Mapping[str, Any]) -> bool:
    """Whether a verifier decided what was correct in this run, as it records; so it is of one older than the record."""
    return environment.get("verdicts") is not False


def reward_way(rows: Sequence[dict[str, Any]]) -> str:
    """The mean reward of the first and of the last step, and its standard deviation over the last steps; "" where none
    was logged. ``mean reward 0.36 to 0.70 (spread 0.02 over the last 5 steps)``"""
    values = series(rows, "reward/mean")[1]
    if values.size < 2:
        return f"mean reward {values[0]:.3g}" if values.size else ""
    last = values[-min(_LAST, max(2, values.size // 2)) :]
    spread = f"spread {last.std(ddof=1):.2g} over the last {last.size} steps"
    return f"mean reward {values[0]:.3g} to {values[-1]:.3g} ({spread})"


def _correct(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """What is to be said where next to nothing was correct."""
    accuracy = series(rows, "reward/accuracy")[1]
    if accuracy.size == 0 or accuracy.max() >= _HARDLY_ANY:
        return ()
    if not accuracy.any():
        return ("No completion was correct, on any step.",)
    return (f"Hardly any completion was correct: {accuracy.max():.1%} on the best step.",)


def sentence(excursion: Excursion) -> str:
    """What one metric did, in words."""
    wanted = excursion.metric.healthy_text or "finite"
    steps = "1 step" if excursion.steps_out == 1 else f"{excursion.steps_out} steps"
    return f"{excursion.metric.name} was {number(excursion.worst)} (healthy: {wanted}), out of range on {steps}."


def number(value: float) -> str:
    """A metric's value for prose and tables: whole numbers whole, others with four digits."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e12 else f"{value:.4g}"


def small(value: float) -> str:
    """Gap-sized numbers: 0 exactly, else two digits and an exponent."""
    return "0" if value == 0 else f"{value:.1e}"


def share_sentence(rows: Sequence[dict[str, Any]], environment: Mapping[str, Any]) -> str:
    """Which share of the gap is the other engine's, of medians over the steps that were measured; why not, where none.

    Empty for a run on this package's own engine, and before the first step.
    """
    facts = environment.get("engine_share")
    if not isinstance(facts, dict) or not rows:
        return ""
    if not facts.get("measured"):
        return f"Which share of the gap is {facts.get('engine')}'s was not measured: {facts.get('reason')}."
    share = series(rows, "gap/engine_share")[1]
    parts = [series(rows, f"gap/{part}_abs_logp_diff_mean")[1] for part in ("engine", "other")]
    steps = parts[0].size
    if steps == 0:
        return ""
    pair = f"{facts['engine']} and this package's exact kernels, both in {facts['format']},"
    over = f"medians of {steps} measured steps" if steps > 1 else "one step was measured"
    if share.size == 0:
        return f"There was no gap of which {facts['engine']} could have a share, at {where_measured(steps, len(rows))}."
    middle = float(np.median(share))
    engine, other = (float(np.median(part)) for part in parts)
    left = f"{small(other)} would be left, {_rest(environment, facts['format'])}" if other else "nothing would be left"
    cancel = "; the two parts cancel in part" if not -_NOISE <= middle <= 1 + _NOISE else ""
    return (
        f"{share_text(middle)} of the gap is the engine's: {pair} differ by {small(engine)} nats a token in the mean. "
        f"With those kernels in the rollout {left} ({over}{cancel})."
    )


def share_text(share: float) -> str:
    """A share in whole percent; all and none are said of no share that is only nearly so."""
    if share == 1:
        return "All"
    if 0.995 <= share < 1:
        return "More than 99%"
    if share == 0:
        return "None"
    if 0 < share < 0.005:
        return "Less than 1%"
    if 1 < share <= 1 + _NOISE:
        return "About all"
    if -_NOISE <= share < 0:
        return "About none"
    return f"{share:.0%}"


def _rest(environment: Mapping[str, Any], rollout: str) -> str:
    """What else the gap is made of: the learner's kernels, and its format where that is another."""
    rows = [row for row in environment.get("precision") or [] if isinstance(row, dict)]
    learner = next((row.get("active") for row in rows if row.get("role") == "learner"), rollout)
    if learner == rollout:
        return "by the learner's fast kernels"
    return f"above all because the learner is in {learner}"
