"""The first operation that makes a number infinite or NaN, in any torch model and loop.

    with mantissa.first_nonfinite(model) as found:
        model(batch).loss.backward()
    print(found)

It names the module, the operation, the largest number that went in, and, since the operation is then repeated on the
same numbers in float64, how large the result is: so which format would have held it, or that none would. Every
operation inside the context is looked at, at one synchronisation each: use it when something is wrong.

What is wrong: NaN or an infinity that an operation makes from inputs that have none. One that only hands on what it was
given is not it: the sum of scores and a mask has -inf from the mask, which was made so on purpose (``masked_fill``,
``full``, ``where``, a number in the call). Memory that nobody has written yet (``empty``) may hold anything.

Two things wait until it is known whether they do harm: -inf that an operation makes (``log`` of a mask's zeros), and
NaN or an infinity that came in with a parameter, a buffer or the batch (labels that are missing, and left out of the
loss). They count where a number of no dimension (a loss), the last result or a gradient of the model is not finite
either.

In a backward the module is the one whose output's gradient arrived last; what adds the gradients of a residual path is
so counted to one of its two ends. Before the first has arrived it is the loss's own backward.

``where_nonfinite`` and ``anomaly`` repeat a pass instead: at a synchronisation for each module, and by autograd's own
look at what made a NaN.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from mantissa.base.ranks import ALONE, Ranks, local
from mantissa.precision.formats import BF16, FP16, FP32

_ON_PURPOSE = ("aten::masked_fill", "aten::fill", "aten::where")  # and what has the infinity among its numbers
_NOT_ITS_INPUTS = ("aten::full", "aten::ones", "aten::zeros", "aten::new_", "aten::scalar_tensor", "aten::empty",
                   "aten::rand")  # fmt: skip
_HELD_BY = (FP16, BF16, FP32)
_MARK = "mantissa.first_nonfinite"


@dataclass(frozen=True)
class Nonfinite:
    """``module``: dotted name, the model's class at its top. ``phase``: forward or backward. ``operation``: torch's
    name. ``largest_input``: of the finite numbers that went in. ``inherited``: whether it only hands on what was not
    finite in a parameter, a buffer, a batch or a mask. ``needed``: the largest magnitude of the result in float64; None
    where that is not finite either, or could not be had. ``dtype``: of the result. ``count`` of ``total`` values are
    not finite."""

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
        values = f"{self.count} of {self.total} values ({dtype})"
        head = f"{self.operation} in the {self.phase} of {self.module}"
        if self.inherited:
            return (
                f"{head} is where {values} are infinite or NaN first, and made none of them; its input was not finite "
                "already: a parameter, a buffer, the batch or a mask"
            )
        said = f"{head} made {values} infinite or NaN; its largest input is {self.largest_input:.3g}"
        if self.needed is None:
            return f"{said}, and in float64 the result is not finite either: no format holds it"
        holds = [fmt.name for fmt in _HELD_BY if fmt.largest >= self.needed]
        fails = [f"{fmt.name} ({fmt.largest:.5g})" for fmt in _HELD_BY if fmt.largest < self.needed]
        more = f", which {' and '.join(holds)} would hold" if holds else ""
        more += f"{' and' if holds else ', which'} {' and '.join(fails)} would not" if fails else ""
        return f"{said}, and in float64 the result reaches {self.needed:.3g}{more}"


class first_nonfinite:  # noqa: N801 - named as it is used, as contextlib's are
    """A context that finds the first operation whose result is not finite: ``with first_nonfinite(model) as found``.

    Forward, loss and backward belong inside. Afterwards ``str(found)`` is one sentence, and ``found.found`` a
    ``Nonfinite`` or None. Nothing is changed: neither values nor what is raised. Costs one synchronisation for each
    operation. It sees torch's operations, so a compiled model is looked at as what its graph calls; run it eagerly.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.found: Nonfinite | None = None
        self._inside = contextlib.ExitStack()
        self._at: list[str] = []
        self._backward: str | None = None
        self._pass = -1  # the backward that is going on, by autograd's number of it
        self._waiting: Nonfinite | None = None
        self._absorbed = False  # whether what waits was taken by an operation that made finite numbers of it
        self._harm = False  # whether a number of no dimension was not finite since something waits
        self._last = False  # whether the last result is not finite

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
        if self.found is None and self._waiting is not None and (self._harm or self._last or self._reached_gradients()):
            self.found = self._waiting

    def _reached_gradients(self) -> bool:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return any(_kinds([value]) != _NONE for value in _floats(gradients))

    def see(self, kinds: tuple[Kinds, Kinds], scalar: bool, describe: Callable[[bool], Nonfinite]) -> None:
        """One operation, by what of its inputs and of its results is not finite. ``scalar``: a result of no dimension.

        ``describe`` gives the finding, of an operation that only hands on where it is told so.
        """
        given, made = kinds
        self._last = made != _NONE
        self._harm = self._harm or (scalar and self._last and self._waiting is not None)
        infinite = made.up or made.down
        makes = (made.nan and not given.nan) or (infinite and given == _NONE)
        unsettled = self._waiting is not None and not self._absorbed
        if makes and (made.nan or made.up):
            from_it = unsettled and (self._harm or given != _NONE)  # of what waits, which came first
            self.found = self._waiting if from_it else describe(False)
        elif makes or made.nan or made.up:
            if not unsettled:
                self._waiting, self._absorbed, self._harm = describe(not makes), False, scalar
        elif made.down:
            self._absorbed = False
        elif given != _NONE:
            self._absorbed = True

    def _hooks(self, name: str) -> tuple[Any, Any]:
        def before(module: nn.Module, args: Any) -> None:
            self._at.append(name)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._at.pop()
            for value in tree_flatten(output)[0]:
                node: Any = value.grad_fn if isinstance(value, Tensor) else None
                if node is not None and _MARK not in node.metadata:
                    node.metadata[_MARK] = name  # the innermost module's: an outer one may return the same
                    value.register_hook(lambda grad: self._arrived(name))

        return before, after

    def _arrived(self, name: str) -> None:
        self._pass, self._backward = torch._C._current_graph_task_id(), name

    @property
    def place(self) -> tuple[str, str]:
        """Module and phase of what is computed now."""
        if self._at:
            return self._at[-1], "forward"
        backward = torch._C._current_graph_task_id()
        if backward != self._pass:  # the module of the one before is none of this one's
            self._pass, self._backward = backward, None
        if backward != -1:
            return self._backward or "the loss, outside of the model,", "backward"
        return "the loop, outside of the model,", "code"


class _Watch(TorchDispatchMode):
    def __init__(self, owner: first_nonfinite) -> None:
        super().__init__()
        self.owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        place = self.owner.place
        if self.owner.found is not None or name.startswith(_NOT_ITS_INPUTS):
            return func(*args, **kwargs)
        given = (args, kwargs)
        if func._schema.is_mutable:  # what it overwrites is wanted afterwards
            given = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, given)
        result = func(*args, **kwargs)
        with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):  # of a tensor that cannot be looked at
            self._look(func, given, result, place)
        return result

    def _look(self, func: Any, given: Any, result: Any, place: tuple[str, str]) -> None:
        name, (args, kwargs) = func._schema.name, given
        read = args[1:] if name == "aten::copy_" else args  # what it overwrites
        inputs, results = list(_floats((read, kwargs))), list(_floats(result))
        numbers = [x for x in tree_flatten((read, kwargs))[0] if isinstance(x, float)]
        if not results or not inputs:
            return
        before, after = _kinds(inputs, numbers), _kinds(results)
        if name.startswith(_ON_PURPOSE):
            before = Kinds(*(mine or its for mine, its in zip(before, after, strict=True)))

        def describe(inherited: bool) -> Nonfinite:
            value = next(x for x in results if not x.isfinite().all())
            largest = max(float(x.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) for x in inputs)
            needed = None if inherited else _in_float64(func, given, largest)
            bad = int((~value.isfinite()).sum())
            return Nonfinite(*place, name, value.dtype, largest, inherited, needed, bad, value.numel())

        self.owner.see((before, after), any(x.dim() == 0 for x in results), describe)


class Kinds(NamedTuple):
    """Which numbers that are not finite there are: NaN, +inf, -inf."""

    nan: bool
    up: bool
    down: bool


_NONE = Kinds(False, False, False)


def _kinds(values: Iterable[Tensor], numbers: Iterable[float] = ()) -> Kinds:
    nan, up, down = (any(map(is_one, numbers)) for is_one in (math.isnan, math.inf.__eq__, (-math.inf).__eq__))
    for value in values:
        if not bool(value.isfinite().all()):
            nan = nan or bool(value.isnan().any())
            up, down = up or bool((value == math.inf).any()), down or bool((value == -math.inf).any())
    return Kinds(nan, up, down)


def _floats(values: Any) -> Iterator[Tensor]:
    """The floating-point tensors that have numbers; those of 8 bits, which torch compares with nothing, in fp32."""
    for value in tree_flatten(values)[0]:
        if isinstance(value, Tensor) and value.is_floating_point() and value.device.type != "meta":
            part = local(value.detach())
            if part.numel():
                yield part.float() if part.element_size() == 1 else part


def _in_float64(func: Any, given: Any, largest: float) -> float | None:
    """The largest magnitude of the operation's result on the same numbers in float64; None where not finite."""
    name = func._schema.name
    if name in ("aten::_to_copy", "aten::copy_"):
        return largest  # a cast: what it should give is what it was given

    def wide(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x.detach().double() if x.is_sparse else local(x.detach()).double()
        return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x

    args, kwargs = tree_map(wide, given)
    try:
        values = [x.nan_to_num(math.inf, math.inf, math.inf).abs().max() for x in _floats(func(*args, **kwargs))]
    except (RuntimeError, NotImplementedError, TypeError):
        return None  # an operation without a float64 form
    most = max(float(x) for x in values)
    return most if math.isfinite(most) else None


class Seen(Enum):
    """In what a value that is not finite was seen first; the value is its words."""

    OUTPUT = "the output of "
    OUTPUT_GRADIENT = "the gradient of the output of "
    PARAMETER_GRADIENT = "the gradient of "
    NOWHERE = "nothing: the values were finite when the pass was repeated"


@dataclass(frozen=True)
class NonfiniteValue:
    """The first value of a pass that is not finite: of which module or parameter, and how many of its values are so."""

    seen: Seen
    name: str = ""
    bad: int = 0
    values: int = 0

    def __str__(self) -> str:
        counted = "" if self.seen is Seen.NOWHERE else f"{self.name} ({self.bad} of {self.values} values)"
        return f"{self.seen.value}{counted}"


def where_nonfinite(model: nn.Module, work: Callable[[], object], ranks: Ranks = ALONE) -> NonfiniteValue:
    """Run ``work`` (a forward and backward through ``model``) and name the first module with a non-finite value.

    Looks at module outputs in the order of the forward, then at gradients of outputs in the order of the backward,
    then at the parameters' gradients. Costs one synchronisation per module: call it only when something is wrong. Of
    several ranks, what the one found in which it began.
    """
    found: list[NonfiniteValue] = []
    handles = []

    def check(values: Any, seen: Seen, label: str) -> None:
        for value in values if isinstance(values, (tuple, list)) else (values,):
            if found or not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            finite = local(value.detach()).isfinite()
            if not finite.all():
                found.append(NonfiniteValue(seen, label, int((~finite).sum()), finite.numel()))

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
    every = ranks.gather(found[0] if found else NonfiniteValue(Seen.NOWHERE))
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
