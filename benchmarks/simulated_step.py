"""What simulation costs: a training step in simulated fp16 and bf16 against native fp32, on a CPU.

    python benchmarks/simulated_step.py [--threads 2] [--rounds 15]

The ratio is taken within each round (the three run in turn), so that a busy machine slows both sides alike. Target: at
most 1.2 times fp32. Appends rows to results/simulated_step.jsonl.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rows import append
from steps import decoder_config, interleaved, step_rows, training_step

from mantissa.kernels import resolve
from mantissa.precision import PrecisionPolicy

POLICIES = {
    name: PrecisionPolicy.parse({"preset": name} if name == "fp32" else {"preset": name, "backend": "simulated"})
    for name in ("fp32", "fp16", "bf16")
}
LAYERS, ROWS, LENGTH = 4, 64, 97  # 6144 positions are trained on


def measure(hidden: int, rounds: int) -> list[dict[str, Any]]:
    config = decoder_config(hidden, LAYERS)
    steps = {name: training_step(policy, config, ROWS, LENGTH, "cpu") for name, policy in POLICIES.items()}
    times = interleaved(steps, warm_up=3, rounds=rounds)
    rows = []
    for name in times:
        role = resolve(POLICIES[name], "cpu").learner
        about = {
            "benchmark": "simulated_step",
            "requested": name,
            "active": role.active.name,
            "kernels": role.backend,
            "hidden": hidden,
            "layers": LAYERS,
            "tokens": ROWS * (LENGTH - 1),
            "rounds": rounds,
        }
        rows += step_rows(about, name, times)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for hidden in (128, 256):
        rows = measure(hidden, arguments.rounds)
        for row in rows:
            print(f"hidden {hidden} {row['requested']:>5} {row['metric']:<20} {row['value']:.4g} {row['unit']}")
        print(append("simulated_step.jsonl", rows, "cpu"))


if __name__ == "__main__":
    main()
