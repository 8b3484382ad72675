"""The load: worker processes that do the jobs of each iteration side by side, and what is done to them on the way.

An iteration is one job of each size, all handed out at once to ``jobs`` processes. Faults are drawn from the seed: in
each iteration one job for each kind, the phase before which it comes, and for a kill up to 0.1 s into it.

- ``kill``: SIGKILL to the worker's process. A new one takes its place and does the job again.
- ``lock``: another process begins an exclusive transaction on the shared database and sits on it.
- ``disk``: the worker's limit on the size of files (RLIMIT_FSIZE) becomes 4 KiB from outside, for a second: whatever it
  writes beyond that fails, in every file, as on a full disk.
- ``hang``: among the programs that the job evolves is one that never ends.

An attempt that fails is made again, at most ``ATTEMPTS`` times. All is in one folder, and the same command goes on with
what is there: jobs that are done are not done again.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, Literal

from pydantic import Field
from soak_job import BUFFER, PHASES, SIZES, Job, Row, line_of, resident
from soak_report import EVENTS, Report, report_of

from mantissa.base.bounds import boundary
from mantissa.base.config import Section
from mantissa.base.environ import LAUNCHER
from mantissa.base.errors import MantissaError, StoppedError, nearest
from mantissa.base.files import (
    JsonLines,
    disk_errors,
    locked,
    make_folder,
    open_own,
    own,
    refuse_other_settings,
    remove,
    write_atomically,
)
from mantissa.base.readers.json import parse_json, read_json
from mantissa.genesis.worldmodel import SQLiteBuffer
from mantissa.tasks.code import CodeVerifier
from mantissa.tasks.sandbox.run import cause_of_death

FAULTS = {  # and the phases before which each may come: those that it can do something to
    "kill": PHASES, "lock": ("store",), "disk": ("evolve", "store", "train", "save"), "hang": ("evolve",),
}  # fmt: skip
ATTEMPTS = 5
_LONGEST_S = 300.0  # of an attempt that says nothing new
_HELD_S, _FULL_S, _LATEST_S = 2.0, 1.0, 0.1
_FULL_BYTES = 4096
_SETTINGS = "soak.json"
_BOOT = (
    "from mantissa.base.environ import end_with_launcher; end_with_launcher(); import sys, pathlib; "
    "sys.path.insert(0, sys.argv[4]); from soak_job import serve; "
    "serve(pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3])"
)
_HOLD = (
    "import sqlite3, sys, time; c = sqlite3.connect(sys.argv[1], 30, isolation_level=None); "
    "c.execute('BEGIN EXCLUSIVE'); print('held', flush=True); time.sleep(float(sys.argv[2]))"
)


class SoakConfig(Section):
    """What a load does."""

    called: ClassVar = "soak"

    sizes: tuple[str, ...] = Field(tuple(SIZES), min_length=1)
    iterations: int = Field(10, ge=1, le=10_000)
    jobs: int = Field(5, ge=1, le=64)
    precision: Literal["fp32", "bf16", "fp16"] = "fp16"
    faults: tuple[str, ...] = ()
    hidden_dim: int = Field(256, ge=16, le=4096)
    seed: int = Field(0, ge=0, le=10**6)

    def model_post_init(self, _: Any) -> None:
        for what, names, known in (("sizes", self.sizes, tuple(SIZES)), ("faults", self.faults, tuple(FAULTS))):
            for name in names:
                if name not in known:
                    raise ValueError(f"{what}: {name!r}: expected of {', '.join(known)}{nearest(name, known)}")
            if len(set(names)) < len(names):
                raise ValueError(f"{what}: {','.join(names)}: one is named twice")

    def iteration(self, number: int) -> tuple[list[Job], list[tuple[str, str, str, float]]]:
        """Its jobs, and its faults: kind, job, phase, seconds into it."""
        rng = random.Random(f"{self.seed}:{number}")
        faults = [(k, rng.choice(self.sizes), rng.choice(FAULTS[k]), rng.uniform(0, _LATEST_S)) for k in self.faults]
        hanging = {size for kind, size, _, _ in faults if kind == "hang"}
        jobs = [
            Job(f"{number}-{size}", size, number, self.seed * 10**6 + number * 10 + n, self.precision, self.hidden_dim,
                size in hanging)
            for n, size in enumerate(self.sizes)
        ]  # fmt: skip
        return jobs, [(k, f"{number}-{size}", phase, late) for k, size, phase, late in faults if k != "hang"]


def run_soak(config: SoakConfig, folder: Path, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Do all jobs of ``config`` that ``folder`` does not have yet; the report on all of them.

    ``MantissaError``, with nothing touched, for a folder of something else or of another load.
    """
    CodeVerifier().prepare()  # where programs cannot be isolated that is one error, and not each job's
    with _at_work(folder, config):
        try:
            _Load(config, folder, progress).run()
        except KeyboardInterrupt:
            raise StoppedError("interrupted; the same command goes on with it") from None
        return report_of(config.model_dump(), folder)


@contextmanager
def _at_work(folder: Path, config: SoakConfig) -> Iterator[None]:
    make_folder(folder)
    path = folder / _SETTINGS
    with disk_errors(folder):
        ours = ("soak.lock", f".{_SETTINGS}.")  # what one leaves that was killed before it wrote its settings
        if not path.exists() and not all(p.name.startswith(ours) for p in folder.iterdir()):
            raise MantissaError(f"{folder} holds something else: name an empty or a new folder")
    asked = config.model_dump(mode="json")
    with locked(folder / "soak.lock", "name another folder"):
        if not path.exists():
            write_atomically(path, json.dumps(asked) + "\n")
        with boundary(path, "restore it, or name another folder"):
            there = {**read_json(path), "iterations": config.iterations}  # which may be others
        refuse_other_settings(folder, "load", there, asked)
        yield


class _Load:
    """The workers, one a slot, and what happens to them."""

    def __init__(self, config: SoakConfig, folder: Path, progress: Callable[[str], None]) -> None:
        self._config, self._folder, self._progress = config, folder, progress
        self._events, self._guard, self._stopped = JsonLines(folder / EVENTS), threading.Lock(), False
        rows = self._events.read()
        self._number = rows[-1]["step"] if rows else 0
        self._done = {row["job"] for row in rows if row["event"] == "done"}
        self._workers: dict[str, _Worker] = {}
        self._due: dict[tuple[str, str], list[tuple[str, float]]] = {}  # faults, by job and phase
        self._later, self._holders = list[threading.Timer](), list[subprocess.Popen[bytes]]()
        self._free = SimpleQueue[str]()
        with disk_errors(folder):
            for name in ("workers", "jobs"):
                own(folder / name).mkdir(exist_ok=True)
            own(folder / BUFFER)
            for path in (folder / "jobs").iterdir():
                if path.name in self._done:  # killed before it was removed
                    remove(path)

    def run(self) -> None:
        plan = [self._config.iteration(number) for number in range(self._config.iterations)]
        if all(job.name in self._done for jobs, _ in plan for job in jobs):
            return
        with SQLiteBuffer(self._folder / BUFFER, 10**8), ThreadPoolExecutor(self._config.jobs) as pool:
            try:
                slots = [f"worker-{n}" for n in range(self._config.jobs)]
                for slot in pool.map(self._worker, slots):
                    self._free.put(slot.slot)
                for number, (jobs, faults) in enumerate(plan):
                    todo = [job for job in jobs if job.name not in self._done]
                    for kind, job, phase, late in faults:
                        self._due.setdefault((job, phase), []).append((kind, late))
                    began = time.perf_counter()
                    list(pool.map(self._job, todo))
                    if todo:
                        self._note(event="iteration", iteration=number, jobs=len(todo), s=time.perf_counter() - began)
            finally:
                self.close()  # or the pool would wait for their ends

    def _job(self, job: Job) -> None:
        """Do a job, again where an attempt fails; and note how it ended."""
        slot, began, said = self._free.get(), time.perf_counter(), None
        for attempt in range(1, ATTEMPTS + 1):
            if self._stopped:
                return
            worker = self._worker(slot)
            said = worker.work(job, partial(self._inject, job, worker))
            if isinstance(said, dict) or self._stopped:
                break
            self._note(event="attempt failed", job=job.name, attempt=attempt, why=said[:300])
            time.sleep(0.5 * attempt)
        self._free.put(slot)
        about = {"job": job.name, "size": job.size, "iteration": job.iteration, "slot": slot, "pid": worker.pid}
        about |= {"attempts": attempt, "latency_s": time.perf_counter() - began}
        if isinstance(said, dict):
            self._note(event="done", **about, own_rss_bytes=resident(), **said)
            remove(self._folder / "jobs" / job.name)
            self._progress(f"iteration {job.iteration + 1} of {self._config.iterations}: {job.size} done")
        elif not self._stopped:
            self._note(event="failed", **about)

    def _worker(self, slot: str) -> _Worker:
        worker = self._workers.get(slot)
        if worker is None or worker.dead:
            worker = self._workers[slot] = _Worker(slot, self._folder, self._config.precision)
        return worker

    def _inject(self, job: Job, worker: _Worker, phase: str) -> None:
        for kind, late in self._due.pop((job.name, phase), ()):
            if kind == "kill":
                self._in(late, partial(self._kill, job, worker, phase))
            elif kind == "disk":
                before = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (_FULL_BYTES, before[1]))
                self._fault("disk", job, phase)
                self._in(_FULL_S, partial(_lift, worker.pid, before))
            else:
                command = [sys.executable, "-I", "-S", "-c", _HOLD, str(self._folder / BUFFER), str(_HELD_S)]
                holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
                self._holders.append(holder)
                assert holder.stdout is not None
                with holder.stdout as out:
                    if out.readline():  # held
                        self._fault("lock", job, phase)

    def _kill(self, job: Job, worker: _Worker, phase: str) -> None:
        self._fault("kill", job, phase)
        worker.kill()

    def _in(self, seconds: float, call: Callable[[], Any]) -> None:
        timer = threading.Timer(seconds, call)
        self._later = [*(each for each in self._later if each.is_alive()), timer]
        timer.start()

    def _fault(self, kind: str, job: Job, phase: str) -> None:
        self._note(event="fault", kind=kind, job=job.name, phase=phase)

    def _note(self, **row: Any) -> None:
        with self._guard:
            self._number += 1
            self._events.append({"step": self._number, "time": time.time(), **row})

    def close(self) -> None:
        """End every process."""
        self._stopped = True
        for timer in self._later:
            timer.cancel()
        for worker in self._workers.values():
            worker.close()
        for holder in self._holders:
            holder.wait()


class _Worker:
    """A process that does one job at a time, on one thread; what it prints goes to ``SLOT.log``."""

    def __init__(self, slot: str, folder: Path, precision: str) -> None:
        self.slot = slot
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", LAUNCHER: str(os.getpid())}
        with open_own(folder / "workers" / f"{slot}.log") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, str(folder), slot, precision, str(Path(__file__).parent)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=os.environ | one_thread, text=True,
            )  # fmt: skip
        self.pid = self._process.pid
        self._listen(lambda phase: None)  # until it is ready

    @property
    def dead(self) -> bool:
        return self._process.poll() is not None

    def work(self, job: Job, told: Callable[[str], None]) -> Row | str:
        """Hand a job over and wait: what came of it, or why nothing did. ``told``: of each phase it begins."""
        self._send(line_of(job))
        return self._listen(told)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it was killed; nothing more comes from it either
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _listen(self, told: Callable[[str], None]) -> Row | str:
        assert self._process.stdout is not None
        while True:
            watchdog = threading.Timer(_LONGEST_S, self.kill)
            watchdog.start()
            line = ""
            with suppress(ValueError):  # closed by another thread: the load is stopped
                line = self._process.stdout.readline()
            watchdog.cancel()
            if not line.endswith("\n"):
                self.close()
                return f"its process ended: {cause_of_death(self._process.wait())}"
            said = parse_json(line)
            if "phase" in said:
                told(said["phase"])
                self._send("\n")  # it waits for that: what was done to it is done
            elif "error" in said:
                return str(said["error"])
            else:
                return dict(said.get("row", {}))

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """End it, whatever it does. Safe to call by two threads."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a line that it did not read
                pipe.close()


def _lift(pid: int, before: tuple[int, int]) -> None:
    with suppress(ProcessLookupError):  # it was killed in between
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
