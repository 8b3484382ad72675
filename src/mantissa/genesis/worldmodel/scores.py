"""How good predicted probabilities are, and the baseline that a model must beat: counting how actions ended.

Sources: the Brier score, G. Brier, Monthly Weather Review 78 (1950) 1; the calibration error (ECE) over equal bins, C.
Guo et al., "On calibration of modern neural networks", ICML 2017; AUROC as the Mann-Whitney statistic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mantissa.genesis.worldmodel.trajectory import Trajectory

_BINS = 10
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """``auroc``: P(a success is ranked above another), None without both kinds. ``brier``: mean (p - y)^2. ``ece``:
    mean |share of successes - mean p| over ten bins of p, by their sizes. ``improvement_mse``: of the improvement.
    """

    trajectories: int
    tasks: int
    base_rate: float
    auroc: float | None
    brier: float
    ece: float
    improvement_mse: float


def scored(trajectories: Sequence[Trajectory], probability: Array, improvement: Array) -> Scores | None:
    """The scores of predictions on ``trajectories``; those with an unknown outcome do not count. None where none do."""
    known = np.array([each.final_outcome != "unknown" for each in trajectories], bool)
    if not known.any():
        return None
    success = np.array([each.final_outcome == "success" for each in trajectories])[known].astype(np.float64)
    gained = np.array([each.improvement for each in trajectories])[known]
    p = np.asarray(probability, np.float64)[known]
    return Scores(
        trajectories=int(known.sum()),
        tasks=len({each.task for each in trajectories}),
        base_rate=float(success.mean()),
        auroc=auroc(success, p),
        brier=float(np.mean((p - success) ** 2)),
        ece=ece(success, p),
        improvement_mse=float(np.mean((np.asarray(improvement, np.float64)[known] - gained) ** 2)),
    )


def auroc(success: Array, score: Array) -> float | None:
    """(sum of the successes' ranks - n(n+1)/2) / (n m), ties sharing their mean rank (Mann and Whitney 1947)."""
    n = int(success.sum())
    m = len(success) - n
    if not n or not m:
        return None
    _, which, counts = np.unique(score, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[which]
    return float((ranks[success > 0].sum() - n * (n + 1) / 2) / (n * m))


def ece(success: Array, p: Array) -> float:
    """Expected calibration error over ``_BINS`` bins of equal width."""
    bins = np.minimum((p * _BINS).astype(int), _BINS - 1)
    gaps = [abs(float(np.sum(p[bins == b] - success[bins == b]))) for b in range(_BINS)]
    return sum(gaps) / len(p)


def counting(trajectories: Sequence[Trajectory]) -> Callable[[Trajectory], float]:
    """The baseline: the success rate of a trajectory's actions among ``trajectories``.

    Of each action as a whole or, where it was not seen, by its first word, and averaged; a rate of n is drawn towards
    the whole's by one observation: (successes + base) / (n + 1).
    """
    counts: dict[str, list[float]] = {}
    known = [each for each in trajectories if each.final_outcome != "unknown"]
    base = float(np.mean([each.final_outcome == "success" for each in known])) if known else 0.5
    for each in known:
        for name in {key for action in each.actions for key in (action, _kind(action))}:
            count = counts.setdefault(name, [0.0, 0.0])
            count[0] += each.final_outcome == "success"
            count[1] += 1

    def rate(action: str) -> float:
        successes, seen = counts.get(action) or counts.get(_kind(action)) or (0.0, 0.0)
        return (successes + base) / (seen + 1)

    return lambda each: math.fsum(map(rate, each.actions)) / len(each.actions)


def _kind(action: str) -> str:
    return f"kind:{action.partition(' ')[0]}"
