"""One training in one precision: the piece that everything here times, measures and profiles.

It goes through ``PrecisionTrainer``, so a row says what a user of it gets. A row is a claim about a precision; so it is
refused where that precision did not engage: where the trainer's probe failed, or where another format is active than
was requested.

Timing: interleaved rounds, warm-up, synchronised clocks, median and quartiles.

Contenders run in turn within each round, in an order that rotates, so that what slows the machine for a while slows
all alike; ratios are taken within a round. A clock that stops before the device has finished measures the launching of
work: ``synchronize`` stands on both sides of every interval. Short steps are timed in blocks of at least 20 ms.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mantissa.bench.workload import Source, to_device
from mantissa.errors import MantissaError
from mantissa.mismatch.estimates import Estimate
from mantissa.training.step import StepOutcome
from mantissa.training.trainer import PrecisionTrainer

_BLOCK_SECONDS = 0.02


def quartiles(values: Sequence[float]) -> Estimate:
    """The median of repeated measurements, between their quartiles."""
    low, median, high = (float(q) for q in np.quantile(np.asarray(values, dtype=np.float64), (0.25, 0.5, 0.75)))
    return Estimate(median, low, high)


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has done what it was given; a CPU always has."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """``names`` beginning with number ``turn``, and around: whoever goes first in a round does not in the next."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def step_seconds(
    steps: Mapping[str, Callable[[], object]], device: torch.device | str, rounds: int, warm_up: int = 3
) -> dict[str, list[float]]:
    """Seconds of one call of each function, in each round, after ``warm_up`` calls of each.

    In a round each function is called as often as fills 20 ms (at most 50 times, by its last warm-up call).
    """
    calls = {}
    for name, step in steps.items():
        for _ in range(max(1, warm_up)):
            once = _seconds(step, 1, device)
        calls[name] = max(1, min(50, math.ceil(_BLOCK_SECONDS / once)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in rotated(list(steps), turn):
            times[name].append(_seconds(steps[name], calls[name], device))
    return times


def _seconds(step: Callable[[], object], calls: int, device: torch.device | str) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def speed_up(base: Sequence[float], seconds: Sequence[float]) -> Estimate:
    """How many times as fast as ``base``: base time / time, taken within each round."""
    return quartiles([b / s for b, s in zip(base, seconds, strict=True)])


class RefusedError(MantissaError):
    """A row whose precision did not engage; the message names the row."""


@dataclass(frozen=True)
class Request:
    """One contender. ``backend`` applies to bf16 and fp16: fp32 is never simulated."""

    source: Source
    precision: str
    device: str
    backend: str = "auto"

    def __str__(self) -> str:
        return f"{self.precision}, {self.source}, on {self.device}"


class Runner:
    """The model of a request with the weights of ``seed``, its optimiser and its trainer.

    Raises ``RefusedError`` where the precision did not engage.
    """

    def __init__(self, request: Request, seed: int) -> None:
        self.request = request
        self.workload = request.source.build(seed, request.device)
        model = self.workload.model.train()
        optimizer = self.workload.make_optimizer([p for p in model.parameters() if p.requires_grad])
        backend: Any = "auto" if request.precision == "fp32" else request.backend
        try:
            # A model that a format cannot train has a row that says so: hence skip.
            self.trainer = PrecisionTrainer(model, optimizer, request.precision, backend=backend, fallback="error",
                                            on_nonfinite="skip", say=lambda line: None)  # fmt: skip
        except MantissaError as error:
            raise RefusedError(f"row refused ({request}): {error}") from None
        refuse_unless_engaged(request, self.trainer)

    def step(self, batch: Any) -> StepOutcome:
        return self.trainer.step(batch, self.workload.loss_fn)

    def batches(self, count: int, size: int, seed: int) -> list[Any]:
        """``count`` batches of ``size`` samples on the device, the same for every precision."""
        generator = torch.Generator().manual_seed(seed)
        return [to_device(self.workload.make_batch(size, generator), self.request.device) for _ in range(count)]

    def loss(self, batches: Sequence[Any]) -> float:
        """Mean loss over ``batches``, the model computing as it does in training."""
        model = self.workload.model.eval()
        with torch.no_grad(), self.trainer.forward():
            losses = [float(self.workload.loss_fn(model, batch)) for batch in batches]
        model.train()
        return sum(losses) / len(losses)


def refuse_unless_engaged(request: Request, trainer: PrecisionTrainer) -> None:
    """Raise ``RefusedError`` unless ``trainer`` computes in what ``request`` asked for and has evidence of it."""
    role, asked = trainer.precision, request.precision
    if role.active.name != asked:
        why = f"{asked} was requested and {role.active.name} was active ({role.reason})"
    elif asked != "fp32" and request.backend not in ("auto", role.backend):
        why = f"{request.backend} kernels were requested and {role.backend} ones were active"
    elif not trainer.evidence:
        why = f"the probe gave no evidence that {asked} is active"
    else:
        return
    raise RefusedError(f"row refused ({request}): {why}; nothing is written for it")


def engaged(requests: Sequence[Request], seed: int, say: Callable[[str], None]) -> dict[str, Runner]:
    """A runner for each request whose precision engages, by precision; ``say`` is told of those refused."""
    runners = {}
    for request in requests:
        try:
            runners[request.precision] = Runner(request, seed)
        except RefusedError as refusal:
            say(str(refusal))
    return runners
