"""One job of the load, in a process of its own: evolve, store, train, save, predict.

A worker takes a job a line from stdin and says on stdout, as JSON, which phase comes next, and at the end what came of
it; before each phase it waits for a line. A job that was begun before, here or in a process that is gone, goes on:
evolution from its archive, the store by the trajectories' ids, which follow from the job's seed; training begins anew
from the same weights.

What is stored is committed first and then noted in the worker's own log, fsynced. So the database may hold what no log
has, until the job is done again; a log never holds what the database has not.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mantissa.base.errors import MantissaError
from mantissa.base.files import JsonLines
from mantissa.base.readers.json import parse_json
from mantissa.bench.runner import give_back_freed, rotated
from mantissa.genesis.evolution import Evolution, EvolutionConfig, shipped
from mantissa.genesis.evolution.proposers import Edits, Proposal, ProposalRequest
from mantissa.genesis.worldmodel import SQLiteBuffer, Trajectory, WorldModel, synthetic
from mantissa.guard import GuardConfig

BUFFER = "buffer.db"
PHASES = ("evolve", "store", "train", "save", "predict")
BATCH = 16
_PART = 10  # trajectories of a transaction
_OF_A_TASK = 40  # trajectories at most
_ASKED = 32  # predictions that are timed
Row = dict[str, Any]


class Size(NamedTuple):
    """What a job of this size does: trajectories that it evolves, passes over them."""

    trajectories: int
    epochs: int


SIZES = {
    "simple_service": Size(50, 1), "medium_saas": Size(100, 2), "complex_platform": Size(200, 3),
    "small_api": Size(30, 1), "enterprise_app": Size(150, 2),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """``seed``: no other job's. ``hang``: a program that never ends is among those that it evolves, for each task."""

    name: str
    size: str
    iteration: int
    seed: int
    precision: str
    hidden_dim: int
    hang: bool = False


class _OneNeverEnds(Edits):
    """Edits, the first of which is a program that never ends."""

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        found = super().propose(requests)
        hanging = f"def {requests[0].task.name}(*a):\n    while True:\n        pass\n"
        return [replace(each, source=each.source if n else hanging) for n, each in enumerate(found)]


def work(job: Job, folder: Path, log: JsonLines, told: Callable[[str], None]) -> Row:
    """Do the job in ``folder``, whose buffer all jobs share; its figures."""
    place, size, seconds = folder / "jobs" / job.name, SIZES[job.size], dict[str, float]()

    def timed(phase: str, call: Callable[[], Any]) -> Any:
        told(phase)
        began = time.perf_counter()
        result = call()
        seconds[f"{phase}_s"] = time.perf_counter() - began
        return result

    rows, spent, hung = timed("evolve", lambda: _evolved(job, size, place))
    with SQLiteBuffer(folder / BUFFER, 10**8) as buffer:
        timed("store", lambda: _stored(rows, buffer, job, log))
        learnt = buffer.by_agent(job.name)[::-1]
    models, figures = timed("train", lambda: _trained(job, size, place, learnt))
    seconds["train_s"] = figures["train_s"]  # without the control's
    model = models[job.precision]
    path = timed("save", lambda: model.save(place / "world.pt"))
    asked = [(each.initial_state, each.actions) for each in learnt[:_ASKED]]
    took = timed("predict", lambda: [_seconds(partial(model.predict, *each)) for each in asked])
    again = WorldModel(hidden_dim=job.hidden_dim, model_path=path, precision=job.precision)
    if again.predict_many(asked) != model.predict_many(asked):
        raise MantissaError(f"{path}: the world model that was read back predicts otherwise than the one saved")
    seconds["predict_median_s"] = float(np.median(took))
    return figures | seconds | {"trajectories": len(rows), "executions": spent, "hung": hung}


def _evolved(job: Job, size: Size, place: Path) -> tuple[list[Trajectory], int, int]:
    """Trajectories of evolutions of drawn tasks, as many as the size says; executions, and how many never ended."""
    rows, spent, hung = list[Trajectory](), 0, 0
    for task in random.Random(job.seed).sample(sorted(shipped()), len(shipped())):
        left = size.trajectories - len(rows)
        if not left:
            break
        config = EvolutionConfig(
            tasks=(task,), executions=min(left, _OF_A_TASK) + 1, pool=6, run=6, rank="random", workers=1, seed=job.seed
        )
        proposer = _OneNeverEnds() if job.hang else None
        with Evolution(config, place / task, proposer) as evolution:
            evolution.run()
            known = evolution.archive.candidates()
            rows += evolution.archive.buffer.newest()[::-1]
        spent += len(known)
        hung += sum(each.errors == ("out of time",) for each in known)
    if len(rows) < size.trajectories:
        raise MantissaError(f"{job.name}: the tasks gave {len(rows)} of {size.trajectories} trajectories")
    return [each.model_copy(update={"agent": job.name}) for each in rows], spent, hung


def _stored(rows: Sequence[Trajectory], buffer: SQLiteBuffer, job: Job, log: JsonLines) -> None:
    """Commit some at a time, and note each in the log, with its seconds."""
    number = itertools.count(len(log.read()) + 1)
    for at in range(0, len(rows), _PART):
        part = rows[at : at + _PART]
        took = _seconds(partial(buffer.store, *part))
        log.append({"step": next(number), "job": job.name, "s": took, "ids": " ".join(each.id for each in part)})


def _trained(job: Job, size: Size, place: Path, rows: Sequence[Trajectory]) -> tuple[dict[str, WorldModel], Row]:
    """A model in the precision asked for and the fp32 control: the same weights, rows and order, who begins in turn."""
    models, figures = dict[str, WorldModel](), Row()
    for precision in rotated(list(dict.fromkeys(("fp32", job.precision))), job.iteration):
        run_dir = place / f"training-{precision}"
        shutil.rmtree(run_dir, ignore_errors=True)  # of an attempt that failed
        model = WorldModel(
            hidden_dim=job.hidden_dim, precision=precision, seed=job.seed, run_dir=run_dir, guard=GuardConfig()
        )
        began, cpu = time.perf_counter(), time.process_time()
        history = model.train(size.epochs, BATCH, rows)
        which = "" if precision == job.precision else "control_"
        figures |= {
            f"{which}train_s": time.perf_counter() - began, f"{which}train_cpu_s": time.process_time() - cpu,
            f"{which}loss": history[-1].loss,
        }  # fmt: skip
        models[precision] = model
    trainer = models[job.precision].trainer
    said = JsonLines(place / f"training-{job.precision}" / "guard.jsonl").read()
    return models, figures | {
        "active": trainer.precision.active.name, "backend": trainer.precision.backend, "steps": trainer.steps,
        "overflows": sum(row.overflows for row in models[job.precision].history), "retried": trainer.retried,
        "skipped": trainer.skipped, "guard_events": sum(row["action"] != "ok" for row in said),
    }  # fmt: skip


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def serve(folder: Path, slot: str, precision: str) -> None:
    """The worker's process: jobs from stdin until it closes."""
    log = JsonLines(folder / "workers" / f"{slot}.jsonl")
    for warm in dict.fromkeys(("fp32", precision)):  # what a process does once is nobody's time
        WorldModel(hidden_dim=16, precision=warm).train(1, BATCH, synthetic(BATCH, 0))
    _say(ready=True)
    for line in sys.stdin:
        job = Job(**parse_json(line))
        try:
            row = work(job, folder, log, _wait)
        except MantissaError as error:  # a disk that is full, a database that is held: not the process' own fault
            _say(error=str(error))
        else:
            gc.collect()
            give_back_freed()
            _say(row=row | {"rss_bytes": resident()})


def _wait(phase: str) -> None:
    _say(phase=phase)
    sys.stdin.readline()


def resident() -> int:
    """Bytes of memory that this process holds (Linux, which the sandbox needs anyway)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def line_of(job: Job) -> str:
    """The job as ``serve`` reads it."""
    return json.dumps(asdict(job)) + "\n"


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)
