"""Rows from finished runs of a recipe: what was learned, how long it took, how large the gap was.

    mantissa train recipes/demo.yaml run_dir=/tmp/demo-bf16 precision=bf16 rollout.engine=native
    python benchmarks/demo_runs.py /tmp/demo-bf16 ...

Everything is read from the runs' own files. Device, threads and commit are those of the run, not of this script. A run
of the recipe NAME gives a row in results/NAME_runs.jsonl.
The gap is averaged over the first ten steps, where runs of different precision still have much the same policy; the
accuracy at the end over the last ten, or the last quarter of a run that is shorter than forty.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

from mantissa.runs.directory import RunDirectory, place
from mantissa.runs.metrics import PHASES

RESULTS = Path(os.environ.get("OUT") or Path(__file__).resolve().parents[1] / "results")
FIRST, LAST, GOAL = 10, 10, 0.95


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def summary(path: str) -> dict[str, Any]:
    """One row for the run in ``path``; a run whose precision did not engage, or that did not end, is refused."""
    run = RunDirectory.open(path)
    rows, config, where = run.read_metrics(), run.config, run.environment
    if len(rows) < config["steps"]:
        raise SystemExit(f"refused: {path} ended at step {len(rows)} of {config['steps']}")
    roles = {row["role"]: row for row in where["precision"]}
    for role in ("learner", "rollout"):
        if roles[role]["requested"] != roles[role]["active"]:
            raise SystemExit(f"refused: {path}: {role} asked for {roles[role]['requested']}: {roles[role]}")
    reached = next((row["step"] for row in rows if row["reward/accuracy"] >= GOAL), None)
    last = min(LAST, max(1, len(rows) // 4))
    start, end = rows[:FIRST], rows[-last:]
    seconds = {phase: [row[f"time/{phase}"] for row in rows if f"time/{phase}" in row] for phase in PHASES}
    warm = run.read_warm_start()
    return {
        "benchmark": f"{config['name']}_runs",
        "precision": "/".join(roles[role]["active"] for role in ("learner", "rollout")),
        "kernels": "/".join(roles[role]["kernels"] for role in ("learner", "rollout")),
        "seed": config["seed"],
        "steps": len(rows),
        "warm_start_updates": warm[-1]["step"] if warm else 0,
        "accuracy_first": rows[0]["reward/accuracy"],
        f"accuracy_last_{last}": mean(end, "reward/accuracy"),
        "first_step_at_0.95": reached,
        "greedy_heldout": rows[-1]["eval/greedy_accuracy"],
        "avg_heldout": rows[-1]["eval/avg_at_k"],
        "stopped_first": 1 - rows[0]["length/truncated_fraction"],
        "stopped_last": 1 - mean(end, "length/truncated_fraction"),
        "rl_seconds": sum(row["time/step"] for row in rows),
        "phase_seconds": {phase: median(found) for phase, found in seconds.items() if found},
        "overflows": sum(row["precision/overflows"] for row in rows),
        "gap_abs_logp_diff_mean": mean(start, "gap/abs_logp_diff_mean"),
        "gap_k3": mean(start, "gap/k3_kl"),
        "gap_seq_log_ratio_std": mean(start, "gap/seq_log_ratio_std"),
        "gap_equal_fraction": mean(start, "gap/equal_fraction"),
        "torch": where["versions"]["torch"],
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    } | place(where)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("expected the folders of finished runs of a recipe")
    for row in [summary(path) for path in sys.argv[1:]]:
        with (RESULTS / f"{row['benchmark']}.jsonl").open("a") as out:
            out.write(json.dumps(row) + "\n")
