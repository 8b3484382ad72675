"""Grading with a guard: a verifier that raises, hangs or kills its process costs one sample its reward, never the run.

Verifiers that cannot hang run here, in line. The others run in worker processes that start on first use and serve until
``close``; a worker that dies or exceeds the time limit is replaced, and the sample it held gets the lowest reward with
``Reward.error`` set. Rewards come back in the order asked for and do not depend on which worker gave them.

A worker is a fresh interpreter (not a fork: forking a process that has CUDA or threads is unsafe) which imports this
package and the verifier's module, not the caller's ``__main__``: so a script needs no main guard, and a worker costs a
fraction of a second, torch not included. It follows that a verifier class must live in an importable module.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait
from types import TracebackType

from mantissa.errors import MantissaError
from mantissa.tasks.types import Problem, Reward, Task, Verifier
from mantissa.tasks.worker import checked, describe

STARTUP_LIMIT_S = 120.0  # imports on a loaded machine; not the sample's time
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); from mantissa.tasks.worker import main; "
    "main(int(sys.argv[1]), float(sys.argv[2]))"
)


class WorkerStartError(RuntimeError):
    """A worker process could not load the verifier: a mistake in the set-up, which no sample is to blame for."""


class Grader:
    """Grades lists of (problem, completion) with a task's verifier. A context manager; not for use by two threads.

    ``timeout_s``: wall-clock seconds for one sample (isolated verifiers only). ``workers``: processes at most.
    Workers end with ``close``, with the Grader, at exit, and by themselves where this process is killed.
    """

    def __init__(self, task: Task, timeout_s: float = 10.0, workers: int = 2):
        if not timeout_s > 0 or workers < 1:
            raise MantissaError(
                f"grader: timeout_s={timeout_s}, workers={workers}: expected more than 0 and at least 1"
            )
        self._verifier: Verifier = task.verifier
        self._timeout_s = timeout_s
        self._limit = workers
        self._workers: list[_Worker] = []
        self._closer = weakref.finalize(self, _close_all, self._workers, os.getpid())  # also runs at exit

    def grade(self, samples: Sequence[tuple[Problem, str]]) -> list[Reward]:
        """One reward for each sample, in order. ``Reward.error`` says where the verifier failed, and how."""
        if not self._verifier.isolated:
            return [self._grade_inline(problem, completion) for problem, completion in samples]
        if not self._closer.alive:
            raise RuntimeError("this Grader is closed")
        try:
            return self._grade_isolated(samples)
        except BaseException:
            # Interrupted half-way, workers hold answers to questions nobody asks any more: start afresh next time.
            _close_all(self._workers, os.getpid())
            raise

    def close(self) -> None:
        """End the worker processes. Safe to call twice."""
        self._closer()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _failed(self, why: str) -> Reward:
        return Reward(self._verifier.low, correct=False, error=why)

    def _grade_inline(self, problem: Problem, completion: str) -> Reward:
        try:
            return checked(self._verifier, self._verifier(problem, completion))
        except Exception as error:  # noqa: BLE001 - a verifier is foreign code: its failure costs this sample only
            return self._failed(describe(error))

    def _grade_isolated(self, samples: Sequence[tuple[Problem, str]]) -> list[Reward]:
        results: list[Reward | None] = [None] * len(samples)
        queue = deque(range(len(samples)))
        while queue or any(w.sample is not None for w in self._workers):
            self._replace_dead(min(self._limit, len(queue)))
            for worker in self._workers:
                if queue and worker.ready and worker.sample is None and worker.submit(queue[0], samples[queue[0]]):
                    queue.popleft()
            pending = [w for w in self._workers if not w.ready or w.sample is not None]
            nearest_s = min((w.deadline for w in pending), default=time.monotonic()) - time.monotonic()
            answered = wait([w.pipe for w in pending], timeout=max(0.0, nearest_s))
            for worker in pending:
                if worker.pipe in answered:
                    self._collect(worker, results)
                elif time.monotonic() >= worker.deadline:
                    self._expire(worker, results)
        assert all(results), "every sample leaves the queue for a worker, and every worker answers, dies or expires"
        return [reward for reward in results if reward is not None]

    def _replace_dead(self, count: int) -> None:
        self._workers[:] = [w for w in self._workers if not w.pipe.closed]
        while len(self._workers) < count:
            self._workers.append(_Worker(self._verifier, self._timeout_s))

    def _collect(self, worker: _Worker, results: list[Reward | None]) -> None:
        """Read what a worker sent: that it is ready, the reward of its sample, or the end of the file: it died."""
        try:
            message = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            exit_code = worker.end(patience_s=5.0)  # it is dying: let it, its own exit code tells why
            if worker.sample is None:
                raise WorkerStartError(f"a grading worker died at start ({_cause_of_death(exit_code)})") from None
            results[worker.sample] = self._failed(f"the verifier's process died ({_cause_of_death(exit_code)})")
            worker.sample = None
            return
        if not worker.ready:
            if message[0] != "ready":
                worker.end(patience_s=1.0)
                raise WorkerStartError(f"a grading worker could not load {self._verifier!r}: {message[1]}")
            worker.ready = True
            return
        assert worker.sample is not None
        results[worker.sample] = message if isinstance(message, Reward) else self._failed(message)
        worker.sample = None

    def _expire(self, worker: _Worker, results: list[Reward | None]) -> None:
        worker.end(patience_s=0.0)
        if worker.sample is None:
            raise WorkerStartError(f"a grading worker did not start within {STARTUP_LIMIT_S:g} s")
        results[worker.sample] = self._failed(f"the verifier took longer than {self._timeout_s:g} s")
        worker.sample = None


class _Worker:
    """One process, its pipe, and the index of the sample it holds. ``deadline``: of the start, then of the sample."""

    def __init__(self, verifier: Verifier, timeout_s: float):
        self._timeout_s = timeout_s
        self.ready = False
        self.sample: int | None = None
        self.deadline = time.monotonic() + STARTUP_LIMIT_S
        self.pipe, theirs = multiprocessing.Pipe(duplex=True)
        try:
            arguments = [str(theirs.fileno()), repr(timeout_s), json.dumps([str(p) for p in sys.path])]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *arguments], pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
            )
        finally:
            theirs.close()  # theirs alone now, so that we read end-of-file when the worker dies
        self._send(pickle.dumps(verifier))

    def submit(self, index: int, sample: tuple[Problem, str]) -> bool:
        """Hand a sample over and start its clock; False where the worker was dead already: no fault of the sample."""
        if self._process.poll() is not None or not self._send(pickle.dumps(sample)):
            self.end(patience_s=0.0)
            return False
        self.sample, self.deadline = index, time.monotonic() + self._timeout_s
        return True

    def _send(self, payload: bytes) -> bool:
        try:
            self.pipe.send_bytes(payload)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def end(self, patience_s: float) -> int:
        """Close the pipe, give the process ``patience_s`` to go, kill it, reap it; its exit code, minus the signal."""
        self.pipe.close()
        try:
            return self._process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _close_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # a forked child inherits the list, not the processes
        for worker in workers:
            worker.pipe.close()  # all at once, so that they end side by side
        until = time.monotonic() + 0.5  # an idle one ends at once; only one inside a verifier has to be killed
        for worker in workers:
            worker.end(patience_s=max(0.0, until - time.monotonic()))
        workers.clear()


def _cause_of_death(exit_code: int) -> str:
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
