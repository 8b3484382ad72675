"""What exact adapters cost: an update with every weight trained, with adapters merged, and with a low-rank side path.

    python benchmarks/lora_step.py [--threads 2] [--rounds 9]

One update is a forward and backward of a next-token loss and an AdamW step, on a decoder of 4.6 million weights (hidden
256, 4 layers). ``side`` computes W x + s B (A x), as adapters usually do: the yardstick, for what the learner's policy
being the merged one to the bit costs. The three take turns. ``trained_bytes``: gradients and Adam's moments, fp32.
Rows go to ``results/lora_step.jsonl``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rows import append
from torch import Tensor

from mantissa.kernels import Kernels, NativeKernels, SimulatedKernels
from mantissa.model import Decoder, FreshModelConfig, LoraShape, attach, trained_parameters
from mantissa.model.decoder import AdaptedProjection
from mantissa.precision import FP16, FP32
from mantissa.training import adamw

RANK, WIDTH = 16, 64


def side_path(self: AdaptedProjection, x: Tensor, kernels: Kernels) -> Tensor:
    low = kernels.linear(kernels.linear(x, self.lora_A), self.scale * self.lora_B)
    return kernels.add(kernels.linear(x, self.weight, self.bias), low)


def updater(variant: str, kernels: Kernels, tokens_BT: Tensor) -> tuple[Callable[[], None], int]:
    """One update of the variant, and the bytes of what only training needs."""
    draw = torch.Generator().manual_seed(0)
    fresh = FreshModelConfig(hidden_size=256, layers=4, heads=8, kv_heads=8, head_dim=32, intermediate_size=1024)
    model = Decoder(fresh.model(64)).initialize(draw)
    if variant != "full":
        attach(model, LoraShape(RANK, 32.0), draw)
    if variant == "side":
        for module in model.modules():
            if isinstance(module, AdaptedProjection):
                module.forward = side_path.__get__(module)  # type: ignore[method-assign]
    optimizer = adamw(model, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    for group in optimizer.param_groups:
        group["lr"] = 1e-4

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = model.logits(model(tokens_BT, kernels), kernels)[:, :-1]
        (-logits.log_softmax(-1).gather(-1, tokens_BT[:, 1:, None]).mean() * 1024).backward()
        optimizer.step()

    return update, 3 * 4 * sum(p.numel() for p in trained_parameters(model).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    for name, kernels in (("fp32", NativeKernels(FP32)), ("fp16", SimulatedKernels(FP16))):
        for sequences in (8, 64):
            tokens_BT = torch.randint(0, 64, (sequences, WIDTH), generator=torch.Generator().manual_seed(1))
            made = {variant: updater(variant, kernels, tokens_BT) for variant in ("full", "merged", "side")}
            times: dict[str, list[float]] = {variant: [] for variant in made}
            for round_ in range(arguments.rounds + 1):
                for variant, (update, _) in made.items():
                    start = time.perf_counter()
                    update()
                    if round_:
                        times[variant].append(time.perf_counter() - start)
            for variant, (_, size) in made.items():
                against = [mine / full for mine, full in zip(times[variant], times["full"], strict=True)]
                rows.append(
                    {
                        "benchmark": "lora_step",
                        "requested": name,
                        "active": kernels.format.name,
                        "kernels": "native" if name == "fp32" else "simulated",
                        "variant": variant,
                        "rank": RANK,
                        "tokens": sequences * WIDTH,
                        "seconds": statistics.median(times[variant]),
                        "against_full": statistics.median(against),
                        "trained_bytes": size,
                    }
                )
                print({key: rows[-1][key] for key in ("active", "variant", "tokens", "seconds", "against_full")})
    print(append("lora_step.jsonl", rows, "cpu"))


if __name__ == "__main__":
    main()
