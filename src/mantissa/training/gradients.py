"""What gradients say when something is wrong: which value was the first that is not finite, which operation made a
NaN."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.base.ranks import ALONE, Ranks, local


class Seen(Enum):
    """In what a value that is not finite was seen first; the value is its words."""

    OUTPUT = "the output of "
    OUTPUT_GRADIENT = "the gradient of the output of "
    PARAMETER_GRADIENT = "the gradient of "
    NOWHERE = "nothing: the values were finite when the pass was repeated"


@dataclass(frozen=True)
class Nonfinite:
    """The first value of a pass that is not finite: of which module or parameter, and how many of its values are so."""

    seen: Seen
    name: str = ""
    bad: int = 0
    values: int = 0

    def __str__(self) -> str:
        counted = "" if self.seen is Seen.NOWHERE else f"{self.name} ({self.bad} of {self.values} values)"
        return f"{self.seen.value}{counted}"


def where_nonfinite(model: nn.Module, work: Callable[[], object], ranks: Ranks = ALONE) -> Nonfinite:
    """Run ``work`` (a forward and backward through ``model``) and name the first module with a non-finite value.

    Looks at module outputs in the order of the forward, then at gradients of outputs in the order of the backward,
    then at the parameters' gradients. Costs one synchronisation per module: call it only when something is wrong. Of
    several ranks, what the one found in which it began.
    """
    found: list[Nonfinite] = []
    handles = []

    def check(values: Any, seen: Seen, label: str) -> None:
        for value in values if isinstance(values, (tuple, list)) else (values,):
            if found or not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            finite = local(value.detach()).isfinite()
            if not finite.all():
                found.append(Nonfinite(seen, label, int((~finite).sum()), finite.numel()))

    for name, module in model.named_modules():
        label = name or type(model).__name__

        def on_forward(module: nn.Module, args: Any, output: Any, label: str = label) -> None:
            check(output, Seen.OUTPUT, label)
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda grad: check(grad, Seen.OUTPUT_GRADIENT, label))

        handles.append(module.register_forward_hook(on_forward))
    try:
        work()
    finally:
        for handle in handles:
            handle.remove()
    for name, parameter in model.named_parameters():
        check(parameter.grad, Seen.PARAMETER_GRADIENT, name)
    every = ranks.gather(found[0] if found else Nonfinite(Seen.NOWHERE))
    # the sum over ranks carries it to all parameters: what saw it in an output saw it where it began
    return min(every, key=lambda each: (each.seen is Seen.NOWHERE, each.seen is Seen.PARAMETER_GRADIENT))


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
