"""What the drop-in trainer refuses, each with one clear error."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.bounds import LARGEST_SIZE, SMALLEST_FLOAT, number
from mantissa.errors import MantissaError
from mantissa.kernels import Autocast
from mantissa.precision import FP32, PrecisionPolicy, ResolvedRole, resolve
from mantissa.ranks import ALONE, Ranks, is_fsdp
from mantissa.training.distributed import local, synchronising, unwrapped
from mantissa.training.window import Keeper, Micro


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


def first_nonfinite(model: nn.Module, work: Callable[[], object]) -> str:
    """Run ``work`` (a forward and backward through ``model``) and name the first module with a non-finite value.

    Looks at module outputs in the order of the forward, then at gradients of outputs in the order of the backward,
    then at the parameters' gradients. Costs one synchronisation per module: call it only when something is wrong.
    """
    found: list[str] = []
    handles = []

    def check(values: Any, description: str) -> None:
        for value in values if isinstance(values, (tuple, list)) else (values,):
            if not found and isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
                found.append(f"{description} ({int((~value.isfinite()).sum())} of {value.numel()} values)")

    for name, module in model.named_modules():
        label = name or type(model).__name__

        def on_forward(module: nn.Module, args: Any, output: Any, label: str = label) -> None:
            check(output, f"the output of {label}")
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda grad: check(grad, f"the gradient of the output of {label}"))

        handles.append(module.register_forward_hook(on_forward))
    try:
        work()
    finally:
        for handle in handles:
            handle.remove()
    for name, parameter in model.named_parameters():
        check(None if parameter.grad is None else local(parameter.grad), f"the gradient of {name}")
    return found[0] if found else "nothing: the values were finite when the pass was repeated"


def anomaly(work: Callable[[], object]) -> str:
    """What autograd's anomaly mode says of ``work``: the operation whose gradient is NaN, and the forward's line."""
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("always")
        try:
            work()
        except RuntimeError as error:
            trace = [line.strip() for w in caught for line in str(w.message).splitlines() if line.strip()]
            files = [line for line in trace if line.startswith("File ")]
            return f"anomaly mode: {error}" + (f", made at {files[-1]}" if files else "")
    return "anomaly mode: no operation made a NaN gradient (it does not look for inf)"


def flushed_fraction(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor], ranks: Ranks = ALONE) -> float:
    """Fraction of gradients that are zero in ``gradients`` among those that are not in ``exact`` (fp32, same scale).

    count(g == 0 and e != 0) / count(e != 0); 0 where ``exact`` is zero everywhere. Host float. Of sharded gradients
    each of the ``ranks`` counts its shards, and the counts are added.
    """
    flushed, nonzero = 0, 0
    for name, reference in exact.items():
        alive = local(reference) != 0
        flushed += int((alive & (local(gradients[name]) == 0)).sum())
        nonzero += int(alive.sum())
    counted = ranks.sum_of(nonzero)
    return ranks.sum_of(flushed) / counted if counted else 0.0


def gradients_of(model: nn.Module, work: Callable[[], None]) -> dict[str, Tensor]:
    """Gradients that ``work`` (a backward pass) leaves in the parameters, which are then cleared. Not to be called
    between a backward and its optimiser step."""
    model.zero_grad(set_to_none=True)
    work()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def flush_probe(model: nn.Module, micro: Micro, autocast: Autocast, factor: float, device: torch.device) -> float:
    """Fraction of this rank's parameter gradients that are zero in ``autocast``'s format but not in fp32.

    Both passes multiply the loss by ``factor`` (loss scale x weight). Gradients that are already there, buffers and
    generators are put back. Under FSDP2 every rank must call this, with no micro-batch waiting: making gradients is
    exchanging them.
    """
    keeper = Keeper(model, device)
    pending = {parameter: parameter.grad for parameter in model.parameters()}

    def gradients(context: Autocast) -> dict[str, Tensor]:
        found = gradients_of(model, _pass(model, micro, context, factor))
        keeper.restore()
        return {name: local(grad) for name, grad in found.items()}

    low = gradients(autocast)
    exact = gradients(Autocast(FP32, "native", autocast.device_type))
    for parameter, grad in pending.items():
        parameter.grad = grad
    return flushed_fraction(low, exact)


def _pass(model: nn.Module, micro: Micro, autocast: Autocast, factor: float) -> Callable[[], None]:
    def work() -> None:
        assert micro.loss_fn is not None
        with synchronising(model, is_fsdp(model)):
            with autocast.forward():
                loss = micro.loss_fn(model, micro.batch)
            with autocast.backward():
                (loss.float() * factor).backward()

    return work
