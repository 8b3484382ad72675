"""What a trainer must remember to go on as if it had never stopped, and putting it back on any number of processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mantissa.errors import MantissaError
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
    restore_learning(trainer, state)
    _set_scaler(trainer, state)
    trainer.steps = state["training_steps"]
    trainer.optimizer_step.skipped = state["overflow_steps"]
    trainer.retried = state["counters"]["retried"]
    trainer.batches_seen = state["counters"]["batches_seen"]
    _set_generators(trainer, state["generators"])
    return dict(state["extra"])


def restore_learning(trainer: PrecisionTrainer, state: Mapping[str, Any]) -> None:
    """Put back what was learnt: weights, optimiser, schedule and the count of updates; checked before it is changed.

    Attempts, the scaler and the generators go on: what a fall back needs. Collective.
    """
    model, optimizer = unwrapped(trainer.model), trainer.optimizer
    present = model.state_dict()
    _check_model(present, state["model_state_dict"])
    _check_optimizer(optimizer, state["optimizer_state_dict"])
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
    trainer.optimizer_step.updates = state["counters"]["updates"]


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


def _check_model(present: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
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


def _check_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    found = [len(group["params"]) for group in saved.get("param_groups", [])]
    if sizes != found:
        raise MantissaError(
            f"checkpoint and optimiser do not fit: its parameter groups have {found} parameters, these have {sizes}"
        )


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
