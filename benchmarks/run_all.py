"""Every benchmark that a CPU can run, in order, with short settings; then the tables. About 12 minutes on two threads.

    make bench        or        python benchmarks/run_all.py [--threads 2]

One that fails does not stop the others; the exit status says whether any did. TRL is measured where its environment is
(make bench-trl makes it). What needs a GPU is in benchmarks/gpu.sh.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def commands(threads: int) -> list[list[str]]:
    count = ["--threads", str(threads)]
    return [
        ["peak.py"],
        ["demo_memory.py", *count],
        ["rl_step_vs_trl.py", *count, "--rounds", "7"],
        ["rollout_vs_generate.py", *count, "--repeats", "5"],
        ["simulated_step.py", *count, "--rounds", "9"],
        ["fp8_step.py", *count, "--rounds", "9"],
        ["exact_cost.py", *count, "--rounds", "5"],
        ["lora_step.py", *count, "--rounds", "9"],
        ["amp_overhead.py", *count, "--rounds", "20"],
        ["amp_loss.py", *count],
        ["allocator.py", *count, "--rounds", "5"],
        ["waiting.py", *count, "--busy", "0"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    failed = []
    for command in [*commands(threads), ["tables.py"]]:
        print(f"\n== {' '.join(command)}", flush=True)
        start = time.perf_counter()
        done = subprocess.run([sys.executable, str(HERE / command[0]), *command[1:]], check=False)
        if done.returncode:
            failed.append(command[0])
        print(f"   {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
