"""Grading with a guard: a verifier that raises, hangs or kills its process costs one sample its reward, never the run.

Verifiers that can hang run in worker processes that start on first use and serve until ``close``; a worker that dies or
exceeds the time limit is replaced, and the sample it held gets the verifier's ``failure`` with ``Reward.error`` set. A
verifier that grades several samples in a call gets them in batches, cut at the same places whatever the workers' speed;
the samples of a batch that is lost are graded again one by one, so that only the one to blame pays. Rewards come back
in the order asked for and do not depend on which worker gave them.

A worker is a fresh interpreter (not a fork: forking a process that has CUDA or threads is unsafe) which imports this
package and the verifier's module, not the caller's ``__main__``: so a script needs no main guard, and a worker costs a
fraction of a second, torch not included. It follows that a verifier class must live in an importable module.

It ends by itself when its parent is gone. Waiting for work, it reads end-of-file from the pipe and returns. Inside a
verifier that hangs it could not look, so each call runs under a kernel timer (SIGALRM, default action) that ends the
process even in C code which never returns to Python. The timer is a backstop: the parent's own limit comes first.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from mantissa.base.errors import MantissaError, on_failure, say
from mantissa.base.readers.child import cause_of_death
from mantissa.tasks.types import Problem, Reward, Verifier, describe

STARTUP_LIMIT_S = 120.0  # imports on a loaded machine; not the sample's time
BACKSTOP_S = 1.0  # how much longer than the parent the worker's own timer waits
_BOOT = (
    "import sys; sys.path[:] = sys.argv[4:]; from mantissa.tasks.sandbox.pool import serve; "
    "serve(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))"
)
_warned = False


class WorkerStartError(RuntimeError):
    """A worker process could not load the verifier: a mistake in the set-up, which no sample is to blame for."""


class Pool:
    """The worker processes of one isolated verifier; ``tasks.Grader`` has one, and says what its settings are.

    Workers end with ``close``, with the Pool, at exit, and by themselves where this process is killed.
    """

    def __init__(self, verifier: Verifier, timeout_s: float, workers: int, memory_gib: float) -> None:
        self.notes: tuple[str, ...] = ()
        self._chunk = 1
        self._memory_bytes = int(memory_gib * 2**30)
        self._verifier = verifier
        self._timeout_s = timeout_s
        self._limit = workers
        self._workers: list[_Worker] = []
        self._closer = weakref.finalize(self, _close_all, self._workers, os.getpid())  # also runs at exit

    def close(self) -> None:
        """End the worker processes. Safe to call twice."""
        self._closer()

    def grade(self, samples: Sequence[tuple[Problem, str]]) -> list[Reward]:
        """One reward for each sample, in order; of none, a worker is started all the same."""
        if not self._closer.alive:
            raise RuntimeError("this Grader is closed")
        # Interrupted half-way, workers hold answers to questions nobody asks any more: start afresh next time.
        with on_failure(lambda: _close_all(self._workers, os.getpid())):
            return self._grade_isolated(samples)

    def _grade_isolated(self, samples: Sequence[tuple[Problem, str]]) -> list[Reward]:
        results: list[Reward | None] = [None] * len(samples)
        batches: deque[tuple[int, ...]] = deque()  # of indices that wait; those to be tried alone come last
        self._replace_dead(max(1, min(self._limit, -(-len(samples) // self._chunk))))
        while not any(worker.ready for worker in self._workers):  # the first one says how many make a batch
            self._answers(results, batches)
        indices = tuple(range(len(samples)))
        batches.extend(indices[at : at + self._chunk] for at in range(0, len(indices), self._chunk))
        while batches or any(worker.indices for worker in self._workers):
            self._replace_dead(min(self._limit, len(batches)))
            for worker in self._workers:
                if batches and worker.ready and not worker.indices:
                    batch = batches.popleft()
                    if not worker.submit(batch, [samples[i] for i in batch]):
                        batches.appendleft(batch)
            self._answers(results, batches)
        assert all(results), "every sample leaves the queue for a worker, and every worker answers, dies or expires"
        return [reward for reward in results if reward is not None]

    def _replace_dead(self, count: int) -> None:
        self._workers[:] = [w for w in self._workers if not w.pipe.closed]
        while len(self._workers) < count:
            self._workers.append(_Worker(self._verifier, self._timeout_s, self._memory_bytes))

    def _answers(self, results: list[Reward | None], batches: deque[tuple[int, ...]]) -> None:
        """Wait until a worker has something to say, or its time is up; take what came."""
        pending = [w for w in self._workers if not w.pipe.closed and (not w.ready or w.indices)]
        nearest_s = min((w.deadline for w in pending), default=time.monotonic()) - time.monotonic()
        answered = wait([w.pipe for w in pending], timeout=max(0.0, nearest_s))
        for worker in pending:
            if worker.pipe in answered:
                lost = self._collect(worker, results)
            elif time.monotonic() >= worker.deadline:
                lost = self._expire(worker)
            else:
                continue
            if lost and len(worker.indices) == 1:  # a sample that it held alone is to blame
                results[worker.indices[0]] = self._verifier.failed(lost)
            elif lost:  # of several, each is tried by itself
                batches.extend((index,) for index in worker.indices)
            worker.indices = ()

    def _collect(self, worker: _Worker, results: list[Reward | None]) -> str | None:
        """Read what a worker sent: that it is ready, or rewards; where the file ended, how it died."""
        try:
            # Sound, though a pickle is a program: only the worker holds the other end, and it runs our verifiers and
            # the user's reward functions, which might as well be run here. The programs that a policy writes run in
            # a jail of their own (jail.py), whose one way out is JSON; they hold no end of this pipe.
            message = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            cause = cause_of_death(worker.end(patience_s=5.0))  # it is dying: let it, its own exit code tells why
            if worker.indices:
                return f"the verifier's process died ({cause})"
            raise WorkerStartError(f"a grading worker died at start ({cause})") from None
        if worker.ready:
            for index, reply in zip(worker.indices, message, strict=True):
                results[index] = reply if isinstance(reply, Reward) else self._verifier.failed(reply)
            return None
        kind, *rest = message
        if kind != "ready":
            worker.end(patience_s=1.0)
            if kind == "refused":
                raise MantissaError(rest[0])
            raise WorkerStartError(f"a grading worker could not load {self._verifier!r}: {rest[0]}")
        worker.ready = True
        self._chunk, self.notes = rest
        return None

    def _expire(self, worker: _Worker) -> str:
        worker.end(patience_s=0.0)
        if worker.indices:
            return f"the verifier took longer than {self._timeout_s:g} s"
        raise WorkerStartError(f"a grading worker did not start within {STARTUP_LIMIT_S:g} s")


class _Worker:
    """One process, its pipe, and the indices of the samples it holds. ``deadline``: of the start, then of the call."""

    def __init__(self, verifier: Verifier, timeout_s: float, memory_bytes: int):
        self._timeout_s = timeout_s
        self.ready = False
        self.indices: tuple[int, ...] = ()
        self.deadline = time.monotonic() + STARTUP_LIMIT_S
        self.pipe, theirs = multiprocessing.Pipe(duplex=True)
        with theirs:  # and then it is theirs alone, so that we read end-of-file when the worker dies
            arguments = [str(theirs.fileno()), repr(timeout_s), str(memory_bytes), *map(str, sys.path)]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, *arguments],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a group of its own: what a reward function starts is killed with it
            )
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


# in the worker's process


def serve(descriptor: int, timeout_s: float, memory_bytes: int) -> None:
    """Receive a verifier from the pipe at file ``descriptor``, then grade batches of samples until it closes.

    Replies: first ("ready", chunk, notes), ("refused", text) or ("failed", text), then lists of Reward or str.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent closes us
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)  # one that builds 9^9^9^9 gets MemoryError, not the machine's
    limit = memory_bytes if hard == resource.RLIM_INFINITY else min(hard, memory_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    pipe = Connection(descriptor)
    with pipe, suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent closed the pipe or died
        verifier = _load(pipe)
        while verifier is not None:
            samples = pickle.loads(pipe.recv_bytes())
            signal.setitimer(signal.ITIMER_REAL, timeout_s + BACKSTOP_S)
            reply = grade_samples(verifier, samples)
            signal.setitimer(signal.ITIMER_REAL, 0)
            pipe.send_bytes(pickle.dumps(reply))


def _load(pipe: Connection) -> Verifier | None:
    """Receive and prepare the verifier; where that fails the parent is told why, since no sample is to blame."""
    payload = pipe.recv_bytes()
    verifier: Verifier | None = None
    try:
        loaded: Verifier = pickle.loads(payload)
        loaded.prepare()
        said: tuple[object, ...] = ("ready", loaded.chunk, loaded.notes())
        verifier = loaded
    except MantissaError as error:
        said = ("refused", str(error))
    except Exception as error:  # noqa: BLE001 - a verifier's own code may raise anything; the parent reports it
        said = ("failed", describe(error))
    pipe.send_bytes(pickle.dumps(said))
    return verifier


def grade_samples(verifier: Verifier, samples: Sequence[tuple[Problem, str]]) -> list[Reward | str]:
    """The reward of each sample, or what went wrong with it.

    Several are graded in one call. Where that call fails they are graded one by one, so that the failure costs the
    sample that caused it and no other.
    """
    global _warned
    if len(samples) > 1:
        try:
            rewards = verifier.grade(samples)
            if len(rewards) != len(samples):
                raise ValueError(f"{len(rewards)} rewards for {len(samples)} samples")
            return [verifier.checked(reward) for reward in rewards]
        except BaseException as error:  # noqa: BLE001 - foreign code: even SystemExit costs one sample only
            if not _warned:
                what = f"grading {len(samples)} samples at once failed ({describe(error)}); doing them one by one"
                say(f"warning: {what}", err=True)
            _warned = True
    return [verifier.tried(problem, completion) for problem, completion in samples]
