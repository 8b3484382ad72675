"""Grading with a guard: a verifier that raises, hangs or kills its process costs one sample its reward, never the run.

Verifiers that cannot hang run here, in line. The others run in worker processes that start on first use and serve until
``close``; a worker that dies or exceeds the time limit is replaced, and the sample it held gets the verifier's
``failure`` with ``Reward.error`` set. A verifier that grades several samples in a call gets them in chunks, cut at the
same places whatever the workers' speed; the samples of a chunk that is lost are graded again one by one, so that only
the one to blame pays. Rewards come back in the order asked for and do not depend on which worker gave them.

A worker is a fresh interpreter (not a fork: forking a process that has CUDA or threads is unsafe) which imports this
package and the verifier's module, not the caller's ``__main__``: so a script needs no main guard, and a worker costs a
fraction of a second, torch not included. It follows that a verifier class must live in an importable module.
"""

from __future__ import annotations

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
from contextlib import suppress
from multiprocessing.connection import wait
from types import TracebackType

from mantissa.errors import MantissaError
from mantissa.tasks.sandbox.worker import grade_samples
from mantissa.tasks.types import Problem, Reward, Task, Verifier

STARTUP_LIMIT_S = 120.0  # imports on a loaded machine; not the sample's time
_BOOT = (
    "import sys; sys.path[:] = sys.argv[4:]; from mantissa.tasks.sandbox.worker import main; "
    "main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))"
)


class WorkerStartError(RuntimeError):
    """A worker process could not load the verifier: a mistake in the set-up, which no sample is to blame for."""


class Grader:
    """Grades lists of (problem, completion) with a task's verifier. A context manager; not for use by two threads.

    ``timeout_s``: wall-clock seconds for one call: one sample, or one chunk of a batched verifier (isolated verifiers
    only). ``workers``: processes at most. ``memory_gib``: address space of each. ``notes``: what the verifier says of
    its guards, once a worker has started. Workers end with ``close``, with the Grader, at exit, and by themselves where
    this process is killed.
    """

    def __init__(self, task: Task, timeout_s: float = 10.0, workers: int = 2, memory_gib: float = 4.0):
        if not timeout_s > 0 or workers < 1:
            raise MantissaError(
                f"grader: timeout_s={timeout_s}, workers={workers}: expected more than 0 and at least 1"
            )
        self.notes: tuple[str, ...] = ()
        self._chunk = 1
        self._memory_bytes = int(memory_gib * 2**30)
        self._verifier: Verifier = task.verifier
        self._timeout_s = timeout_s
        self._limit = workers
        self._workers: list[_Worker] = []
        self._closer = weakref.finalize(self, _close_all, self._workers, os.getpid())  # also runs at exit

    def start(self) -> None:
        """Start one worker now, where there will be any, so that a mistake shows before a run begins.

        Raises ``MantissaError`` for a user's mistake, ``WorkerStartError`` for any other reason not to start.
        """
        if self._verifier.isolated:
            self._guarded([])

    def grade(self, samples: Sequence[tuple[Problem, str]]) -> list[Reward]:
        """One reward for each sample, in order. ``Reward.error`` says where the verifier failed, and how."""
        if not self._verifier.isolated:
            return [self._reward(reply) for sample in samples for reply in grade_samples(self._verifier, [sample])]
        return self._guarded(samples) if samples else []

    def _guarded(self, samples: Sequence[tuple[Problem, str]]) -> list[Reward]:
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

    def _reward(self, reply: Reward | str) -> Reward:
        return reply if isinstance(reply, Reward) else Reward(self._verifier.failure, correct=False, error=reply)

    def _grade_isolated(self, samples: Sequence[tuple[Problem, str]]) -> list[Reward]:
        results: list[Reward | None] = [None] * len(samples)
        queue = _Queue(len(samples))
        while queue or any(w.indices for w in self._workers) or not (samples or any(w.ready for w in self._workers)):
            self._replace_dead(max(1, min(self._limit, -(-len(queue) // self._chunk))))
            for worker in self._workers:
                if queue and worker.ready and not worker.indices:
                    indices = queue.take(self._chunk)
                    if not worker.submit(indices, [samples[i] for i in indices]):
                        queue.put_back(indices)
            pending = [w for w in self._workers if not w.pipe.closed and (not w.ready or w.indices)]
            nearest_s = min((w.deadline for w in pending), default=time.monotonic()) - time.monotonic()
            answered = wait([w.pipe for w in pending], timeout=max(0.0, nearest_s))
            for worker in pending:
                if worker.pipe in answered:
                    self._collect(worker, results, queue)
                elif time.monotonic() >= worker.deadline:
                    self._expire(worker, results, queue)
        assert all(results), "every sample leaves the queue for a worker, and every worker answers, dies or expires"
        return [reward for reward in results if reward is not None]

    def _replace_dead(self, count: int) -> None:
        self._workers[:] = [w for w in self._workers if not w.pipe.closed]
        while len(self._workers) < count:
            self._workers.append(_Worker(self._verifier, self._timeout_s, self._memory_bytes))

    def _collect(self, worker: _Worker, results: list[Reward | None], queue: _Queue) -> None:
        """Read what a worker sent: that it is ready, the rewards of its samples, or the end of the file: it died."""
        try:
            message = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            exit_code = worker.end(patience_s=5.0)  # it is dying: let it, its own exit code tells why
            if not worker.indices:
                raise WorkerStartError(f"a grading worker died at start ({_cause_of_death(exit_code)})") from None
            self._lose(worker, f"the verifier's process died ({_cause_of_death(exit_code)})", results, queue)
            return
        if not worker.ready:
            kind, *rest = message
            if kind != "ready":
                worker.end(patience_s=1.0)
                if kind == "refused":
                    raise MantissaError(rest[0])
                raise WorkerStartError(f"a grading worker could not load {self._verifier!r}: {rest[0]}")
            worker.ready = True
            self._chunk, self.notes = rest
            return
        for index, reply in zip(worker.indices, message, strict=True):
            results[index] = self._reward(reply)
        worker.indices = ()

    def _expire(self, worker: _Worker, results: list[Reward | None], queue: _Queue) -> None:
        worker.end(patience_s=0.0)
        if not worker.indices:
            raise WorkerStartError(f"a grading worker did not start within {STARTUP_LIMIT_S:g} s")
        self._lose(worker, f"the verifier took longer than {self._timeout_s:g} s", results, queue)

    def _lose(self, worker: _Worker, why: str, results: list[Reward | None], queue: _Queue) -> None:
        """A worker is gone. A sample it held alone is to blame; of several, each is tried by itself."""
        if len(worker.indices) == 1:
            results[worker.indices[0]] = self._reward(why)
        else:
            queue.alone.extend(worker.indices)
        worker.indices = ()


class _Queue:
    """Indices of samples that wait: ``together`` in chunks, ``alone`` one by one. Those alone come last."""

    def __init__(self, count: int) -> None:
        self.together = deque(range(count))
        self.alone: deque[int] = deque()

    def __len__(self) -> int:
        return len(self.together) + len(self.alone)

    def take(self, chunk: int) -> tuple[int, ...]:
        if not self.together:
            return (self.alone.popleft(),)
        return tuple(self.together.popleft() for _ in range(min(chunk, len(self.together))))

    def put_back(self, indices: tuple[int, ...]) -> None:
        """Undo ``take``: the chunks that follow are cut where they would have been."""
        if not self.together and len(indices) == 1:
            self.alone.appendleft(indices[0])
        else:
            self.together.extendleft(reversed(indices))


class _Worker:
    """One process, its pipe, and the indices of the samples it holds. ``deadline``: of the start, then of the call."""

    def __init__(self, verifier: Verifier, timeout_s: float, memory_bytes: int):
        self._timeout_s = timeout_s
        self.ready = False
        self.indices: tuple[int, ...] = ()
        self.deadline = time.monotonic() + STARTUP_LIMIT_S
        self.pipe, theirs = multiprocessing.Pipe(duplex=True)
        try:
            arguments = [str(theirs.fileno()), repr(timeout_s), str(memory_bytes), *map(str, sys.path)]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, *arguments],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a group of its own: what a reward function starts is killed with it
            )
        finally:
            theirs.close()  # theirs alone now, so that we read end-of-file when the worker dies
        self._send(pickle.dumps(verifier))

    def submit(self, indices: tuple[int, ...], samples: Sequence[tuple[Problem, str]]) -> bool:
        """Hand samples over and start their clock; False where the worker was dead already: no fault of theirs."""
        if self._process.poll() is not None or not self._send(pickle.dumps(samples)):
            self.end(patience_s=0.0)
            return False
        self.indices, self.deadline = indices, time.monotonic() + self._timeout_s
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
        finally:
            with suppress(ProcessLookupError, PermissionError):  # nobody is left in its group: the usual case
                os.killpg(self._process.pid, signal.SIGKILL)


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
