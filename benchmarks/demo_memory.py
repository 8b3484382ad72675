"""What the demo needs: peak resident memory of a short run of its recipe, and what importing Mantissa takes.

    python benchmarks/demo_memory.py [--threads 2]

The run is the demo's own command with fewer steps, and with a reward for part of an answer: a policy that has learned
too little for the demo's own reward would have no update. Memory is that of the process (``ru_maxrss``): a run that
has come to an evaluation and an update has come to its peak. Import times are the medians of fresh interpreters that
have imported torch already. Targets: under 2 GB, under 0.3 s. Rows: results/demo_memory.jsonl.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from rows import ROOT, append
from steps import spread

RECIPE = ROOT / "recipes" / "demo.yaml"
IMPORTS = ("mantissa", "mantissa.cli", "mantissa.rl")


def peak_bytes(threads: int) -> int:
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        overrides = ["steps=3", "warm_start.steps=40", "task.reward=prefix", f"run_dir={folder}/run"]
        overrides.append("rollout.engine=native")  # as in the rows that there are: the recipe's own is emulated
        subprocess.run(
            [sys.executable, "-P", "-m", "mantissa", "train", str(RECIPE), *overrides],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            check=True,
        )
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def import_seconds(module: str, repeats: int = 7) -> list[float]:
    code = f"import time, torch; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    command = [sys.executable, "-P", "-c", code]
    return [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="print, and append no rows")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    os.environ["PYTHONPATH"] = str(Path(ROOT, "src")) + os.pathsep + os.environ.get("PYTHONPATH", "")
    precision = yaml.safe_load(RECIPE.read_text())["precision"]
    rows: list[dict[str, Any]] = [
        # The run itself refuses to start where its precision does not engage.
        {"benchmark": "demo", "contender": "recipes/demo.yaml", "requested": precision, "active": precision}
        | {"metric": "peak_memory", "unit": "bytes", "value": peak_bytes(arguments.threads)}
    ]
    for module in IMPORTS:
        rows.append(
            {"benchmark": "import", "contender": module, "metric": "seconds_beyond_torch", "unit": "s"}
            | spread(import_seconds(module))
        )
    for row in rows:
        print(f"{row['contender']:<20} {row['metric']:<22} {row['value']:.5g} {row['unit']}")
    if not arguments.dry:
        print(append("demo_memory.jsonl", rows, "cpu"))


if __name__ == "__main__":
    main()
