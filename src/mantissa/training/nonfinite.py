"""The first operation that makes a number infinite or NaN, in any torch model and loop.

    with mantissa.first_nonfinite(model) as found:
        model(batch).loss.backward()
    print(found)

It names the module, the operation, the largest number that went in, and, since the operation is then repeated on the
same numbers in float64, how large the result is: so which format would have held it, or that none would. Every
operation inside the context is looked at, at one synchronisation each: use it when something is wrong.

What is wrong: NaN, +inf, or -inf from inputs without one. A mask is made of -inf on purpose (``masked_fill``, ``full``,
``where``), and the sum of scores and a mask has -inf from its input: neither counts. Memory that nobody has written yet
(``empty``) may hold anything.

In a backward the module is the one whose output's gradient arrived last; what adds the gradients of a residual path is
so counted to one of its two ends.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from mantissa.precision.formats import BF16, FP16, FP32
from mantissa.training.distributed import local

_ON_PURPOSE = ("aten::masked_fill", "aten::full", "aten::fill", "aten::where", "aten::scalar_tensor", "aten::empty",
               "aten::new_empty", "aten::triu", "aten::tril")  # fmt: skip
_HELD_BY = (FP16, BF16, FP32)
_MARK = "mantissa.first_nonfinite"


@dataclass(frozen=True)
class Nonfinite:
    """``module``: dotted name, the model's class at its top. ``phase``: forward or backward. ``operation``: torch's
    name. ``largest_input``: of the finite numbers that went in. ``inherited``: whether something not finite went in
    already, a parameter or a batch. ``needed``: the largest magnitude of the result in float64; None where that is
    not finite either, or could not be had. ``dtype``: of the result. ``count`` of ``total`` values are not finite."""

    module: str
    phase: str
    operation: str
    dtype: torch.dtype
    largest_input: float
    inherited: bool
    needed: float | None
    count: int
    total: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        head = f"{self.operation} in the {self.phase} of {self.module} made {self.count} of {self.total} values "
        head += f"({dtype}) infinite or NaN"
        if self.inherited:
            return f"{head}; its input was not finite already: a parameter, a buffer or the batch"
        said = f"{head}; its largest input is {self.largest_input:.3g}"
        if self.needed is None:
            return f"{said}, and in float64 the result is not finite either: no format holds it"
        holds = [fmt.name for fmt in _HELD_BY if fmt.largest >= self.needed]
        fails = [f"{fmt.name} ({fmt.largest:.5g})" for fmt in _HELD_BY if fmt.largest < self.needed]
        more = f", which {' and '.join(holds)} would hold" if holds else ""
        more += f"{' and' if holds else ', which'} {' and '.join(fails)} would not" if fails else ""
        return f"{said}, and in float64 the result reaches {self.needed:.3g}{more}"


class FirstNonfinite:
    """``first_nonfinite``'s context. ``found``: None as long as everything was finite."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.found: Nonfinite | None = None
        self._inside = contextlib.ExitStack()
        self._at: list[str] = []
        self._backward: str | None = None

    def __str__(self) -> str:
        return "every result was finite" if self.found is None else str(self.found)

    def __enter__(self) -> Self:
        top = type(self.model).__name__
        for name, module in self.model.named_modules():
            before, after = self._hooks(name or top)
            self._inside.callback(module.register_forward_pre_hook(before).remove)
            self._inside.callback(module.register_forward_hook(after, always_call=True).remove)
        self._inside.enter_context(_Watch(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.close()

    def _hooks(self, name: str) -> tuple[Any, Any]:
        def before(module: nn.Module, args: Any) -> None:
            self._at.append(name)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._at.pop()
            for value in tree_flatten(output)[0]:
                node: Any = value.grad_fn if isinstance(value, Tensor) else None
                if node is not None and _MARK not in node.metadata:
                    node.metadata[_MARK] = name  # the innermost module's: an outer one may return the same
                    value.register_hook(lambda grad: setattr(self, "_backward", name))

        return before, after

    @property
    def place(self) -> tuple[str, str]:
        """Module and phase of what is computed now."""
        if self._at:
            return self._at[-1], "forward"
        if self._backward is not None:
            return self._backward, "backward"
        return "the loop, outside of the model,", "code"


class _Watch(TorchDispatchMode):
    def __init__(self, owner: FirstNonfinite) -> None:
        super().__init__()
        self.owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.owner.found is not None or func._schema.name.startswith(_ON_PURPOSE):
            return func(*args, **kwargs)
        given = (args, kwargs)
        if func._schema.is_mutable:  # what it overwrites is wanted afterwards
            given = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, given)
        result = func(*args, **kwargs)
        inputs = list(_floats(given))
        masked = any(bool((x == -math.inf).any()) for x in inputs)
        for value in _floats(result) if inputs else ():
            bad = value.isnan() | (value == math.inf)
            if not masked:
                bad = bad | (value == -math.inf)
            if bool(bad.any()):
                self.owner.found = _described(func, given, inputs, value, bad, self.owner.place)
                break
        return result


def _floats(values: Any) -> Iterator[Tensor]:
    for value in tree_flatten(values)[0]:
        if isinstance(value, Tensor) and value.is_floating_point() and value.device.type != "meta" and value.numel():
            yield local(value.detach())


def _described(
    func: Any, given: Any, inputs: list[Tensor], value: Tensor, bad: Tensor, place: tuple[str, str]
) -> Nonfinite:
    inherited = any(bool((x.isnan() | (x == math.inf)).any()) for x in inputs)
    largest = max(float(x.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) for x in inputs)
    needed = None if inherited else _in_float64(func, given, largest)
    module, phase = place
    return Nonfinite(
        module, phase, func._schema.name, value.dtype, largest, inherited, needed, int(bad.sum()), value.numel()
    )


def _in_float64(func: Any, given: Any, largest: float) -> float | None:
    """The largest magnitude of the operation's result on the same numbers in float64; None where not finite."""
    name = func._schema.name
    if name in ("aten::_to_copy", "aten::copy_"):
        return largest  # a cast: what it should give is what it was given

    def wide(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point():
            return local(x.detach()).double()
        return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x

    args, kwargs = tree_map(wide, given)
    try:
        values = [x.nan_to_num(math.inf, math.inf, math.inf).abs().max() for x in _floats(func(*args, **kwargs))]
    except (RuntimeError, NotImplementedError, TypeError):
        return None  # an operation without a float64 form
    most = max(float(x) for x in values)
    return most if math.isfinite(most) else None


def first_nonfinite(model: nn.Module) -> FirstNonfinite:
    """A context that finds the first operation whose result is not finite: ``with first_nonfinite(model) as found``.

    Forward, loss and backward belong inside. Afterwards ``str(found)`` is one sentence, and ``found.found`` a
    ``Nonfinite`` or None. Nothing is changed: neither values nor what is raised. Costs one synchronisation for each
    operation. It sees torch's operations, so a compiled model is looked at as what its graph calls; run it eagerly.
    """
    return FirstNonfinite(model)
