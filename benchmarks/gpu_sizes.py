"""Speed and peak memory of a training step in fp32, TF32, bf16 and fp16 on one GPU, 1M to 1B parameters.

    python benchmarks/gpu_sizes.py [--rounds 7] [--batch 4096] [--sizes 1M,10M,100M,300M,1B] [--seconds 110]

The models are those of ``mantissa bench``. fp32, bf16 and fp16 are proved by the trainer's probe; TF32 is fp32's
trainer with torch's matmul precision at "high" during its steps, and is proved by a product here: it must lose 2^-23
and keep 2^-10. The four run in turn. No new size is begun after --seconds; one that does not fit is said and left out.
Appends rows to $OUT/gpu_sizes.jsonl where OUT is set, else to results/gpu_sizes.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from rows import append

from mantissa.bench.runner import Contender, Runner, quartiles, speed_up, step_seconds, training_peak
from mantissa.bench.workload import Source, parse_size, short
from mantissa.mismatch.intervals import Estimate

CONTENDERS = ("fp32", "tf32", "bf16", "fp16")


def in_tf32(work: Callable[[], Any]) -> Any:
    torch.set_float32_matmul_precision("high")
    try:
        return work()
    finally:
        torch.set_float32_matmul_precision("highest")


def tf32_is_active() -> bool:
    """True where a product of ones keeps 2^-10 and loses 2^-23, as 10 bits of mantissa must."""

    def product(value: float) -> float:
        left = torch.zeros(64, 64, device="cuda")
        left[0, 0] = value
        return (left @ torch.eye(64, device="cuda"))[0, 0].item()

    return in_tf32(lambda: product(1 + 2.0**-10) == 1 + 2.0**-10 and product(1 + 2.0**-23) == 1.0)


def contender(name: str, source: Source) -> Contender:
    return Contender(source, "fp32" if name == "tf32" else name, "cuda")


def step_of(name: str, runner: Runner, batch: Any) -> Callable[[], object]:
    if name == "tf32":
        return lambda: in_tf32(lambda: runner.step(batch))
    return lambda: runner.step(batch)


def measure(source: Source, batch_size: int, rounds: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
    peaks = {name: training_peak(contender(name, source), batch_size) for name in names}
    runners = {name: Runner(contender(name, source), seed=0) for name in names}
    batch = next(iter(runners.values())).batches(1, batch_size, seed=0)[0]
    steps = {name: step_of(name, runner, batch) for name, runner in runners.items()}
    times = step_seconds(steps, "cuda", rounds)
    rows = []
    for name, runner in runners.items():
        about = {
            "benchmark": "gpu_sizes",
            "requested": name,
            "active": name if name == "tf32" else runner.trainer.precision.active.name,
            "kernels": runner.trainer.precision.backend,
            "parameters": runner.workload.parameters,
            "tokens": batch_size,
            "rounds": rounds,
        }
        flops = 6 * runner.workload.parameters * batch_size  # products, forward and backward
        step, ratio = quartiles(times[name]), speed_up(times["fp32"], times[name])
        rows.append(about | {"metric": "step_seconds", "unit": "s", **_fields(step)})
        rows.append(about | {"metric": "speed_over_fp32", "unit": "ratio", **_fields(ratio)})
        rows.append(about | {"metric": "product_tflops", "unit": "TFLOP/s", "value": flops / step.value / 1e12})
        rows.append(about | {"metric": "peak_memory", "unit": "bytes", "value": peaks[name]})
    return rows


def _fields(spread: Estimate) -> dict[str, float | None]:
    return {"value": spread.value, "quartile_low": spread.low, "quartile_high": spread.high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--sizes", default="1M,10M,100M,300M,1B")
    parser.add_argument("--seconds", type=float, default=110.0)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu_sizes.py: expected a CUDA device that torch can use, found none")
    names = CONTENDERS if tf32_is_active() else tuple(name for name in CONTENDERS if name != "tf32")
    if "tf32" not in names:
        print("refused: tf32 was requested and is not what this GPU's products show")
    start = time.perf_counter()
    for size in map(parse_size, arguments.sizes.split(",")):
        if time.perf_counter() - start > arguments.seconds:
            print(f"left out: {short(size)} and larger, {arguments.seconds:.0f} s are over")
            break
        try:
            rows = measure(Source(parameters=size), arguments.batch, arguments.rounds, names)
        except torch.OutOfMemoryError:
            print(f"left out: {short(size)} does not fit {len(names)} times in this GPU's memory")
            rows = []
        for row in rows:
            print(f"{short(row['parameters']):>6} {row['requested']:>5} {row['metric']:<16} {row['value']:.4g} "
                  f"{row['unit']}")  # fmt: skip
        if rows:
            print(append("gpu_sizes.jsonl", rows, "cuda"), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
