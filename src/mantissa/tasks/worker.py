"""The other side of ``Grader``: a process that receives a verifier once and then grades one sample after another.

It ends by itself when its parent is gone. Waiting for work, it reads end-of-file from the pipe and returns. Inside a
verifier that hangs it could not look, so each sample runs under a kernel timer (SIGALRM, default action) that ends the
process even in C code which never returns to Python. The timer is a backstop: the parent's own limit comes first.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
from multiprocessing.connection import Connection

from mantissa.tasks.types import Reward, Verifier

BACKSTOP_S = 1.0  # how much longer than the parent the kernel timer waits
MEMORY_LIMIT_BYTES = (
    4 * 2**30
)  # address space: a verifier that builds 9^9^9^9 gets MemoryError, not the machine's memory


def main(descriptor: int, timeout_s: float) -> None:
    """Serve the pipe at file ``descriptor`` until it closes. Replies: ("ready"|"failed", text), then (Reward|str)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent closes us
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _limit_memory()
    pipe = Connection(descriptor)
    try:
        verifier = _load(pipe)
        while verifier is not None:
            problem, completion = pickle.loads(pipe.recv_bytes())
            signal.setitimer(signal.ITIMER_REAL, timeout_s + BACKSTOP_S)
            reply = _grade(verifier, problem, completion)
            signal.setitimer(signal.ITIMER_REAL, 0)
            pipe.send_bytes(pickle.dumps(reply))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent closed the pipe or died
    finally:
        pipe.close()


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_LIMIT_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _load(pipe: Connection) -> Verifier | None:
    """Receive and prepare the verifier; where that fails the parent is told why, since no sample is to blame."""
    payload = pipe.recv_bytes()
    try:
        verifier: Verifier = pickle.loads(payload)
        verifier.prepare()
    except Exception as error:  # noqa: BLE001 - a verifier's own code may raise anything; the parent reports it
        pipe.send_bytes(pickle.dumps(("failed", describe(error))))
        return None
    pipe.send_bytes(pickle.dumps(("ready", str(os.getpid()))))
    return verifier


def _grade(verifier: Verifier, problem: object, completion: str) -> Reward | str:
    try:
        return checked(verifier, verifier(problem, completion))  # type: ignore[arg-type]
    except BaseException as error:  # noqa: BLE001 - foreign code: even SystemExit costs this sample only
        return describe(error)


def checked(verifier: Verifier, reward: object) -> Reward:
    """``reward``, if it is one and lies within the verifier's bounds (which NaN does not); else ``ValueError``."""
    if not isinstance(reward, Reward):
        raise ValueError(f"the verifier returned {type(reward).__name__}, not a Reward")
    if not verifier.low <= reward.value <= verifier.high:
        raise ValueError(f"reward {reward.value} lies outside [{verifier.low}, {verifier.high}]")
    return reward


def describe(error: BaseException) -> str:
    """One line about an exception: its type and the beginning of its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
