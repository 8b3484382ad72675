"""The other side of ``Grader``: a process that receives a verifier once and then grades one sample after another.

It ends by itself when its parent is gone. Waiting for work, it reads end-of-file from the pipe and returns. Inside a
verifier that hangs it could not look, so each sample runs under a kernel timer (SIGALRM, default action) that ends the
process even in C code which never returns to Python. The timer is a backstop: the parent's own limit comes first.
"""

from __future__ import annotations

import pickle
import resource
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from mantissa.errors import MantissaError
from mantissa.tasks.types import Problem, Reward, Verifier, describe

BACKSTOP_S = 1.0  # how much longer than the parent the kernel timer waits
_warned = False


def main(descriptor: int, timeout_s: float, memory_bytes: int) -> None:
    """Serve the pipe at file ``descriptor`` until it closes.

    Replies: first ("ready", chunk, notes), ("refused", text) or ("failed", text), then lists of Reward or str.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent closes us
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _limit_memory(memory_bytes)
    pipe = Connection(descriptor)
    try:
        verifier = _load(pipe)
        while verifier is not None:
            samples = pickle.loads(pipe.recv_bytes())
            signal.setitimer(signal.ITIMER_REAL, timeout_s + BACKSTOP_S)
            reply = grade_samples(verifier, samples)
            signal.setitimer(signal.ITIMER_REAL, 0)
            pipe.send_bytes(pickle.dumps(reply))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent closed the pipe or died
    finally:
        pipe.close()


def _limit_memory(limit: int) -> None:
    """Bound the address space: a verifier that builds 9^9^9^9 gets MemoryError, not the machine's memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if hard == resource.RLIM_INFINITY else min(hard, limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _load(pipe: Connection) -> Verifier | None:
    """Receive and prepare the verifier; where that fails the parent is told why, since no sample is to blame."""
    payload = pipe.recv_bytes()
    try:
        verifier: Verifier = pickle.loads(payload)
        verifier.prepare()
        ready = ("ready", verifier.chunk, verifier.notes())
    except MantissaError as error:
        pipe.send_bytes(pickle.dumps(("refused", str(error))))
        return None
    except Exception as error:  # noqa: BLE001 - a verifier's own code may raise anything; the parent reports it
        pipe.send_bytes(pickle.dumps(("failed", describe(error))))
        return None
    pipe.send_bytes(pickle.dumps(ready))
    return verifier


def grade_samples(verifier: Verifier, samples: Sequence[tuple[Problem, str]]) -> list[Reward | str]:
    """The reward of each sample, or what went wrong with it.

    Several are graded in one call. Where that call fails they are graded one by one, so that the failure costs the
    sample that caused it and no other.
    """
    if len(samples) > 1:
        try:
            rewards = verifier.grade(samples)
            if len(rewards) != len(samples):
                raise ValueError(f"{len(rewards)} rewards for {len(samples)} samples")
            return [verifier.checked(reward) for reward in rewards]
        except BaseException as error:  # noqa: BLE001 - foreign code: even SystemExit costs one sample only
            _warn_once(f"grading {len(samples)} samples at once failed ({describe(error)}); doing them one by one")
    return [_grade(verifier, problem, completion) for problem, completion in samples]


def _grade(verifier: Verifier, problem: Problem, completion: str) -> Reward | str:
    try:
        return verifier.checked(verifier(problem, completion))
    except BaseException as error:  # noqa: BLE001 - foreign code: even SystemExit costs this sample only
        return describe(error)


def _warn_once(text: str) -> None:
    global _warned
    if not _warned:
        print(f"warning: {text}", file=sys.stderr, flush=True)
    _warned = True
