"""How the RL step bears a busy machine: threads 1, 2, 4, and how OpenMP's threads wait, with and without others beside.

    python benchmarks/waiting.py [--busy 0 2] [--rounds 3]

torch's CPU build runs on libgomp, whose threads spin at every barrier by default. Where another process takes a core
from one of them, the others spin until it returns, for each of the thousands of barriers of a step. ``passive`` sleeps
instead, ``short`` spins for some microseconds first. Simulated fp16, interleaved. Rows: results/waiting.jsonl.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from rl_step_vs_trl import our_worker
from rows import append
from steps import spread
from workers import take_turns

POLICIES = {"default": {}, "short": {"GOMP_SPINCOUNT": "10000"}, "passive": {"OMP_WAIT_POLICY": "passive"}}


def measure(folder: Path, threads: int, busy: int, rounds: int, work: str) -> list[dict[str, object]]:
    workers = {
        name: our_worker(folder, "fp16", threads, "--work", work, environment=variables)
        for name, variables in POLICIES.items()
    }
    beside = [subprocess.Popen([sys.executable, "-P", "-c", "while True: pass"]) for _ in range(busy)]
    try:
        steps = take_turns(workers, warm_up=1, rounds=rounds)
    finally:
        for process in beside:
            process.kill()
        for worker in workers.values():
            worker.close()
    rows = []
    for name, measured in steps.items():
        about = {key: workers[name].about[key] for key in ("active", "kernels", "threads")}
        about |= {"benchmark": "waiting", "requested": "fp16", "contender": name, "busy_processes": busy}
        seconds = [step["seconds"] for step in measured]
        rows.append(about | {"metric": "step_seconds", "unit": "s", "rounds": rounds, **spread(seconds)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--busy", type=int, nargs="*", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", default="small", help="as rl_step.py's")
    parser.add_argument("--dry", action="store_true", help="print, and append no rows")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rl_step-") as folder:
        for busy in arguments.busy:
            for threads in arguments.threads:
                rows = measure(Path(folder), threads, busy, arguments.rounds, arguments.work)
                for row in rows:
                    print(f"{busy} busy, {threads} threads  {row['contender']!s:>8} {row['value']:8.3f} s", flush=True)
                if not arguments.dry:
                    append("waiting.jsonl", rows, "cpu")


if __name__ == "__main__":
    main()
