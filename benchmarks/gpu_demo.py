"""The demo's recipe on a device, in fp16 and bf16, cut short: time, speed, gap and accuracy. Used by gpu.sh.

    python benchmarks/gpu_demo.py --device cuda [--steps 20] [--warm-start 200]

Each run is the command itself; its rows come from the run's own metrics. A run whose precision does not engage refuses
to start. Appends to results/gpu_demo.jsonl, or $OUT/gpu_demo.jsonl where OUT is set.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rows import ROOT, append
from steps import spread

from mantissa.runs.directory import RunDirectory

METRICS = {
    "time/step": "s",
    "time/update": "s",
    "rate/rollout_tokens_per_s": "tokens/s",
    "rate/learner_tokens_per_s": "tokens/s",
    "gap/abs_logp_diff_mean": "nats",
    "gap/k3_kl": "nats",
}


def run(precision: str, device: str, steps: int, warm_start: int, folder: Path) -> list[dict[str, Any]]:
    overrides = [f"device={device}", f"precision={precision}", f"steps={steps}", f"warm_start.steps={warm_start}"]
    overrides.append("rollout.engine=native")  # the recipe's own, emulated, rounds in fp32 on any device
    command = [sys.executable, "-P", "-m", "mantissa", "train", str(ROOT / "recipes" / "demo.yaml"), *overrides]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run([*command, f"run_dir={folder}"], env=environment, cwd=ROOT, check=True)
    finished = RunDirectory.open(folder)
    metrics = finished.read_metrics()
    learner = next(role for role in finished.environment["precision"] if role["role"] == "learner")
    about = {
        "benchmark": "gpu_demo",
        "requested": precision,
        "active": learner["active"],
        "kernels": learner["kernels"],
        "training_device": device,
        "steps": steps,
    }
    after_first = metrics[1:] or metrics  # the first step pays for what is done once
    rows = [
        about | {"metric": name, "unit": unit, **spread([row[name] for row in after_first])}
        for name, unit in METRICS.items()
    ]
    last = statistics.mean(row["reward/accuracy"] for row in metrics[-5:])
    return [*rows, about | {"metric": "accuracy_of_last_5_steps", "unit": "share", "value": last}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-start", type=int, default=200)
    parser.add_argument("--dry", action="store_true", help="print, and append no rows")
    arguments = parser.parse_args()
    if arguments.steps < 3:
        raise SystemExit("gpu_demo.py: expected --steps of 3 or more, for quartiles of the steps after the first")
    for precision in ("fp16", "bf16"):
        with tempfile.TemporaryDirectory(prefix="demo-") as folder:
            rows = run(precision, arguments.device, arguments.steps, arguments.warm_start, Path(folder) / "run")
        for row in rows:
            print(f"{precision} {row['metric']:<28} {row['value']:10.4g} {row['unit']}")
        if not arguments.dry:
            append("gpu_demo.jsonl", rows, arguments.device)


if __name__ == "__main__":
    main()
