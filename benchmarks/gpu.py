"""Training-step time on one GPU in fp32, bf16 and fp16, at three sizes.

    python benchmarks/gpu.py [--rounds 8]

Each precision is proved by the probe before it is timed, on the device and with the kernels that are timed. The three
run in turn within each round. Appends rows to $OUT/gpu_step.jsonl where OUT is set, else to results/gpu_step.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
from typing import Any

import torch
from rows import append
from steps import decoder_config, interleaved, step_rows, training_step

from mantissa.kernels import resolve
from mantissa.precision import PRESETS

SIZES = [  # hidden, layers, vocabulary, rows, length
    (256, 4, 4096, 64, 257),
    (1024, 8, 32000, 8, 2049),
    (2048, 16, 32000, 4, 2049),
]
FORMATS = ("fp32", "bf16", "fp16")


def measure(size: tuple[int, int, int, int, int], rounds: int) -> list[dict[str, Any]]:
    hidden, layers, vocabulary, batch, length = size
    config = decoder_config(hidden, layers, vocabulary, head_dim=64)
    steps = {name: training_step(PRESETS[name], config, batch, length, "cuda") for name in FORMATS}
    times = interleaved(steps, warm_up=3, rounds=rounds)
    tokens = batch * (length - 1)
    rows = []
    for name in times:
        role = resolve(PRESETS[name], "cuda").learner
        about = {
            "benchmark": "gpu_step",
            "requested": name,
            "active": role.active.name,
            "kernels": role.backend,
            "attention": "flash-attn" if name != "fp32" and importlib.util.find_spec("flash_attn") else "torch",
            "hidden": hidden,
            "layers": layers,
            "vocabulary": vocabulary,
            "tokens": tokens,
            "rounds": rounds,
        }
        torch.cuda.reset_peak_memory_stats()
        steps[name]()
        rows.append(about | {"metric": "peak_memory", "unit": "bytes", "value": torch.cuda.max_memory_allocated()})
        rows += step_rows(about, name, times)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py: expected a CUDA device that torch can use, found none")
    for size in SIZES:
        rows = measure(size, rounds)
        for row in rows:
            print(f"hidden {size[0]} {row['requested']:>5} {row['metric']:<20} {row['value']:.4g} {row['unit']}")
        print(append("gpu_step.jsonl", rows, "cuda"), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
