"""How well a world model predicts tasks that it has not seen: trained afresh for each fold, whole tasks left out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mantissa.base.errors import MantissaError
from mantissa.genesis.worldmodel.model import WorldModel
from mantissa.genesis.worldmodel.scores import Array, Scores, auroc, counting, scored
from mantissa.genesis.worldmodel.trajectory import Trajectory
from mantissa.mismatch.intervals import Estimate, student_interval


@dataclass(frozen=True)
class Validation:
    """What came of it. ``model``, ``baseline``: scores of the out-of-fold predictions. ``gain``: AUROC of the model
    less that of the baseline, with an interval over tasks. ``overflow_rate``: of batches."""

    model: Scores
    baseline: Scores
    gain: Estimate
    overflow_rate: float
    seconds: float


def cross_validate(
    trajectories: Sequence[Trajectory],
    make: Callable[[], WorldModel],
    *,
    folds: int = 5,
    epochs: int = 3,
    batch_size: int = 32,
    seed: int = 0,
) -> Validation:
    """Train ``make()`` on the tasks of all folds but one, predict that one's, for each fold; seeded."""
    known = [each for each in trajectories if each.final_outcome != "unknown"]
    tasks = sorted({each.task for each in known})
    if not 2 <= folds <= len(tasks):
        raise MantissaError(
            f"folds={folds} over {len(tasks)} tasks: expected at least 2 and no more than there are tasks; "
            + (f"--folds {len(tasks)} divides these" if len(tasks) > 1 else "trajectories of more tasks are needed")
        )
    random.Random(seed).shuffle(tasks)
    began, overflows, batches = time.perf_counter(), 0, 0
    rows, predicted, counted, improved = list[Trajectory](), list[float](), list[float](), list[float]()
    for fold in range(folds):
        apart = set(tasks[fold::folds])
        rest = [each for each in known if each.task not in apart]
        held_out = [each for each in known if each.task in apart]
        model = make()
        for row in model.train(epochs, batch_size, rest):
            overflows, batches = overflows + row.overflows, batches + row.batches
        found = model.predict_many([(each.initial_state, each.actions) for each in held_out])
        rate = counting(rest)
        rows += held_out
        predicted += [each.success_probability for each in found]
        improved += [each.expected_improvement for each in found]
        counted += [rate(each) for each in held_out]
    p, q, gained = np.array(predicted), np.array(counted), np.array(improved)
    ours, theirs = scored(rows, p, gained), scored(rows, q, np.zeros(len(q)))
    assert ours is not None, "unknown outcomes were left out"
    assert theirs is not None, "these are the same"
    return Validation(ours, theirs, _gain(rows, p, q), overflows / max(batches, 1), time.perf_counter() - began)


def _gain(rows: Sequence[Trajectory], p: Array, q: Array) -> Estimate:
    """AUROC of p less AUROC of q, with the interval of the jackknife that leaves out one task at a time."""
    success = np.array([each.final_outcome == "success" for each in rows], np.float64)
    task = np.unique([each.task for each in rows], return_inverse=True)[1]
    tasks = int(task.max()) + 1

    def difference(kept: Array) -> float:
        areas = auroc(success[kept], p[kept]), auroc(success[kept], q[kept])
        return float("nan") if None in areas else float(areas[0]) - float(areas[1])  # type: ignore[arg-type]

    value = difference(np.ones(len(rows), bool))
    without = np.array([difference(task != t) for t in range(tasks)])
    if not np.isfinite([value, *without]).all():
        return Estimate(value, None, None, "outcomes are all alike")
    error = float(np.sqrt((tasks - 1) / tasks * np.square(without - without.mean()).sum()))
    return Estimate(value, *student_interval(value, error, tasks - 1), f"jackknife over {tasks} tasks")
