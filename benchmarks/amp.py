"""PrecisionTrainer beside torch's own mixed precision: what a step costs, and what is learned and lost."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from runner import Row, Rows, case
from steps import interleaved, spread
from torch import Tensor, nn

from mantissa.bench.runner import RefusedError
from mantissa.bench.workload import BEST_LOSS, ResidualMLP, loss_fn, make_batch, width_for
from mantissa.dropin.trainer import PrecisionTrainer
from mantissa.precision import format_named
from mantissa.training import LossScaler, ScalerConfig

# ---- what a step costs

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


def overhead(name: str, precision: str, make: Callable[[], tuple[nn.Module, Any]], rounds: int) -> list[Row]:
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
    """What PrecisionTrainer costs over plain torch AMP: the same model, optimiser, data and clipping, step by step in
    turn.

    AMP is what torch documents: autocast around forward and loss; for fp16 also GradScaler with ``unscale_`` before
    clipping; for fp32 neither. Ours computes natively, as AMP does. The ratio is taken within each round, in an
    order that alternates, so that a busy machine slows both alike. Target: at most 1.02 where the forward takes 10
    ms or more.

    Native fp16 products are slow on a CPU, so fp16 is measured on a small model.
    """
    for name, precision, make in CASES:
        yield overhead(name, precision, make, rounds)


# ---- what is learned, and what is lost to overflow

PARAMETERS, BATCH, LR = 30_000, 64, 1e-3
EVERY = 50  # updates
Part = Literal["curve", "overflow"]
GROWTH_INTERVAL = 40  # both policies': so that a short run meets as many overflows as a long one at torch's 2000
RETRIES, USUAL_RETRIES = 24, 4


def fresh(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = ResidualMLP(width_for(PARAMETERS))
    return model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def batches(seed: int, updates: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return [make_batch(BATCH, generator) for _ in range(updates)]


HELD_OUT = make_batch(8192, torch.Generator().manual_seed(99))


def held_out_loss(model: nn.Module) -> float:
    """In fp32, from the master weights: what the training came to, not how it is evaluated."""
    with torch.no_grad():
        return loss_fn(model, HELD_OUT).item()


def curve(precision: str, seed: int, updates: int) -> tuple[list[float], PrecisionTrainer]:
    model, optimizer = fresh(seed)
    trainer = PrecisionTrainer(model, optimizer, precision, say=lambda line: None)
    losses = []
    for i, batch in enumerate(batches(seed, updates), start=1):
        trainer.step(batch, loss_fn)
        if i % EVERY == 0:
            losses.append(held_out_loss(model))
    return losses, trainer


def measure_curves(seeds: int, updates: int) -> list[Row]:
    reference = [curve("fp32", seed, updates)[0] for seed in range(seeds)]
    rows = []
    for precision in ("fp16", "bf16"):
        found = [curve(precision, seed, updates) for seed in range(seeds)]
        losses, trainer = [losses for losses, _ in found], found[0][1]
        means = [statistics.mean(point) for point in zip(*losses, strict=True)]
        base = list(zip(*reference, strict=True))
        sigmas = [abs(m - statistics.mean(b)) / statistics.stdev(b) for m, b in zip(means, base, strict=True)]
        inside = [min(b) <= m <= max(b) for m, b in zip(means, base, strict=True)]
        about = {
            "case": "curve", "requested": precision, "active": trainer.precision.active.name,
            "kernels": trainer.precision.backend, "seeds": seeds, "updates": updates, "best_loss": BEST_LOSS,
            "fp32_curve": [round(statistics.mean(b), 5) for b in base],
            "fp32_spread": [round(statistics.stdev(b), 5) for b in base], "curve": [round(m, 5) for m in means],
            "skipped": sum(trainer.skipped for _, trainer in found),
        }  # fmt: skip
        final = {"value": means[-1], "min": min(c[-1] for c in losses), "max": max(c[-1] for c in losses)}
        base_final = {"value": statistics.mean(base[-1]), "min": min(base[-1]), "max": max(base[-1])}
        rows += [
            about | {"metric": "final_loss", "unit": "ratio", **final},
            about | {"metric": "fp32_final_loss", "unit": "ratio", **base_final},
            about | {"metric": "largest_distance_in_fp32_sigmas", "unit": "ratio", "value": max(sigmas)},
            about | {"metric": "points_within_fp32_range", "unit": "ratio", "value": sum(inside) / len(inside)},
        ]
    return rows


def heavy_tailed(seed: int, updates: int) -> list[tuple[tuple[Tensor, Tensor], float]]:
    """The batches of ``seed``, each with a factor for its loss, at least 1: P(factor > f) = f^-0.8."""
    uniform = torch.rand(updates, generator=torch.Generator().manual_seed(2000 + seed), dtype=torch.float64)
    return [(batch, float(u) ** (-1 / 0.8)) for batch, u in zip(batches(seed, updates), uniform, strict=True)]


def weighted_loss(model: nn.Module, batch: tuple[tuple[Tensor, Tensor], float]) -> Tensor:
    return loss_fn(model, batch[0]) * batch[1]


Outcome = tuple[int, int, float]  # batches lost, steps that were repeated, held-out loss


def with_amp(seed: int, updates: int) -> Outcome:
    model, optimizer = fresh(seed)
    scaler = torch.amp.GradScaler("cpu", growth_interval=GROWTH_INTERVAL)
    step, lost = amp_step(model, optimizer, scaler, "fp16", weighted_loss), 0
    for batch in heavy_tailed(seed, updates):
        before = scaler.get_scale()
        step(batch)
        lost += scaler.get_scale() < before  # it falls on overflow, and only then
    return lost, 0, held_out_loss(model)


def with_ours(backend: Any, retries: int, scale: str = "dynamic") -> Callable[[int, int], Outcome]:
    rule: Any = ScalerConfig(growth_interval=GROWTH_INTERVAL, retries=retries) if scale == "dynamic" else scale

    def run(seed: int, updates: int) -> Outcome:
        model, optimizer = fresh(seed)
        trainer = PrecisionTrainer(
            model, optimizer, "fp16", backend=backend, scale=rule, max_grad_norm=1.0, retries=retries,
            say=lambda line: None,
        )  # fmt: skip
        if (type(trainer.scaler) is LossScaler) == (scale == "auto"):
            raise RefusedError(f"scale={scale} was asked for, and a {type(trainer.scaler).__name__} is active")
        for batch in heavy_tailed(seed, updates):
            trainer.step(batch, weighted_loss)
        assert trainer.precision.active.name == "fp16"
        return trainer.skipped, trainer.retried, held_out_loss(model)

    return run


def measure_overflow(seeds: int, updates: int) -> list[Row]:
    contenders = {
        ("torch AMP", "native"): with_amp,
        (f"mantissa, retries={RETRIES}", "native"): with_ours("native", RETRIES),
        (f"mantissa, retries={RETRIES}", "simulated"): with_ours("simulated", RETRIES),
        (f"mantissa, retries={USUAL_RETRIES} (default)", "native"): with_ours("native", USUAL_RETRIES),
        ("mantissa, scale=auto", "simulated"): with_ours("simulated", USUAL_RETRIES, "auto"),
    }
    rows = []
    for (name, kernels), run in contenders.items():
        try:
            found = [run(seed, updates) for seed in range(seeds)]
        except RefusedError as refusal:
            print(f"refused: {name}: {refusal}")
            continue
        about = {
            "case": "overflow", "contender": name, "requested": "fp16", "active": "fp16", "kernels": kernels,
            "seeds": seeds, "updates": updates, "growth_interval": GROWTH_INTERVAL,
        }  # fmt: skip
        metrics = (("batches_lost_per_run", "batches"), ("steps_retried_per_run", "steps"), ("final_loss", "ratio"))
        for i, (metric, unit) in enumerate(metrics):
            values = [outcome[i] for outcome in found]
            summary = {"value": statistics.mean(values), "min": min(values), "max": max(values)}
            rows.append(about | {"metric": metric, "unit": unit, **summary})
    return rows


@case(seeds=2, updates=50)
def amp_loss(
    threads: int = 2, seeds: int = 6, parts: Sequence[Part] = ("curve", "overflow"), updates: int = 400
) -> Rows:
    """fp16's loss against fp32's on a task whose best loss is known, and what each loss-scaling policy loses to
    overflow.

    curve: the built-in task (best loss 0.25) is learned in fp32 and in fp16 from the same seeds (weights, samples,
    noise), and the loss on the same held-out samples is taken every 50 updates. fp16's mean over seeds must lie
    within fp32's range over seeds at every point. Two figures: the distance of the means in fp32's standard
    deviations, the largest of the curve; and the fraction of points within the range.

    overflow: each batch's loss is multiplied by a factor from a heavy tail (a Pareto distribution of exponent 0.8),
    so that gradients overflow again and again. torch's AMP (autocast and GradScaler, fixed policy: a batch that
    overflows is lost) and PrecisionTrainer (which repeats it at a lower scale) learn the same batches, with the
    same growth interval and clipping; natively, and ours also simulated and with scale="auto". Counted: batches
    lost. A step may be repeated 24 times here, so that one factor of 1000 is no loss; what the default of 4 repeats
    loses stands beside it.
    """
    for part in parts:
        yield {"curve": measure_curves, "overflow": measure_overflow}[part](seeds, updates)
