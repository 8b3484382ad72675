"""What 8-bit moments save and cost: bytes of Adam's moments, time of an optimiser step, and how far the weights part.

    python benchmarks/moments_step.py [--device cpu] [--threads 2] [--rounds 30]

Needs torchao. A decoder of 4.2 million weights (hidden 256, 4 layers) on next tokens of a fixed periodic text, in fp32.
The two optimisers take turns; ``seconds`` is the median of ``optimizer.step()`` alone, ``update_seconds`` of forward,
backward and step, ``first_seconds`` the first step, in which torchao compiles its update once for each shape.
``apart``: distance between the two policies' weights over the distance that fp32's went. Rows go to
``results/moments_step.jsonl``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from rows import append
from torch import Tensor

from mantissa.kernels import NativeKernels
from mantissa.model import Decoder, FreshModelConfig
from mantissa.precision import FP32
from mantissa.training import LossScaler, OptimizerStep, adamw
from mantissa.training.optimizer import Moments, described


class Policy:
    """One policy and its optimiser, with the times of its steps."""

    def __init__(self, moments: Moments, device: str) -> None:
        fresh = FreshModelConfig(hidden_size=256, layers=4, heads=8, kv_heads=8, head_dim=32, intermediate_size=1024)
        self.model = Decoder(fresh.model(64)).initialize(torch.Generator().manual_seed(0)).to(device)
        self.optimizer = adamw(self.model, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, moments=moments)
        self.device, self.kernels = device, NativeKernels(FP32)
        self.step = OptimizerStep(
            dict(self.model.named_parameters()), self.optimizer, LossScaler.disabled(), FP32, lambda update: 1e-4, 1.0
        )
        self.began, self.steps, self.updates, self.losses = 0.0, list[float](), list[float](), list[float]()
        self.optimizer.register_step_pre_hook(lambda *_: self._mark())
        self.optimizer.register_step_post_hook(lambda *_: self.steps.append(self._now() - self.began))

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _mark(self) -> None:
        self.began = self._now()

    def update(self, tokens_BT: Tensor) -> None:
        def backward(scale: float) -> Tensor:
            logits = self.model.logits(self.model(tokens_BT, self.kernels), self.kernels)[:, :-1]
            loss = -logits.log_softmax(-1).gather(-1, tokens_BT[:, 1:, None]).mean()
            (loss * scale).backward()
            return loss.detach()

        start = self._now()
        outcome = self.step.run(backward)
        self.updates.append(self._now() - start)
        assert outcome.loss is not None
        self.losses.append(float(outcome.loss))

    @property
    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    @property
    def moment_bytes(self) -> int:
        tensors = self.step.optimizer_tensors()
        return sum(t.untyped_storage().nbytes() for name, t in tensors.items() if not name.endswith("/step"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = arguments.device
    tokens_BT = (torch.arange(64) ** 2 % 61 + torch.arange(8)[:, None]).remainder(64).to(device)
    policies = {"fp32": Policy("fp32", device), "8bit": Policy("8bit", device)}
    start = policies["fp32"].weights.clone()
    for _ in range(arguments.rounds + 1):
        for policy in policies.values():
            policy.update(tokens_BT)
    full, low = policies["fp32"], policies["8bit"]
    apart = float((low.weights - full.weights).norm() / (full.weights - start).norm())
    rows: list[dict[str, Any]] = []
    for name, policy in policies.items():
        ratio = [mine / theirs for mine, theirs in zip(policy.steps[1:], full.steps[1:], strict=True)]
        rows.append(
            {
                "benchmark": "moments_step",
                "requested": name,
                "active": "fp32" if (engaged := described(policy.optimizer)) is None else "8bit",
                "which": engaged or "all",
                "values": int(start.numel()),
                "moment_bytes": policy.moment_bytes,
                "seconds": statistics.median(policy.steps[1:]),
                "fastest": min(policy.steps[1:]),
                "against_fp32": statistics.median(ratio),
                "update_seconds": statistics.median(policy.updates[1:]),
                "first_seconds": policy.steps[0],
                "steps": arguments.rounds + 1,
                "loss": policy.losses[-1],
                "apart": apart if name == "8bit" else 0.0,
            }
        )
        print(rows[-1])
    print(append("moments_step.jsonl", rows, device))


if __name__ == "__main__":
    main()
