"""Run the numeric tests as on other processors, and print what became of each: ``python tests/machines.py [NAME ...]``.

What a library adds first differs with the processor, its widest instructions and the number of threads. No test may
presume it: one that needs two sides to differ makes the difference, one that needs them equal has a sum of our own.
Each row below holds the libraries to what another machine would choose. ``steady`` and ``by-rows`` put a product of our
own in the place of torch's, in the test's own process: one whose rows never depend on the batch, and one whose rows
always do. ``own-bf16`` is a processor that multiplies bf16 itself: others simulate it. A library ignores instructions
that this processor lacks: such a row is then the machine as it is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOMS = ("kernels", "precision", "rollout", "rl", "mismatch", "doctor", "bench")
MACHINES: dict[str, dict[str, str]] = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "oldest": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "aten-default": {"ATEN_CPU_CAPABILITY": "default"},
    "aten-avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "onednn-avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "onednn-avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "onednn-bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "mkl-avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "mkl-compatible": {"MKL_CBWR": "COMPATIBLE"},
    "two-threads": {"OMP_NUM_THREADS": "2"},
    "steady": {"MANTISSA_TEST_PRODUCTS": "steady"},
    "by-rows": {"MANTISSA_TEST_PRODUCTS": "by-rows"},
    "own-bf16": {"MANTISSA_TEST_BF16": "own"},
}


def run(name: str) -> tuple[bool, str]:
    """Return whether all passed, and one line; what failed is printed whole."""
    settings = MACHINES[name]
    tests = Path(__file__).parent
    processes = "1" if "OMP_NUM_THREADS" in settings else "2"  # two of one thread, or one of two
    command = [sys.executable, "-m", "pytest", f"--numprocesses={processes}", *(str(tests / room) for room in ROOMS)]
    began = time.perf_counter()
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"} | settings, cwd=tests.parent, capture_output=True, text=True
    )
    if done.returncode:
        print(done.stdout, done.stderr, flush=True)
    counts = re.search(r"\d+ (?:failed|passed|error).*", done.stdout.strip().splitlines()[-1] if done.stdout else "")
    said = counts.group() if counts else f"no test ran (exit {done.returncode})"
    held = " ".join(f"{key}={value}" for key, value in settings.items())
    return done.returncode == 0, f"{name:15} {said}, {time.perf_counter() - began:.0f} s  ({held})"


def main(names: list[str]) -> int:
    if unknown := sorted(set(names) - set(MACHINES)):
        print(f"no such machine: {', '.join(unknown)}; expected {', '.join(MACHINES)}", file=sys.stderr)
        return 2
    lines = []
    for name in names or MACHINES:
        lines.append(run(name))
        print(lines[-1][1], flush=True)
    return 0 if all(passed for passed, _ in lines) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
