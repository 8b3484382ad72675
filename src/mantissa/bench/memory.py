"""Peak memory of training, measured so that one row's does not stand in another's.

On a GPU: the most that torch's allocator had handed out while the model was made and trained, less what was handed out
before. On a CPU the system counts only a process's resident memory, whose high-water mark never falls: so each
measurement is a fresh process (forked from one that has imported torch and done nothing else), and the number is its
high-water mark less its resident memory before the model was made. It holds weights, gradients, the optimiser's
moments, activations and what the kernels keep for themselves. Where the system keeps no such mark (it is
Linux's ``VmHWM``) the number is None.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from mantissa.bench.runner import Request, Runner
from mantissa.bench.workload import Source
from mantissa.environ import changed_environment
from mantissa.errors import MantissaError

_STEPS = 3  # the optimiser's moments are made in the first
_PRELOADED = ["torch", "torch._dynamo"]  # torch imports the latter at an optimiser's first step


def training_peak(request: Request, batch_size: int) -> int | None:
    """Bytes that making the model and three steps of training need at most, on top of what was there."""
    if torch.device(request.device).type == "cuda":
        return _cuda_peak(request, batch_size)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    safe = changed_environment({"PYTHONSAFEPATH": "1"})  # or it would import what lies in the current folder
    with safe, ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        try:
            return pool.submit(_resident_growth, request, batch_size, torch.get_num_threads()).result()
        except BrokenProcessPool:
            raise MantissaError(
                f"{request}: the process that measured its memory ended without an answer, most likely because memory "
                "ran out; choose smaller sizes or a smaller batch"
            ) from None


def _train(request: Request, batch_size: int) -> None:
    runner = Runner(request, seed=0)
    batch = runner.batches(1, batch_size, seed=0)[0]
    for _ in range(_STEPS):
        runner.step(batch)


def _cuda_peak(request: Request, batch_size: int) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(request.device)
    before = torch.cuda.memory_allocated(request.device)
    _train(request, batch_size)
    return torch.cuda.max_memory_allocated(request.device) - before


def _resident_growth(request: Request, batch_size: int, threads: int) -> int | None:
    torch.set_num_threads(threads)
    small = Request(Source(parameters=1000), request.precision, request.device, request.backend)
    _train(small, batch_size=8)  # what is loaded on first use (kernels, threads) is not this model's
    _give_back_freed()
    before = _status_bytes("VmRSS")
    _train(request, batch_size)
    peak = _status_bytes("VmHWM")
    return None if before is None or peak is None else peak - before


def _give_back_freed() -> None:
    """Return freed pages to the system, or the model would be made in pages already counted (glibc; others do not)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_bytes(key: str) -> int | None:
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None
