"""What a trainer is given, checked when it is given; and a schedule also before each update.

One that fails after the weights have moved leaves a run that is neither here nor there.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from mantissa.base.bounds import LARGEST_SIZE, SMALLEST_FLOAT, check_values, number
from mantissa.base.errors import MantissaError
from mantissa.base.ranks import is_fsdp

# torch's schedules that keep a value for each parameter group that there was when they were made
_BY_GROUP = (
    lr_scheduler.LambdaLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
    lr_scheduler.CyclicLR,
    lr_scheduler.OneCycleLR,
)


def check_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Refuse what ``scheduler.step()`` after each update cannot drive: it takes no arguments, and is of ``optimizer``.

    None, torch's schedules (but ``ReduceLROnPlateau``) and whatever has their methods are taken.
    """
    if scheduler is None:
        return
    if isinstance(scheduler, (list, tuple)):
        raise MantissaError(
            f"scheduler is a {type(scheduler).__name__} of {len(scheduler)}: expected one; "
            "torch.optim.lr_scheduler.SequentialLR puts some after each other, ChainedScheduler multiplies them"
        )
    scheduler = getattr(scheduler, "scheduler", scheduler)  # Accelerate's, around torch's own
    name = type(scheduler).__name__
    if not all(callable(getattr(scheduler, each, None)) for each in ("step", "state_dict", "load_state_dict")):
        raise MantissaError(f"scheduler is a {name}: expected one of torch.optim.lr_scheduler, or None")
    try:
        inspect.signature(scheduler.step).bind()
    except TypeError as error:
        raise MantissaError(
            f"scheduler is a {name}, whose step() wants more than the trainer can give ({error}); leave scheduler out "
            f"and call {name}.step yourself, where its argument is known"
        ) from None
    theirs = getattr(scheduler, "optimizer", None)
    if theirs is not None and theirs.param_groups is not optimizer.param_groups:
        raise MantissaError(
            f"scheduler is a {name} of another optimiser ({type(theirs).__name__}), whose rates this training does not "
            "use; make it from the optimiser that the trainer was given"
        )


def check_goes_on(scheduler: Any, optimizer: Any) -> None:
    """Before an update: refuse a schedule of torch's whose next step would raise, being at its end or of fewer groups.

    One made of several is looked at in all its parts that would be stepped.
    """
    scheduler = getattr(scheduler, "scheduler", scheduler)  # Accelerate's, around torch's own
    if isinstance(scheduler, lr_scheduler.ChainedScheduler):
        for part in scheduler._schedulers:
            check_goes_on(part, optimizer)
    elif isinstance(scheduler, lr_scheduler.SequentialLR):
        passed = sum(milestone <= scheduler.last_epoch + 1 for milestone in scheduler._milestones)
        if scheduler.last_epoch + 1 not in scheduler._milestones:  # there a part begins anew
            check_goes_on(scheduler._schedulers[passed], optimizer)
    elif isinstance(scheduler, _BY_GROUP):
        name, groups, known = type(scheduler).__name__, len(optimizer.param_groups), len(scheduler.base_lrs)
        if groups != known:
            raise MantissaError(
                f"{name} knows the rates of {known} parameter groups, and the optimiser has {groups} now: make it "
                "again after adding groups, and set trainer.scheduler"
            )
        if isinstance(scheduler, lr_scheduler.OneCycleLR) and scheduler.last_epoch >= scheduler.total_steps:
            raise MantissaError(
                f"OneCycleLR is past its end: it was made for {scheduler.total_steps} updates, and this would be one "
                "more; make it for as many as the training takes, or set trainer.scheduler=None to go on at this rate"
            )


def check_optimizer(optimizer: Any) -> None:
    """Refuse what is not one optimiser whose step can be taken, or not, after the backward."""
    if isinstance(optimizer, (list, tuple)):
        raise MantissaError(
            f"the optimiser is a {type(optimizer).__name__} of {len(optimizer)}: expected one, for a loss scale serves "
            "one; put all parameters into its groups, or make a trainer for each"
        )
    if not all(hasattr(optimizer, name) for name in ("param_groups", "step", "zero_grad")):
        raise MantissaError(f"the optimiser is a {type(optimizer).__name__}: expected a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise MantissaError(
            "LBFGS calls the loss several times in one step, which loss scaling cannot follow; use another"
        )


def check_options(model: nn.Module, **given: Any) -> None:
    """Refuse options of ``PrecisionTrainer`` that mean nothing, alone or together."""
    accumulate, probe_every = given["accumulate"], given["probe_every"]
    clip, action = given["adaptive_clip"], given["on_nonfinite"]
    check_values("PrecisionTrainer", given, {
        "max_grad_norm": (number(given["max_grad_norm"], SMALLEST_FLOAT, math.inf),
                          "more than 0 (inf measures and never clips)"),
        "adaptive_clip": (clip is None or number(clip, SMALLEST_FLOAT), "more than 0, or None"),
        "probe_every": (number(probe_every, 0, LARGEST_SIZE, whole=True), "0 (never) or more"),
        "good_every": (number(given["good_every"], 1, LARGEST_SIZE, whole=True), "a whole number above 0"),
        "on_nonfinite": (action in ("stop", "skip"), '"stop" or "skip"'),
    })  # fmt: skip
    check_accumulate(model, accumulate, probe_every)


def check_accumulate(model: nn.Module, accumulate: Any, probe_every: int) -> None:
    """Refuse a count of micro-batches that is none, or that the probe would disturb."""
    whole_number = number(accumulate, 1, LARGEST_SIZE, whole=True)
    known = {"accumulate": (whole_number, "a whole number from 1 on")}
    check_values("PrecisionTrainer", {"accumulate": accumulate}, known)
    if probe_every and accumulate > 1 and is_fsdp(model):
        raise MantissaError(
            f"PrecisionTrainer: probe_every={probe_every} with accumulate={accumulate}: under FSDP2 a probe would "
            "disturb the micro-batches that wait; choose one of the two"
        )


def checked_weight(where: str, weight: Any) -> float:
    """A batch's weight as a number; ``MantissaError`` for what is none, or negative, or not finite."""
    scalar = isinstance(weight, (Tensor, np.generic)) and weight.ndim == 0
    value = weight.item() if scalar else weight
    if not number(value, 0):
        raise MantissaError(f"{where}(weight={value!r}): expected a finite number, 0 or more")
    return float(value)


def check_loss(loss: Any) -> None:
    """Refuse what cannot be learnt from: anything but a floating-point scalar with a gradient."""
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        what = f"shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise MantissaError(f"loss_fn must return the batch's mean loss, a scalar floating-point tensor; got {what}")
    if not loss.requires_grad:
        raise MantissaError("loss_fn returned a loss without a gradient: was the model run under torch.no_grad()?")
