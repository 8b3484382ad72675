"""This process and its machine, before torch is loaded: who launched it, how its threads wait, how it keeps memory,
what its processor is, as the system tells; and that it is at work, where no terminal shows it.

Imported before everything else, so it imports almost nothing.

glibc gives blocks of megabytes back to the system as soon as they are freed, and takes them again page by page, each
at the price of a fault and of zeroing it. A step on a CPU frees and takes hundreds of such blocks. Told to keep them,
it faults nearly never: one step of ``benchmarks/run.py allocator`` (512 completions, hidden 128, 2 threads) goes from
130,000 faults to under 10 and takes 0.61 of the time in fp32, 0.79 in simulated fp16, at the same peak memory.

torch's CPU build shares its work by GNU OpenMP, whose threads spin at the end of every parallel operation until the
last one arrives, by default for milliseconds. Alone on the machine that is the fastest way to wait. Where another
process has taken a core it is a disaster: the last thread cannot arrive before the spinning ones have used up their
turns, thousands of times a step. Measured by ``benchmarks/run.py waiting`` on 4 cores (seconds for one step of 512
completions, hidden 128, simulated fp16, 4 threads):

    spinning                      alone   beside two busy processes
    as libgomp has it               1.0                        26.8
    10,000 turns (this)             1.0                         7.9
    none (OMP_WAIT_POLICY=passive)  2.0                         3.0

So fewer threads than free cores is what really helps (2 threads beside the two: 1.2); this takes the worst off a
mistake that is easily made. Measured again, it costs 4-8% alone, and less gain beside others (8.7 to 7.7).
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

LAUNCHER = "MANTISSA_LAUNCHER"  # the process id of ``mantissa train``, for the ranks that it started
STORE = "MANTISSA_STORE"  # the file through which the ranks find each other

# Parameters of mallopt(3): block size from which memory is mapped on its own (and unmapped when freed), free memory at
# the heap's end beyond which it is given back, and what is asked for in advance when the heap grows.
_SETTINGS = {
    "M_MMAP_THRESHOLD": (-3, 1 << 30),
    "M_TRIM_THRESHOLD": (-1, (1 << 31) - 1),
    "M_TOP_PAD": (-2, 64 << 20),
}

_MALLOC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
_SPINS = "10000"
_LOAD = os.getloadavg()[0]  # before this process adds its own: of an hour's training the present one would be its own
# The instructions that torch, oneDNN and MKL choose by: another set of them sums and rounds otherwise.
_FLAGS = ("avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vbmi", "avx512_vnni", "avx512_bf16",
          "avx512_fp16", "amx_bf16", "amx_int8", "amx_fp16", "asimd", "sve", "bf16", "i8mm")  # fmt: skip


def end_with_launcher() -> None:
    """On Linux: a rank whose launcher is killed is killed too, or it would go on writing a run that nobody watches.

    The launcher may have gone before this was asked for: then this process has another parent, and ends here.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
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


class Heartbeat:
    """Says what is at work where nothing is redrawn: first after ``first`` seconds of silence, then after ``every``.

    It speaks from a thread of its own, for what takes long does not come back to say so. ``say`` takes a line.
    """

    def __init__(self, say: Callable[[str], None], first: float = 3.0, every: float = 20.0) -> None:
        self._say, self._every = say, every
        self._line, self._due = "", time.monotonic() + first
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def at(self, line: str) -> None:
        """What is at work from now on; an empty line: nothing is, and when this returns nothing more is said."""
        with self._changed:
            self._line, ended = line, None if line else self._thread
            if line and self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
            self._changed.notify()
        if ended is not None:
            ended.join()
            self._thread = None

    def heard(self) -> None:
        """Something else was said just now."""
        with self._changed:
            self._due = time.monotonic() + self._every

    def _watch(self) -> None:
        with self._changed:
            while self._line:
                if (left := self._due - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    self._due = time.monotonic() + self._every
                    self._say(self._line)


def keep_freed_memory() -> bool:
    """Have glibc keep freed memory for this process; True where it agreed.

    Does nothing, and returns False, where the C library is another, or where the user has set malloc's own variables
    (``MALLOC_*_`` or ``GLIBC_TUNABLES``). Memory that is kept is still given back when the process ends.
    """
    said = any(name in os.environ for name in _MALLOC) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if said or not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    agreed = [libc.mallopt(parameter, value) for parameter, value in _SETTINGS.values()]
    return agreed == [1] * len(_SETTINGS)


@contextmanager
def settled() -> Iterator[None]:
    """Within this, Python's collector passes over what was there before: a run's modules, configuration and imports,
    which live as long as it does. Looking through them again and again took 3% of a small model's step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def spin_briefly() -> bool:
    """Have OpenMP's threads sleep after some microseconds; True where this set it.

    A user's own ``OMP_WAIT_POLICY`` or ``GOMP_SPINCOUNT`` stands. The library reads the variable as it is loaded, so
    after torch it would do nothing.
    """
    if "torch" in sys.modules or "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return False
    os.environ["GOMP_SPINCOUNT"] = _SPINS
    return True


def unsteady() -> str | None:
    """A warning where the machine's load decides on the number of threads; None where it does not."""
    if os.environ.get("OMP_DYNAMIC", "").lower() != "true":
        return None
    return (
        "warning: OMP_DYNAMIC=true lets the machine's load choose the number of threads at each operation, and with it "
        "the order of sums: a resumed run will not have the same bits; leave it out"
    )


def crowded(threads: int, processes: int = 1) -> str | None:
    """A warning where ``processes`` of ``threads`` each and the machine's load, as this process found it, are more than
    its cores; None where they fit, and where there is no thread to spare."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = _LOAD
    total = threads * processes
    if threads == 1 or total + load < cores + 1:
        return None
    fitting = max(1, min(threads - 1, (cores - round(load)) // processes))
    return (
        f"warning: {total} threads on {cores} cores that already carry a load of {load:.1f}: each step may take many "
        f"times as long; OMP_NUM_THREADS={fitting} in front of the command helps"
    )


def processor(info: Iterable[str]) -> tuple[str, str]:
    """Of the lines of ``/proc/cpuinfo``, the first processor's: its name with family, model and stepping (one name is
    given to several generations), or the architecture where the system does not tell; and which of the instructions
    that numbers and times depend on it has, whatever a variable holds back."""
    pairs = (line.partition(":") for line in itertools.takewhile(str.strip, info))
    found = {name.strip(): value.strip() for name, _, value in pairs}
    name = found.get("model name") or platform.machine()
    numbers = [f"{what} {found[key]}" for key, what in
               (("cpu family", "family"), ("model", "model"), ("stepping", "stepping")) if key in found]  # fmt: skip
    there = (found.get("flags") or found.get("Features") or "").split()
    flags = " ".join(flag for flag in _FLAGS if flag in there)
    return f"{name} ({', '.join(numbers)})" if numbers else name, flags


try:
    with open("/proc/cpuinfo") as _info:
        CPU_MODEL, CPU_FLAGS = processor(_info)
except OSError:  # of Linux alone
    CPU_MODEL, CPU_FLAGS = processor(())
