"""Where another engine rounds, put into transformers' own code: hooks and replaced functions, during one forward.

Transformers rounds to the half format after each product with a rotary table, after the activation and after a norm's
scale. Fused kernels and engines keep these in fp32 and round once, or keep a norm wholly in the half. Each is one
habit: a switch and its value, none of which ``Emulation`` has for our own decoder.

Source: the modelling code of transformers 5.23; which kernel keeps what, by NeMo-RL #1801 and Megatron's fusions.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mantissa.adopted.altered import Altered, How

Habit = tuple[str, str | int]
ROPE: Habit = ("rope", "fp32")
ACTIVATION: Habit = ("activation", "product")
NORM: Habit = ("norm", "fp32")
HALF_NORM: Habit = ("norm", "half")
ROUTER: Habit = ("router", "fp32")
HEAD: Habit = ("head", "fp32")
ALL = (ROPE, ACTIVATION, NORM, HALF_NORM, ROUTER, HEAD)
LESS_ROUNDING = frozenset({ROPE, ACTIVATION, NORM, ROUTER, HEAD})
_ROTATE = "apply_rotary"  # how such functions' names begin
_ROUTERS = ("gate", "router")
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")


@contextmanager
def habits(model: nn.Module, wanted: frozenset[Habit], altered: Altered) -> Iterator[None]:
    """Within this, ``model`` rounds as ``wanted`` says; ``altered`` is what computes its products, in a half format."""
    handles: list[RemovableHandle] = []
    half = altered.format.dtype
    for module in model.modules():
        if ROPE in wanted and _is_table(module):
            handles.append(module.register_forward_pre_hook(_widened, with_kwargs=True))
        if ACTIVATION in wanted and type(module).__module__ in _ACTIVATIONS:
            handles.append(module.register_forward_pre_hook(_widened, with_kwargs=True))
        if _is_norm(module) and NORM in wanted:
            handles.append(module.register_forward_pre_hook(_widened, with_kwargs=True))
            handles.append(module.register_forward_hook(lambda _, args, out: _cast(out, half)))
        if _is_norm(module) and HALF_NORM in wanted:
            handles += _within(module, altered, "narrow")
    for name, module in model.named_modules() if ROUTER in wanted else ():
        if name.rpartition(".")[2] in _ROUTERS:
            handles += _within(module, altered, "wide")
    if HEAD in wanted and (head := model.get_output_embeddings()) is not None:  # type: ignore[operator]
        handles += _within(head, altered, "wide")
    with rotated(model) if ROPE in wanted else contextlib.nullcontext():
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _is_table(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of a value, tuple or list in another dtype."""
    if isinstance(x, Tensor):
        return x.to(dtype) if x.is_floating_point() else x
    return type(x)([_cast(each, dtype) for each in x]) if type(x) in (tuple, list) else x


def _widened(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _cast(args, torch.float32), {name: _cast(x, torch.float32) for name, x in kwargs.items()}


def _within(module: nn.Module, altered: Altered, how: How) -> list[RemovableHandle]:
    """While the module runs, ``altered`` computes so."""

    def enter(*_: Any) -> None:
        altered.how.append(how)

    def leave(*_: Any) -> None:
        altered.how.pop()

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


@contextmanager
def rotated(model: nn.Module) -> Iterator[None]:
    """The functions by which the model's code rotates queries and keys, in fp32 and rounded once."""
    homes = {type(module).__module__ for module in model.modules()}
    found = [
        (sys.modules[home], name)
        for home in sorted(homes & sys.modules.keys())
        for name in vars(sys.modules[home])
        if name.startswith(_ROTATE)
    ]
    before = [(home, name, getattr(home, name)) for home, name in found]
    for home, name, function in before:
        setattr(home, name, _once(function))
    try:
        yield
    finally:
        for home, name, function in before:
            setattr(home, name, function)


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    def in_fp32(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        wide = {name: _cast(x, torch.float32) for name, x in kwargs.items()}
        return _cast(function(first.float(), *_cast(args, torch.float32), **wide), first.dtype)

    return in_fp32
