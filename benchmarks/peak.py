"""The machine's fp32 matmul peak at 1, 2 and 4 threads: the yardstick for every other figure.

    python benchmarks/peak.py [--threads 1 2 4]

The best of 30 products of 1024 x 1024 matrices, and of the shape that the RL step spends most on (12800 positions, 128
to 384 features). Rows: results/peak.jsonl.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from rows import append

SHAPES = {"square": (1024, 1024, 1024), "step": (12800, 128, 384)}


def best_gflops(rows: int, inner: int, columns: int, repeats: int = 30) -> float:
    x, weight = torch.randn(rows, inner), torch.randn(columns, inner)
    out = torch.empty(rows, columns)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(x, weight.t(), out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * rows * inner * columns / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--dry", action="store_true", help="print, and append no rows")
    arguments = parser.parse_args()
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        rows = [
            {"benchmark": "peak", "contender": name, "requested": "fp32", "active": "fp32", "kernels": "native"}
            | {"metric": "matmul_peak", "unit": "GFLOP/s", "value": best_gflops(*shape)}
            for name, shape in SHAPES.items()
        ]
        for row in rows:
            print(f"{threads} threads of {os.cpu_count()}: {row['contender']:<7} {row['value']:7.1f} GFLOP/s")
        if not arguments.dry:
            append("peak.jsonl", rows, "cpu")


if __name__ == "__main__":
    main()
