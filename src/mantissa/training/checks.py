"""What the drop-in trainer refuses, each with one clear error."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.bounds import LARGEST_SIZE, SMALLEST_FLOAT, number
from mantissa.errors import MantissaError
from mantissa.precision import FP32, PrecisionPolicy, ResolvedRole, resolve
from mantissa.training.distributed import unwrapped


def named_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The optimiser's parameters by their names in the model."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise MantissaError(
            "LBFGS calls the loss several times in one step, which loss scaling cannot follow; use another"
        )
    names = {id(p): name for name, p in unwrapped(model).named_parameters()}
    named: dict[str, nn.Parameter] = {}
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            named[names.get(id(parameter), f"optimizer.param_groups[{g}][{i}]")] = parameter
    if not set(names.values()) & set(named):
        raise MantissaError(
            "the optimiser holds none of the model's parameters: make it from model.parameters(), after wrapping the "
            "model for several processes"
        )
    return named


def device_of(model: nn.Module) -> torch.device:
    """The one device that all of a model's parameters are on."""
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        listed = ", ".join(sorted(map(str, devices))) or "none: the model has no parameters"
        raise MantissaError(f"PrecisionTrainer expects a model on one device; its parameters are on {listed}")
    return devices.pop()


def check_place(model: nn.Module, device: torch.device) -> None:
    """Refuse a model that has moved: autocast is of one device type and would silently do nothing on another."""
    found = next(model.parameters()).device
    if found != device:
        raise MantissaError(f"the model was on {device} and is now on {found}: move it first, then make the trainer")


def resolved_role(precision: str, backend: Any, fallback: Any, device: torch.device) -> ResolvedRole:
    """The learner's line of the precision table for one format.

    On a CPU bf16 and fp16 are simulated; who would rather have plain fp32 there writes ``fallback="warn"``.
    """
    if backend == "simulated" and precision in ("fp32", "float32"):
        backend = "auto"  # fp32 is never simulated: the same arithmetic
    if precision == "fp8":
        raise MantissaError("precision=fp8: modules run in fp32, fp16 or bf16; fp8 is for the policies of a recipe")
    policy = PrecisionPolicy(train=precision, rollout=precision, backend=backend, fallback=fallback)
    role = resolve(policy, device).learner
    if fallback == "warn" and backend == "auto" and device.type == "cpu" and role.backend == "simulated":
        reason = f"no GPU here, and a CPU would only simulate {role.active}"
        warnings.warn(f"precision: {role.requested} was asked, but {reason}: it runs in fp32", stacklevel=4)
        return ResolvedRole(role.role, role.requested, FP32, "native", f"fallback: warn, because {reason}")
    if role.backend == "simulated":
        where = "no GPU" if device.type == "cpu" else "asked for"
        reason = f"{where}: {role.active} tensors, fp32 accumulation, each result and gradient rounded once"
        return replace(role, reason=reason)
    return role


def precision_line(role: ResolvedRole) -> str:
    """What a trainer says of its precision when it has settled it."""
    return f"precision: {role.requested} asked, {role.active} active, {role.backend} ({role.reason})"


def check_options(
    accumulate: int, max_grad_norm: float, adaptive_clip: float | None, on_nonfinite: str, probe_every: int, fsdp: bool
) -> int:
    """Refuse options that mean nothing, alone or together; returns ``accumulate``."""
    checks = (
        (
            number(accumulate, 1, LARGEST_SIZE, whole=True),
            f"accumulate={accumulate}: expected a whole number from 1 on",
        ),
        (
            number(max_grad_norm, SMALLEST_FLOAT, math.inf),
            f"max_grad_norm={max_grad_norm}: expected more than 0 (inf measures and never clips)",
        ),
        (
            adaptive_clip is None or number(adaptive_clip, SMALLEST_FLOAT),
            f"adaptive_clip={adaptive_clip}: expected more than 0, or None",
        ),
        (number(probe_every, 0, LARGEST_SIZE, whole=True), f"probe_every={probe_every}: expected 0 (never) or more"),
        (
            not (probe_every and fsdp and accumulate > 1),
            f"probe_every={probe_every} with accumulate={accumulate}: under FSDP2 a probe would disturb the "
            "micro-batches that wait; choose one of the two",
        ),
        (on_nonfinite in ("stop", "skip"), f'on_nonfinite={on_nonfinite!r}: expected "stop" or "skip"'),
    )
    for good, message in checks:
        if not good:
            raise MantissaError(f"PrecisionTrainer: {message}")
    return accumulate


def check_loss(loss: Any) -> None:
    """Refuse what cannot be learnt from: anything but a floating-point scalar with a gradient."""
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        what = f"shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise MantissaError(f"loss_fn must return the batch's mean loss, a scalar floating-point tensor; got {what}")
    if not loss.requires_grad:
        raise MantissaError("loss_fn returned a loss without a gradient: was the model run under torch.no_grad()?")
