"""What is benchmarked: a model, its data and its loss, and where they come from."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.errors import MantissaError, nearest

LossFn = Callable[[nn.Module, Any], Tensor]
MakeBatch = Callable[[int, torch.Generator], Any]


def adamw(parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> torch.optim.Optimizer:
    """AdamW in one kernel, so that a small model's step is not the optimiser's launches."""
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


@dataclass(frozen=True)
class Workload:
    """What a factory returns. ``factory()`` may also return the first three as a tuple.

    ``model``: parameters in fp32. ``make_batch(batch_size, generator)``: a batch of fresh samples on the CPU (a tensor,
    or tuples, lists and dicts of them), drawn from ``generator`` only. ``loss_fn(model, batch)``: a scalar, the mean
    over the batch. ``best_loss``: the lowest expected loss that any model can reach, where it is known.
    ``make_optimizer(parameters)``: AdamW at 1e-3 unless given.
    """

    model: nn.Module
    make_batch: MakeBatch
    loss_fn: LossFn
    best_loss: float | None = None
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


@dataclass(frozen=True)
class Source:
    """Where a workload comes from; small, so that another process can be told to build the same.

    ``spec``: ``pkg.module:factory``; where it is None, a member of the built-in family with about ``parameters``.
    """

    spec: str | None = None
    parameters: int = 0

    def __str__(self) -> str:
        return self.spec or f"residual MLP of {short(self.parameters)}"

    def build(self, seed: int, device: torch.device | str) -> Workload:
        """The workload with the weights of ``seed``, its model on ``device``."""
        torch.manual_seed(seed)
        if self.spec is None:
            from mantissa.bench.family import family_workload

            return family_workload(self.parameters, device)
        workload = called(self.spec, factory_named(self.spec))
        workload.model.to(device)
        return workload


def factory_named(spec: str) -> Callable[[], Any]:
    """The factory that ``pkg.module:name`` names; modules of the current folder are found last."""
    module_name, colon, name = spec.partition(":")
    if not (colon and module_name and name):
        raise MantissaError(f"--model {spec}: expected pkg.module:factory, such as mine.bench:small_model")
    here = os.getcwd()
    sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise MantissaError(
                f"--model {spec}: {module_name} itself imports {missing}, which is not installed"
            ) from None
        raise MantissaError(
            f"--model {spec}: no module {missing} in {here} or among the installed packages; start the command in the "
            "folder that holds it, or install it"
        ) from None
    finally:
        sys.path.pop()
    factory = getattr(module, name, None)
    if factory is None:
        raise MantissaError(f"--model {spec}: {module_name} has no {name}{nearest(name, vars(module))}")
    if not callable(factory):
        raise MantissaError(
            f"--model {spec}: {name} is a {type(factory).__name__}; expected a function of no arguments"
        )
    return factory


def called(spec: str, factory: Callable[[], Any]) -> Workload:
    """``factory()`` as a workload, checked: what is wrong with it is said here and not in the middle of a step."""
    made = factory()
    if isinstance(made, tuple) and len(made) == 3:
        made = Workload(*made)
    expected = "expected (model, make_batch, loss_fn) or a mantissa.bench.Workload"
    if not isinstance(made, Workload):
        came = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise MantissaError(f"--model {spec}: it returned {came}; {expected}")
    if not isinstance(made.model, nn.Module):
        raise MantissaError(
            f"--model {spec}: its model is a {type(made.model).__name__}, not a torch module; {expected}"
        )
    for what, function in (("make_batch", made.make_batch), ("loss_fn", made.loss_fn)):
        if not callable(function):
            raise MantissaError(
                f"--model {spec}: its {what} is a {type(function).__name__}, not a function; {expected}"
            )
    if not any(p.requires_grad for p in made.model.parameters()):
        raise MantissaError(f"--model {spec}: its model has no parameter to train")
    return made


def to_device(batch: Any, device: torch.device | str) -> Any:
    """``batch`` with every tensor in it on ``device``."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}


def parse_size(text: str) -> int:
    """A number of parameters: ``10k``, ``1.2M``, ``1B`` or plain digits."""
    digits, unit = (text[:-1], _UNITS[text[-1].lower()]) if text and text[-1].lower() in _UNITS else (text, 1)
    try:
        size = round(float(digits) * unit)
    except (ValueError, OverflowError):
        raise MantissaError(f"size {text!r}: expected a number of parameters such as 10k, 1.2M or 1B") from None
    if not 1000 <= size <= 20 * 10**9:
        raise MantissaError(f"size {text}: expected from 1k to 20B parameters")
    return size


def short(count: float) -> str:
    """A number of parameters in three digits at most: 9.9k, 1.21M, 1B."""
    for letter, unit in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if round(count / (unit / 1e3)) >= 1000 or letter == "k":
            return f"{count / unit:.3g}{letter}"
    raise AssertionError("unreachable")
