"""The machine's fp32 matmul peak and memory bandwidth at 1, 2 and 4 threads: the yardsticks for every other figure.

The best of 30 products of 1024 x 1024 matrices, and of the shape that the RL step spends most on (12800 positions, 128
to 384 features), by each library that torch has for it: its own choice (``mm``) and oneDNN, which the fast kernels use
(``mantissa/kernels/cpu.py``). Bandwidth: the best of 10 sums over 256 MB.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from runner import Row, Rows, case

from mantissa.kernels.cpu import onednn

SHAPES = {"square": (1024, 1024, 1024), "step": (12800, 128, 384), "tiny": (64, 64, 64)}


def best_seconds(work: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def best_gflops(library: str, rows: int, inner: int, columns: int) -> float:
    x, weight = torch.randn(rows, inner), torch.randn(columns, inner)
    out = torch.empty(rows, columns)
    work = {"mm": lambda: torch.mm(x, weight.t(), out=out), "onednn": lambda: onednn(x, weight)}[library]
    return 2 * rows * inner * columns / best_seconds(work, 30) / 1e9


def bandwidth() -> float:
    """Bytes read a second, in GB/s."""
    values = torch.ones(64 << 20)
    return values.numel() * 4 / best_seconds(values.sum, 10) / 1e9


@case(threads=(1,), shapes=("tiny",))
def peak(threads: Sequence[int] = (1, 2, 4), shapes: Sequence[str] = ("square", "step")) -> Rows:
    about: Row = {"requested": "fp32", "active": "fp32", "kernels": "native"}
    for count in threads:
        torch.set_num_threads(count)
        yield [
            about | {"contender": name + suffix, "metric": "matmul_peak", "unit": "GFLOP/s",
                     "value": best_gflops(library, *SHAPES[name])}
            for library, suffix in (("mm", ""), ("onednn", " onednn"))
            for name in shapes
        ]  # fmt: skip
        yield about | {"contender": "memory", "metric": "read_bandwidth", "unit": "GB/s", "value": bandwidth()}
