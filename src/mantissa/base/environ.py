"""What processes tell each other by the environment: a rank's launcher, and variables that are others for a while.

Imported before everything else, so it imports almost nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

LAUNCHER = "MANTISSA_LAUNCHER"  # the process id of ``mantissa train``, for the ranks that it started
STORE = "MANTISSA_STORE"  # the file through which the ranks find each other


def end_with_launcher() -> None:
    """On Linux: a rank whose launcher is killed is killed too, or it would go on writing a run that nobody watches.

    The launcher may have gone before this was asked for: then this process has another parent, and ends here.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != int(launcher):
        os._exit(1)


def threads_each(nproc: int, said: str | None = None) -> int:
    """Threads of each of ``nproc`` processes: as many as OMP_NUM_THREADS says, else an equal share of the cores.

    ``said``: in the place of that variable, which Ray sets in its workers whatever the user said.
    """
    said = os.environ.get("OMP_NUM_THREADS", "") if said is None else said
    if said.isdigit() and int(said) > 0:
        return int(said)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // nproc)


@contextmanager
def changed_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Environment variables for processes that begin within; put back afterwards. None: the variable is not there."""
    before = {name: os.environ.get(name) for name in values}
    _put(values)
    try:
        yield
    finally:
        _put(before)


def _put(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
