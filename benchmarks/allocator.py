"""What glibc's allocator costs the RL step: as it is, against keeping freed memory, interleaved.

    python benchmarks/allocator.py [--threads 2] [--rounds 7]

By default glibc returns large blocks to the system when they are freed, and the system hands them out again page by
page, zeroed, each at a fault's price; a step frees and takes hundreds of blocks of megabytes. Contender ``kept`` is
what ``mantissa train`` does (``mantissa.base.environ``). Rows: results/allocator.jsonl.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from rl_step_vs_trl import our_worker
from rows import append
from steps import spread
from workers import ratios, take_turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--work", default="small", help="as rl_step.py's")
    parser.add_argument("--dry", action="store_true", help="print, and append no rows")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    with tempfile.TemporaryDirectory(prefix="rl_step-") as folder:
        for precision in ("fp32", "fp16"):
            workers = {
                name: our_worker(
                    Path(folder), precision, arguments.threads, "--allocator", name, "--work", arguments.work
                )
                for name in ("default", "kept")
            }
            try:
                steps = take_turns(workers, warm_up=3, rounds=arguments.rounds)
            finally:
                for worker in workers.values():
                    worker.close()
            about = {"benchmark": "allocator", "requested": precision, "rounds": arguments.rounds}
            about |= {key: workers["kept"].about[key] for key in ("active", "kernels")}
            for name, measured in steps.items():
                for metric, unit, key in (
                    ("step_seconds", "s", "seconds"),
                    ("page_faults", "faults", "page_faults"),
                    ("peak_memory", "bytes", "peak_memory"),
                ):
                    values = [step[key] for step in measured]
                    rows.append(about | {"contender": name, "metric": metric, "unit": unit, **spread(values)})
            ratio = spread(ratios(steps, "kept", "default"))
            rows.append(about | {"contender": "kept", "metric": "time_over_default", "unit": "ratio", **ratio})
    for row in rows:
        print(f"{row['requested']} {row['contender']:>8} {row['metric']:<20} {row['value']:12.5g} {row['unit']}")
    if not arguments.dry:
        print(append("allocator.jsonl", rows, "cpu"))


if __name__ == "__main__":
    main()
