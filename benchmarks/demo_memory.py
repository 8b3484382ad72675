"""What the demo needs: peak resident memory of a short run of its recipe, and what importing Mantissa takes.

The run is the demo's own command with fewer steps, and with a reward for part of an answer: a policy that has learned
too little for the demo's own reward would have no update. Memory is that of the process (``ru_maxrss``): a run that
has come to an evaluation and an update has come to its peak. Import times are the medians of fresh interpreters that
have imported torch already. Targets: under 2 GB, under 0.3 s.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml
from rows import ROOT
from runner import Row, Rows, case
from steps import spread

RECIPE = ROOT / "recipes" / "demo.yaml"


def peak_bytes(threads: int) -> int:
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        overrides = ["steps=3", "warm_start.steps=40", "task.reward=prefix", f"run_dir={folder}/run"]
        overrides.append("rollout.engine=native")  # as in the rows that there are: the recipe's own is emulated
        subprocess.run(
            [sys.executable, "-P", "-m", "mantissa", "train", str(RECIPE), *overrides],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)}, cwd=ROOT, stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def import_seconds(module: str, repeats: int = 7) -> list[float]:
    code = f"import time, torch; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    command = [sys.executable, "-P", "-c", code]
    return [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(repeats)]


@case(modules=("mantissa",))
def demo_memory(threads: int = 2, modules: Sequence[str] = ("mantissa", "mantissa.cli", "mantissa.rl")) -> Rows:
    os.environ["PYTHONPATH"] = str(Path(ROOT, "src")) + os.pathsep + os.environ.get("PYTHONPATH", "")
    precision = yaml.safe_load(RECIPE.read_text())["precision"]
    # The run itself refuses to start where its precision does not engage.
    about: Row = {"benchmark": "demo", "contender": "recipes/demo.yaml", "requested": precision, "active": precision}
    yield about | {"metric": "peak_memory", "unit": "bytes", "value": peak_bytes(threads)}
    for module in modules:
        about = {"benchmark": "import", "contender": module, "metric": "seconds_beyond_torch", "unit": "s"}
        yield about | spread(import_seconds(module))
