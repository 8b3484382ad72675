"""What a trainer must remember to go on as if it had never stopped, and putting it back on any number of processes."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mantissa.bounds import boundary, count
from mantissa.errors import MantissaError
from mantissa.tensors import plain_name, require_finite
from mantissa.training.distributed import shard_like, unwrapped, whole

if TYPE_CHECKING:
    from mantissa.training.trainer import PrecisionTrainer


OpenWindow = Literal["error", "leave out"]


def stats_of(trainer: PrecisionTrainer) -> dict[str, Any]:
    """What happened so far, for ``PrecisionTrainer.stats``."""
    latest, role = trainer.latest, trainer.precision
    return {
        "steps": trainer.steps,
        "updates": trainer.updates,
        "skipped": trainer.skipped,
        "retried": trainer.retried,
        "overflow_rate": trainer.skipped / trainer.steps if trainer.steps else 0.0,
        "batches_seen": trainer.batches_seen,
        "accumulated": trainer.accumulated,
        "loss_scale": trainer.scaler.scale,
        "grad_norm": latest.grad_norm if latest else None,
        "clipped_fraction": latest.clipped if latest else None,
        "max_scaled_grad": latest.max_scaled_grad if latest else None,
        "flushed_fraction": trainer.flushed_fraction,
        "precision_requested": role.requested,
        "precision_active": role.active.name,
        "backend": role.backend,
        "reason": role.reason,
        "device": str(trainer.device),
        "rank": trainer.ranks.rank,
        "world_size": trainer.ranks.world,
    }


def state_of(
    trainer: PrecisionTrainer, extra: Mapping[str, Any] | None, open_window: OpenWindow = "error"
) -> dict[str, Any]:
    """Everything, with whole tensors on the CPU. Collective: every rank calls it, and all get the same."""
    if trainer.accumulated and open_window == "error":
        raise MantissaError(
            f"cannot save with {trainer.accumulated} of {trainer.accumulate} micro-batches accumulated: gradients are "
            "not part of a checkpoint; save after the optimiser's turn, or call flush() first"
        )
    return {
        "model_state_dict": dict(whole(unwrapped(trainer.model).state_dict())),
        "optimizer_state_dict": whole(trainer.optimizer.state_dict()),
        "scheduler_state_dict": None if trainer.scheduler is None else whole(trainer.scheduler.state_dict()),
        "training_steps": trainer.steps,
        "overflow_steps": trainer.skipped,
        "counters": {
            "updates": trainer.updates,
            "retried": trainer.retried,
            "batches_seen": trainer.batches_seen,
        },
        "fp16_active": trainer.precision.active.name == "fp16",
        "precision": {"requested": trainer.precision.requested, "active": trainer.precision.active.name},
        "scaler_state_dict": trainer.scaler.state_dict(),
        "generators": _generators(trainer),
        "extra": dict(extra or {}),
    }


def restore(trainer: PrecisionTrainer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Put ``state`` into a trainer of the same model and kind of optimiser; returns its ``extra``. Collective.

    Everything is checked before anything is changed. The number of processes may differ from when it was written;
    ranks that were not there then keep their own generators, and are told of.
    """
    with boundary("checkpoint", "it is damaged, or of another kind of trainer; load another one"):
        counters = state["counters"]
        names = ("retried", "batches_seen")
        steps, skipped = (count(state[name], f"checkpoint: {name}") for name in ("training_steps", "overflow_steps"))
        retried, seen = (count(counters[name], f"checkpoint: {name}") for name in names)
        scaler = state["scaler_state_dict"] or {}
        if set(scaler) == set(trainer.scaler.state_dict()):
            copy.copy(trainer.scaler).load_state_dict(scaler)
        for saved in state["generators"]:
            torch.Generator().set_state(saved["cpu"])
        extra, _ = dict(state["extra"]), dict(state["precision"] or {})
    restore_learning(trainer, state)
    _set_scaler(trainer, state)
    trainer.steps, trainer.optimizer_step.skipped = steps, skipped
    trainer.retried, trainer.batches_seen = retried, seen
    _set_generators(trainer, state["generators"])
    return extra


def restore_learning(trainer: PrecisionTrainer, state: Mapping[str, Any]) -> None:
    """Put back what was learnt: weights, optimiser, schedule and the count of updates; checked before it is changed.

    Attempts, the scaler and the generators go on: what a fall back needs. Collective.
    """
    model, optimizer = unwrapped(trainer.model), trainer.optimizer
    present = model.state_dict()
    with boundary("checkpoint", "it is damaged, or of another model or optimiser; load another one"):
        _check_model(present, state["model_state_dict"], dict(model.named_parameters()))
        _check_optimizer(optimizer, state["optimizer_state_dict"])
        if trainer.scheduler is not None and state["scheduler_state_dict"] is not None:
            _check_like(trainer.scheduler.state_dict(), state["scheduler_state_dict"], "scheduler")
        updates = count(state["counters"]["updates"], "checkpoint: updates")
    trainer.abandon()  # first: it may put buffers back
    saved = state["model_state_dict"]
    model.load_state_dict(
        {
            name: shard_like(saved[name].to(value.dtype), value) if isinstance(value, Tensor) else saved[name]
            for name, value in present.items()
        }
    )
    optimizer.load_state_dict(_sharded(state["optimizer_state_dict"], optimizer))
    if trainer.scheduler is not None and state["scheduler_state_dict"] is not None:
        trainer.scheduler.load_state_dict(state["scheduler_state_dict"])
    trainer.optimizer_step.updates = updates


def _set_scaler(trainer: PrecisionTrainer, state: Mapping[str, Any]) -> None:
    """Take the saved scale over where the format and the rule are the same; otherwise say that it starts afresh."""
    saved, present = state["scaler_state_dict"], trainer.scaler.state_dict()
    was = (state["precision"] or {}).get("active", "fp16" if state["fp16_active"] else "fp32")
    now = trainer.precision.active.name
    if was != now:
        trainer.say(f"checkpoint: written in {was}, goes on in {now}, with a fresh loss scaler")
    elif saved is not None and set(saved) == set(present):
        trainer.scaler.load_state_dict(saved)
    elif saved is not None or trainer.precision.active.needs_loss_scaling:
        trainer.say("checkpoint: its loss scaling has another rule than asked for here: the scaler starts afresh")


def _generators(trainer: PrecisionTrainer) -> list[dict[str, Any]]:
    """The states of torch's generators, by rank."""
    mine = {"cpu": torch.get_rng_state()}
    if trainer.device.type == "cuda":
        mine["cuda"] = torch.cuda.get_rng_state(trainer.device)
    if trainer.ranks.world == 1:
        return [mine]
    gathered: list[Any] = [None] * trainer.ranks.world
    dist.all_gather_object(gathered, mine)
    return gathered


def _set_generators(trainer: PrecisionTrainer, saved: list[dict[str, Tensor]]) -> None:
    rank, world = trainer.ranks.rank, trainer.ranks.world
    if rank < len(saved):
        torch.set_rng_state(saved[rank]["cpu"])
        if trainer.device.type == "cuda" and "cuda" in saved[rank]:
            torch.cuda.set_rng_state(saved[rank]["cuda"], trainer.device)
    if saved and len(saved) != world:
        trainer.say(
            f"checkpoint: written by {len(saved)} processes, read by {world}: weights, optimiser and scaler are the "
            "same; generators are those of the ranks that were there, and the data is yours to divide again"
        )


def _check_model(present: Mapping[str, Any], saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
    if set(present) != set(saved):
        missing, strange = sorted(set(present) - set(saved)), sorted(set(saved) - set(present))
        raise MantissaError(
            "checkpoint and model do not fit: "
            + "; ".join(
                f"{what} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
                for what, names in (("it lacks", missing), ("the model lacks", strange))
                if names
            )
        )
    for name, value in present.items():
        if isinstance(value, Tensor) and value.shape != saved[name].shape:
            raise MantissaError(
                f"checkpoint and model do not fit: {name} has shape {tuple(saved[name].shape)} there and "
                f"{tuple(value.shape)} here"
            )
        if isinstance(value, Tensor):
            _check_kind(name, saved[name], value)
        if name in parameters:  # a buffer may hold an infinity, as masks do
            require_finite(f"checkpoint: {name}", saved[name])


def _check_kind(name: str, saved: Tensor, present: Tensor) -> None:
    """Floats may be of another width here than there; integers of no other kind at all."""
    if saved.dtype != present.dtype and not (saved.is_floating_point() and present.is_floating_point()):
        raise MantissaError(f"checkpoint: {name} is {plain_name(saved.dtype)}, expected {plain_name(present.dtype)}")


def _check_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    found = [len(group["params"]) for group in saved.get("param_groups", [])]
    if sizes != found:
        raise MantissaError(
            f"checkpoint and optimiser do not fit: its parameter groups have {found} parameters, these have {sizes}"
        )
    for present, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        options = {key: value for key, value in present.items() if key != "params"}
        _check_like(options, {key: value for key, value in group.items() if key != "params"}, "optimiser")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    owners = dict(zip((index for group in saved["param_groups"] for index in group["params"]), parameters, strict=True))
    for index, fields in saved["state"].items():
        known = optimizer.state.get(owners[index], {})
        for name, value in fields.items():
            if not isinstance(value, Tensor):
                continue
            expected = _shape_of(optimizer, owners[index], known.get(name))
            if value.dim() and expected is not None and value.shape != expected:
                raise MantissaError(
                    f"checkpoint and optimiser do not fit: {name} of parameter {index} has shape "
                    f"{tuple(value.shape)}, expected {tuple(expected)}"
                )
            if value.dim():
                _check_kind(f"{name} of parameter {index}", value, known.get(name, owners[index]))
            require_finite(f"checkpoint: {name} of parameter {index}", value)


def _shape_of(optimizer: torch.optim.Optimizer, parameter: Tensor, known: Any) -> torch.Size | None:
    """The shape of an optimiser's tensors for a parameter: torch's own keep them in its shape, but for Adafactor."""
    if isinstance(known, Tensor):
        return known.shape if known.dim() else None
    own = type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, torch.optim.Adafactor)
    return parameter.shape if own else None


def _check_like(present: Any, saved: Any, where: str) -> None:
    """Refuse plain values of another kind than those here, missing ones, and numbers that are not finite."""
    if isinstance(present, dict):
        missing = [key for key in present if key not in saved]
        if missing:
            raise MantissaError(f"checkpoint and {where} do not fit: it has no {missing[0]}")
        for key, value in present.items():
            _check_like(value, saved[key], f"{where}'s {key}")
    elif isinstance(present, (int, float, Tensor)) and not isinstance(present, bool):
        value = float(saved) if isinstance(saved, (int, float, Tensor)) and not isinstance(saved, bool) else math.nan
        if not math.isfinite(value) and not (isinstance(present, float) and value == present):
            raise MantissaError(f"checkpoint and {where} do not fit: {saved!r} there, {present!r} here")
    elif isinstance(present, (list, tuple)):
        for here, there in zip(present, saved, strict=True):
            _check_like(here, there, where)


def _sharded(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimiser's whole state laid out as the parameters are: what has a parameter's shape is sharded as it."""
    parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
    order = [index for group in saved["param_groups"] for index in group["params"]]
    owner = dict(zip(order, parameters, strict=True))
    state = {
        index: {
            field: shard_like(value, owner[index])
            if isinstance(value, Tensor) and value.shape == owner[index].shape and value.dim()
            else value
            for field, value in fields.items()
        }
        for index, fields in saved["state"].items()
    }
    return {"state": state, "param_groups": saved["param_groups"]}
