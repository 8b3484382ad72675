"""What PrecisionTrainer costs over plain torch AMP: the same model, optimiser, data and clipping, step by step in turn.

AMP is what torch documents: autocast around forward and loss; for fp16 also GradScaler with ``unscale_`` before
clipping; for fp32 neither. Ours computes natively, as AMP does. The ratio is taken within each round, in an order that
alternates, so that a busy machine slows both alike. Target: at most 1.02 where the forward takes 10 ms or more.

Native fp16 products are slow on a CPU, so fp16 is measured on a small model. Appends rows to
results/amp_overhead.jsonl.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from typing import Any

import torch
from runner import Row, Rows, case
from steps import interleaved, spread
from torch import Tensor, nn

from mantissa.bench.workload import ResidualMLP, loss_fn, make_batch, width_for
from mantissa.dropin.trainer import PrecisionTrainer
from mantissa.precision import format_named

MAX_NORM = 1.0


class Transformer(nn.Module):
    """A small encoder over 64 positions that reads the task's 32 numbers at each of them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(32, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.last = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.first(x)))


def mlp_case(parameters: int, samples: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return ResidualMLP(width_for(parameters)), make_batch(samples, torch.Generator().manual_seed(1))


def transformer_case(width: int, layers: int, sequences: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    inputs, targets = make_batch(sequences * 64, torch.Generator().manual_seed(1))
    return Transformer(width, layers), (inputs.view(sequences, 64, 32), targets.view(sequences, 64, 8))


CASES: tuple[tuple[str, str, Callable[[], tuple[nn.Module, Any]]], ...] = (
    ("mlp", "fp32", lambda: mlp_case(10_000_000, 512)), ("mlp", "bf16", lambda: mlp_case(10_000_000, 1024)),
    ("mlp", "fp16", lambda: mlp_case(300_000, 128)), ("transformer", "fp32", lambda: transformer_case(256, 4, 16)),
    ("transformer", "bf16", lambda: transformer_case(256, 4, 16)),
)  # fmt: skip


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def ours(precision: str, model: nn.Module, batch: Any) -> tuple[Callable[[], object], PrecisionTrainer]:
    backend: Any = "auto" if precision == "fp32" else "native"
    trainer = PrecisionTrainer(
        model, optimizer_of(model), precision, backend=backend, max_grad_norm=MAX_NORM, say=lambda line: None
    )
    return lambda: trainer.step(batch, loss_fn), trainer


def autocast(precision: str) -> Any:
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", format_named(precision).dtype)


def amp_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, precision: str,
    loss_of: Callable[[nn.Module, Any], Tensor],
) -> Callable[[Any], None]:  # fmt: skip
    """A step as torch documents it, of the batch that it is given."""

    def step(batch: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(precision):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return step


def amp(precision: str, model: nn.Module, batch: Any) -> Callable[[], object]:
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    step = amp_step(model, optimizer_of(model), scaler, precision, loss_fn)
    return lambda: step(batch)


def forward_seconds(precision: str, model: nn.Module, batch: Any) -> float:
    def forward() -> None:
        with autocast(precision):
            loss_fn(model, batch)

    return statistics.median(interleaved({"forward": forward}, 2, 7)["forward"])


def measure(name: str, precision: str, make: Callable[[], tuple[nn.Module, Any]], rounds: int) -> list[Row]:
    model, batch = make()
    other, _ = make()
    mine, trainer = ours(precision, model, batch)
    times = interleaved({"amp": amp(precision, other, batch), "ours": mine}, warm_up=4, rounds=rounds)
    about = {
        "case": name, "requested": precision, "active": trainer.precision.active.name,
        "kernels": trainer.precision.backend, "parameters": sum(p.numel() for p in model.parameters()),
        "samples": len(batch[0]), "rounds": rounds,
    }  # fmt: skip
    ratios = [a / b for a, b in zip(times["ours"], times["amp"], strict=True)]
    forward = forward_seconds(precision, other, batch)
    return [
        about | {"metric": "forward_seconds", "unit": "s", "value": forward},
        about | {"metric": "amp_step_seconds", "unit": "s", **spread(times["amp"])},
        about | {"metric": "our_step_seconds", "unit": "s", **spread(times["ours"])},
        about | {"metric": "step_time_over_amp", "unit": "ratio", **spread(ratios)},
    ]


@case(rounds=1)
def amp_overhead(threads: int = 2, rounds: int = 40) -> Rows:
    for name, precision, make in CASES:
        yield measure(name, precision, make, rounds)
