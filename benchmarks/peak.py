"""The machine's fp32 matmul peak and memory bandwidth at 1, 2 and 4 threads: the yardsticks for every other figure.

    python benchmarks/peak.py [--threads 1 2 4]

The best of 30 products of 1024 x 1024 matrices, and of the shape that the RL step spends most on (12800 positions, 128
to 384 features), by each library that torch has for it: its own choice (``mm``) and oneDNN, which the fast kernels use
(``mantissa/kernels/cpu.py``). Bandwidth: the best of 10 sums over 256 MB. Rows: results/peak.jsonl.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
from rows import append

from mantissa.kernels.cpu import product

SHAPES = {"square": (1024, 1024, 1024), "step": (12800, 128, 384)}


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
    work = {"mm": lambda: torch.mm(x, weight.t(), out=out), "onednn": lambda: product(x, weight)}[library]
    return 2 * rows * inner * columns / best_seconds(work, 30) / 1e9


def bandwidth() -> float:
    """Bytes read a second, in GB/s."""
    values = torch.ones(64 << 20)
    return values.numel() * 4 / best_seconds(values.sum, 10) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--dry", action="store_true", help="print, and append no rows")
    arguments = parser.parse_args()
    about = {"benchmark": "peak", "requested": "fp32", "active": "fp32", "kernels": "native"}
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        rows = [
            about
            | {"contender": name + suffix, "metric": "matmul_peak", "unit": "GFLOP/s"}
            | {"value": best_gflops(library, *shape)}
            for library, suffix in (("mm", ""), ("onednn", " onednn"))
            for name, shape in SHAPES.items()
        ]
        rows.append(about | {"contender": "memory", "metric": "read_bandwidth", "unit": "GB/s", "value": bandwidth()})
        for row in rows:
            print(f"{threads} threads of {os.cpu_count()}: {row['contender']:<14} {row['value']:7.1f} {row['unit']}")
        if not arguments.dry:
            append("peak.jsonl", rows, "cpu")


if __name__ == "__main__":
    main()
