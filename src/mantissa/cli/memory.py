"""Keeping freed memory: what the C library's allocator is told before a run begins.

glibc gives blocks of megabytes back to the system as soon as they are freed, and takes them again page by page, each
at the price of a fault and of zeroing it. A step on a CPU frees and takes hundreds of such blocks. Told to keep them,
it faults nearly never: one step of ``benchmarks/allocator.py`` (512 completions, hidden 128, 2 threads) goes from
130,000 faults to under 10 and takes 0.61 of the time in fp32, 0.79 in simulated fp16, at the same peak memory.
"""

from __future__ import annotations

import ctypes
import os
import sys

# Parameters of mallopt(3): block size from which memory is mapped on its own (and unmapped when freed), free memory at
# the heap's end beyond which it is given back, and what is asked for in advance when the heap grows.
_SETTINGS = {
    "M_MMAP_THRESHOLD": (-3, 1 << 30),
    "M_TRIM_THRESHOLD": (-1, (1 << 31) - 1),
    "M_TOP_PAD": (-2, 64 << 20),
}


def keep_freed_memory() -> bool:
    """Have glibc keep freed memory for this process; True where it agreed.

    Does nothing, and returns False, where the C library is another, or where the user has set malloc's own variables
    (``MALLOC_*_`` or ``GLIBC_TUNABLES``). Memory that is kept is still given back when the process ends.
    """
    if not sys.platform.startswith("linux") or _user_decided():
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    agreed = [libc.mallopt(parameter, value) for parameter, value in _SETTINGS.values()]
    return agreed == [1] * len(_SETTINGS)


def _user_decided() -> bool:
    names = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
    return any(name in os.environ for name in names) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
