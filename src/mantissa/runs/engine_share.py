"""The sentence on whose the gap is, for the end of a run and for its page; see ``mantissa.mismatch.metrics``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mantissa.runs.live import small
from mantissa.runs.metrics import series, where_measured

_NOISE = 0.05  # by which a share may leave [0, 1] without anything to be said about it


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
