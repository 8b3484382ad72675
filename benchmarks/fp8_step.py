"""What fp8 costs on a CPU: a training step with simulated fp8 products against native fp32.

    python benchmarks/fp8_step.py [--threads 2] [--rounds 15] [--hidden 256]

The ratio is taken within each round (all run in turn), so that a busy machine slows both sides alike. Target: at most
twice fp32 at hidden size 256. Appends rows to results/fp8_step.jsonl.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rows import append
from steps import decoder_config, interleaved, step_rows, training_step

from mantissa.base.environ import keep_freed_memory
from mantissa.kernels import resolve
from mantissa.precision import PRESETS, Fp8Policy, PrecisionPolicy

LAYERS, ROWS, LENGTH = 4, 64, 65  # 4096 positions are trained on


def policies() -> dict[str, PrecisionPolicy]:
    """fp32, the base alone, and fp8 with each format of gradients; one with power-of-two scales."""
    variants = {
        "fp8": Fp8Policy(),
        "fp8 e4m3": Fp8Policy(backward="e4m3"),
        "fp8 high": Fp8Policy(backward="high"),
        "fp8 power of two": Fp8Policy(scale="power_of_two"),
    }
    fp8 = {name: PrecisionPolicy(train="fp8", rollout="fp8", fp8=variant) for name, variant in variants.items()}
    return {"fp32": PRESETS["fp32"], "bf16": PRESETS["bf16"], **fp8}


def measure(hidden: int, rounds: int) -> list[dict[str, Any]]:
    config = decoder_config(hidden, LAYERS)
    asked = policies()
    steps = {name: training_step(policy, config, ROWS, LENGTH, "cpu") for name, policy in asked.items()}
    times = interleaved(steps, warm_up=3, rounds=rounds)
    rows = []
    for name in times:
        role = resolve(asked[name], "cpu").learner
        about = {
            "benchmark": "fp8_step",
            "contender": name,
            "requested": asked[name].train,
            "active": "fp8" if role.fp8 is not None else role.active.name,
            "products": role.name if role.fp8 is None else f"{role.fp8}, scale {role.fp8.scale}",
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
    parser.add_argument("--hidden", type=int, default=256)
    arguments = parser.parse_args()
    keep_freed_memory()  # as `mantissa train` does
    torch.set_num_threads(arguments.threads)
    rows = measure(arguments.hidden, arguments.rounds)
    for row in rows:
        print(f"{row['contender']:>16} {row['metric']:<20} {row['value']:.4g} {row['unit']}")
    print(append("fp8_step.jsonl", rows, "cpu"))


if __name__ == "__main__":
    main()
