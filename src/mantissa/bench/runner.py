"""One training in one precision: the piece that everything here times, measures and profiles.

It goes through ``PrecisionTrainer``, so a row says what a user of it gets. A row is a claim about a precision; so it is
refused where that precision did not engage: where the trainer's probe failed, or where another format is active than
was requested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mantissa.bench.workload import Source, to_device
from mantissa.errors import MantissaError
from mantissa.training.step import StepOutcome
from mantissa.training.trainer import PrecisionTrainer


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
            self.trainer = PrecisionTrainer(
                model,
                optimizer,
                request.precision,
                backend=backend,
                fallback="error",
                on_nonfinite="skip",  # a model that a format cannot train has a row that says so
                say=lambda line: None,
            )
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
    role = trainer.precision
    if role.active.name != request.precision:
        raise RefusedError(
            f"row refused ({request}): {request.precision} was requested and {role.active.name} was active "
            f"({role.reason}); nothing is written for it"
        )
    if request.precision != "fp32" and request.backend not in ("auto", role.backend):
        raise RefusedError(
            f"row refused ({request}): {request.backend} kernels were requested and {role.backend} ones were active; "
            "nothing is written for it"
        )
    if not trainer.evidence:
        raise RefusedError(
            f"row refused ({request}): the probe gave no evidence that {request.precision} is active; nothing is "
            "written for it"
        )


def engaged(requests: Sequence[Request], seed: int, say: Callable[[str], None]) -> dict[str, Runner]:
    """A runner for each request whose precision engages, by precision; ``say`` is told of those refused."""
    runners = {}
    for request in requests:
        try:
            runners[request.precision] = Runner(request, seed)
        except RefusedError as refusal:
            say(str(refusal))
    return runners
