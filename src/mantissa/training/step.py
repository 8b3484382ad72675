"""The optimiser step: scale, backward, unscale, look for overflow, clip, then step, retry or skip.

The order matters. Clipping scaled gradients at an unscaled bound always clips, and Adam's eps then swallows the
update; clipping before the search for infinities turns one inf into NaN everywhere. And a batch of RL is expensive (it
was sampled) while its backward is cheap: so an overflow lowers the scale and repeats the backward on the *same* batch,
up to ``retries`` times, before the batch is given up. A step that is given up leaves nothing behind: gradients are
zeroed, and neither the optimiser, nor the learning rate's schedule, nor the count of updates (the policy's version)
moves.

Master weights, gradients and Adam's moments are fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mantissa.errors import MantissaError
from mantissa.precision import NumberFormat
from mantissa.training.scaler import LossScaler

Backward = Callable[[float], None]


@dataclass(frozen=True)
class StepOutcome:
    """What became of one optimiser step.

    ``kind``: ``stepped`` (first try), ``retried`` (stepped after ``overflows`` lower scales), ``skipped`` (given up).
    ``grad_norm``: Euclidean norm before clipping, unscaled; NaN where skipped. ``scale``: the scale of the last try.
    ``max_scaled_grad``: the largest finite |scale x gradient| of the last try as a fraction of the format's largest
    value (inf where it overflowed). ``lr``: the learning rate applied; 0 where skipped.
    """

    kind: Literal["stepped", "retried", "skipped"]
    overflows: int
    grad_norm: float
    scale: float
    max_scaled_grad: float
    lr: float

    @property
    def applied(self) -> bool:
        return self.kind != "skipped"


class OptimizerStep:
    """One optimiser, its scaler and its schedule; ``run`` is one step.

    ``parameters``: named fp32 masters. ``lr_at``: learning rate of update number n (0 for the first).
    ``max_grad_norm``: clip bound on the unscaled Euclidean norm (inf: measure, never clip).
    ``diagnose``: given the backward, returns the name of what first became non-finite; called only before stopping.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        scaler: LossScaler,
        fmt: NumberFormat,
        lr_at: Callable[[int], float],
        max_grad_norm: float = float("inf"),
        diagnose: Callable[[Backward], str] | None = None,
    ) -> None:
        for name, parameter in parameters.items():
            if parameter.dtype != torch.float32:
                raise MantissaError(
                    f"parameter {name} is {parameter.dtype}: master weights are fp32; low precision is for kernels"
                )
        self.parameters = dict(parameters)
        self.optimizer = optimizer
        self.scaler = scaler
        self.format = fmt
        self.lr_at = lr_at
        self.max_grad_norm = max_grad_norm
        self.diagnose = diagnose
        self.updates = 0
        self.skipped = 0

    def run(self, backward: Backward) -> StepOutcome:
        """Do one optimiser step on the gradients that ``backward(scale)`` leaves in the parameters' ``.grad``.

        ``backward`` multiplies its loss by the scale it is given, and must do the same work when called again: it is
        called once, and again after each overflow. Raises ``MantissaError`` on a non-finite gradient at the floor.
        """
        overflows = 0
        while True:
            scale = self.scaler.scale
            self.optimizer.zero_grad(set_to_none=True)
            backward(scale)
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            largest = float(torch.nn.utils.get_total_norm(gradients, norm_type=float("inf")))
            if largest <= torch.finfo(torch.float32).max:  # false for inf and for NaN
                break
            overflows += 1
            if self.scaler.at_floor:
                self._stop(backward, scale)
            self.scaler.overflowed()
            if overflows > self.scaler.config.retries:
                self.optimizer.zero_grad(set_to_none=True)
                self.skipped += 1
                return StepOutcome("skipped", overflows, float("nan"), scale, float("inf"), 0.0)
        norm, lr = self._apply(gradients, scale, largest / self.format.largest)
        kind: Literal["stepped", "retried"] = "retried" if overflows else "stepped"
        return StepOutcome(kind, overflows, norm, scale, largest / self.format.largest, lr)

    def _apply(self, gradients: list[Tensor], scale: float, max_scaled_grad: float) -> tuple[float, float]:
        if scale != 1.0:
            torch._foreach_mul_(gradients, 1.0 / scale)  # exact: a power of two
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.max_grad_norm < float("inf"):
            torch.nn.utils.clip_grads_with_norm_(list(self.parameters.values()), self.max_grad_norm, norm)
        lr = self.lr_at(self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.stepped(max_scaled_grad)
        self.updates += 1
        return float(norm), lr

    def _stop(self, backward: Backward, scale: float) -> None:
        where = self.diagnose(backward) if self.diagnose else "not diagnosed"
        self.optimizer.zero_grad(set_to_none=True)
        raise MantissaError(
            f"non-finite gradient at loss scale {scale:g}, which is the floor, so lowering the scale cannot help; "
            f"first non-finite value: {where}; look at that module's input, or train in a format with more range "
            "(bf16, fp32)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Counters and the scaler: plain numbers. The optimiser's tensors are ``optimizer_tensors``."""
        return {"updates": self.updates, "skipped": self.skipped, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.skipped = int(state["updates"]), int(state["skipped"])
        self.scaler.load_state_dict(state["scaler"])

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimiser's state as ``<parameter>/<field>`` tensors, for safetensors."""
        tensors = {}
        for name, parameter in self.parameters.items():
            for field, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{name}/{field}"] = torch.as_tensor(value)
        return tensors

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of ``optimizer_tensors``; a tensor of a parameter that is not here is an error."""
        self.optimizer.state.clear()
        for key, value in tensors.items():
            name, _, field = key.rpartition("/")
            if name not in self.parameters:
                raise MantissaError(f"checkpoint's optimiser state names {name!r}, which this model does not have")
            self.optimizer.state[self.parameters[name]][field] = value.clone()
