"""The automatic loss scale against the dynamic rule: steps skipped (no retries) and gradients flushed to zero.

Synthetic gradients: a vector a step in 16 groups whose sizes fall by 2^28 from first to last (layers and rare rows),
with a common size that varies from step to step (lognormal, half a bit) and drifts; noise is normal, Student-t,
lognormal, or normal with spikes of 2^3 to 2^8 once in 300 steps. ``start right``: the median peak has 4 bits left at
2^16, where all begin, so no contender has to search; ``start low``: gradients 2^8 smaller. ``up``, ``down``: one bit
per 1000 steps.
A real run: an MLP in simulated fp16, whose gradients are those of its backward pass.

Skipped is a step with any |scale x gradient| that rounds to inf (65520 and above); flushed a nonzero gradient at most
2^-25 after scaling. ``late`` metrics are of the second half: warmed up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from runner import Row, Rows, case

from mantissa.kernels import SimulatedKernels
from mantissa.precision import FP16
from mantissa.training import LossScaler, ScalerConfig, flushed_fraction
from mantissa.training.scaler import AutoRule, AutoScaler

LOWEST, BINS = -160, 320  # binades that are counted
OVERFLOW = 65520.0  # the first magnitude that rounds to inf
NOISES = ("normal", "t4", "t3", "t2", "lognormal", "spikes")
CASES = (("right", 0.0), ("right", 1e-3), ("right", -1e-3), ("low", 0.0))  # start; drift, bits a step
CONTENDERS: dict[str, Callable[[], LossScaler]] = {
    "dynamic 400": lambda: LossScaler(ScalerConfig(growth_interval=400, retries=0)),
    "dynamic 2000": lambda: LossScaler(ScalerConfig(growth_interval=2000, retries=0)),
    "auto": lambda: AutoScaler(ScalerConfig(retries=0)),
    "auto 1/600": lambda: AutoScaler(ScalerConfig(retries=0), AutoRule(rate=1 / 600)),
}
Stream = tuple[np.ndarray, np.ndarray]


def draw(noise: str, rng: np.random.Generator, steps: int, size: int) -> np.ndarray:
    """log2 |gradient| before the common size, (steps, size)."""
    if noise.startswith("t"):
        values = rng.standard_t(float(noise[1:]), (steps, size))
    elif noise == "lognormal":
        values = rng.lognormal(0.0, 2.5, (steps, size))
    else:
        values = rng.standard_normal((steps, size))
    bits = np.log2(np.abs(values)) + np.repeat(-28 * np.arange(16) / 15, size // 16)
    if noise == "spikes":
        bits += np.where(rng.random(steps) < 1 / 300, rng.uniform(3, 8, steps), 0.0)[:, None]
    return bits


def stream(noise: str, start: str, drift: float, steps: int, seed: int, size: int = 4096) -> Stream:
    """Peaks (log2, T) and below_TB: the fraction of step t's gradients under 2^(LOWEST + b)."""
    rng = np.random.default_rng(seed)
    centre = np.median(draw(noise, rng, 256, size).max(1))
    level = -centre - 4.0 - (8.0 if start == "low" else 0.0)  # 16 bits of fp16 - 16 of the first scale - 4 of headroom
    peaks, below = np.empty(steps), np.zeros((steps, BINS + 1))
    for first in range(0, steps, 250):
        n = min(250, steps - first)
        common = level + drift * np.arange(first, first + n) + 0.5 * rng.standard_normal(n)
        bits = draw(noise, rng, n, size) + common[:, None]
        peaks[first : first + n] = bits.max(1)
        index = np.clip(np.floor(bits).astype(np.int64) - LOWEST, 0, BINS - 1) + BINS * np.arange(n)[:, None]
        counts = np.bincount(index.ravel(), minlength=n * BINS).reshape(n, BINS)
        below[first : first + n, 1:] = counts.cumsum(1) / size
    return peaks, below


def replay(scaler: LossScaler, peaks: np.ndarray, below: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What ``scaler`` makes of a stream: skipped (T, bool) and the fraction flushed (T). Scales are powers of two."""
    skipped, flushed = np.zeros(len(peaks), bool), np.zeros(len(peaks))
    for t, peak in enumerate(peaks):
        exponent = math.log2(scaler.scale)
        flushed[t] = below[t, int(-25 - exponent) - LOWEST]
        scaled = 2.0 ** (peak + exponent)
        if scaled >= OVERFLOW:
            skipped[t] = True
            scaler.overflowed()
        else:
            scaler.stepped(min(scaled / FP16.largest, 1.0))
    return skipped, flushed


def mlp_run(scaler: LossScaler, factor: float, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Train an MLP (32-64-64-8, SGD) in simulated fp16 on targets with Student-t noise; the loss is ``factor`` x mean.

    As ``replay``; flushed is measured at every 20th step against the gradient computed in fp32 at the same weights, and
    NaN elsewhere. The learning rate is divided by the factor: every factor is the same training in exact arithmetic.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = (32, 64, 64, 8)
    weights = [(torch.randn(b, a, generator=generator) / a**0.5).requires_grad_() for a, b in itertools.pairwise(sizes)]
    teacher = torch.randn(32, 8, generator=generator) / 32**0.5
    rng = np.random.default_rng(seed)
    kernels = SimulatedKernels(FP16)

    def gradients(x: torch.Tensor, y: torch.Tensor, scale: float, exact: bool) -> dict[str, torch.Tensor]:
        h = x
        for i, weight in enumerate(weights):
            h = torch.nn.functional.linear(h, weight) if exact else kernels.linear(h, weight)
            h = torch.relu(h) if i < len(weights) - 1 else h
        loss = torch.nn.functional.mse_loss(h, y) * factor
        return {str(i): g for i, g in enumerate(torch.autograd.grad(loss * scale, weights))}

    skipped, flushed = np.zeros(steps, bool), np.full(steps, np.nan)
    for t in range(steps):
        x = torch.randn(32, 32, generator=generator)
        y = torch.tanh(x @ teacher) + 0.3 * torch.from_numpy(rng.standard_t(2.0, (32, 8))).float()
        scaled = gradients(x, y, scaler.scale, exact=False)
        if t % 20 == 0:
            flushed[t] = flushed_fraction(scaled, gradients(x, y, scaler.scale, exact=True))
        peak = max(float(g.abs().max()) for g in scaled.values())
        if not math.isfinite(peak):
            skipped[t] = True
            scaler.overflowed()
            continue
        with torch.no_grad():
            for weight, grad in zip(weights, scaled.values(), strict=True):
                weight -= 3e-3 / factor * (grad / scaler.scale)
        scaler.stepped(peak / FP16.largest)
    return skipped, flushed


def summary(what: str, kernels: str, contender: str, runs: list[tuple[np.ndarray, np.ndarray]]) -> list[Row]:
    """Steps skipped and the mean fraction flushed, of the whole runs and of their second halves; one run a seed."""
    values = {
        "skipped_steps": [float(s.sum()) for s, _ in runs],
        "flushed_fraction": [float(np.nanmean(f)) for _, f in runs],
        "late_skipped_steps": [float(s[len(s) // 2 :].sum()) for s, _ in runs],
        "late_flushed_fraction": [float(np.nanmean(f[len(f) // 2 :])) for _, f in runs],
    }
    about: Row = {"requested": "fp16", "active": "fp16", "kernels": kernels, "case": what, "contender": contender,
                  "steps": len(runs[0][0]), "seeds": len(runs)}  # fmt: skip
    return [
        about | {"metric": metric, "unit": "steps" if "steps" in metric else "ratio", "value": float(np.mean(each)),
                 "min": min(each), "max": max(each), "per_seed": each}
        for metric, each in values.items()
    ]  # fmt: skip


@case(steps=60, seeds=1)
def auto_scale(steps: int = 10_000, seeds: int = 5) -> Rows:
    torch.set_num_threads(1)
    for noise in NOISES:
        for start, drift in CASES:
            streams = [stream(noise, start, drift, steps, seed) for seed in range(seeds)]
            way = "steady" if drift == 0 else "up" if drift > 0 else "down"
            for name, make in CONTENDERS.items():
                runs = [replay(make(), *each) for each in streams]
                yield summary(f"{noise}, start {start}, {way}", "arithmetic", name, runs)
    for factor in (1.0, 2.0**8, 2.0**-10):  # mean; sum over a batch; a term of small weight
        for name, make in CONTENDERS.items():
            runs = [mlp_run(make(), factor, steps, seed) for seed in range(seeds)]
            yield summary(f"MLP, loss x {factor:g}", "simulated", name, runs)
