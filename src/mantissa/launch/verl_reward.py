"""Mantissa's verifiers for verl's reward workers: verl imports this module there and calls ``compute_score``.

The package travels with the job (Ray's ``py_modules``), so that a completion earns on the cluster what it earns here. A
verifier that may hang runs in a process of its own under the recipe's limits, one for each thread of a reward worker:
verl calls from several, and a ``Grader`` belongs to one.
"""

from __future__ import annotations

import threading
from typing import Any

from mantissa.tasks import Grader
from mantissa.tasks.rewards import verifier_named
from mantissa.tasks.types import Problem

_local = threading.local()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    verifier: str,
    timeout_s: float = 10.0,
    memory_gib: float = 4.0,
    **_more: Any,
) -> dict[str, float]:
    """``score``: the reward of ``solution_str`` under the named verifier. ``acc``: 1 where it is right, else 0.

    ``acc`` is what dynamic sampling looks at. ``grading_error``: 1 where the verifier failed or ran out of time; the
    score is then the lowest one. Raises ``MantissaError`` for an unknown verifier.
    """
    graders: dict[tuple[str, float, float], Grader] = _local.__dict__.setdefault("graders", {})
    key = (verifier, timeout_s, memory_gib)
    if key not in graders:
        graders[key] = Grader(verifier_named(verifier), timeout_s=timeout_s, workers=1, memory_gib=memory_gib)
    problem = Problem("verl", "", str(ground_truth), str(data_source))
    (reward,) = graders[key].grade([(problem, solution_str)])
    return {
        "score": float(reward.value),
        "acc": float(reward.correct),
        "grading_error": float(reward.error is not None),
    }
