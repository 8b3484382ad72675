"""Strict promotion: no operation may mix floating-point dtypes.

Torch promotes silently: ``half * float`` is float, and a forgotten cast doubles memory or hides a rounding. Inside
``StrictPromotion`` such an operation raises, naming the operator and the dtypes. The whole test-suite runs in it.

Allowed are Python scalars and zero-dimensional tensors, which do not change an array's dtype; operators whose purpose
is to cross dtypes (casts, copies, scaled products); and fused attention, whose backward takes half tensors and the fp32
log-sum-exp that its own forward saved (torch itself refuses queries, keys and values of different dtypes). Operators on
lists of tensors (``_foreach_add``, ``_fused_adam``) work entry by entry: each entry's dtypes must agree, the entries
need not agree with each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_CROSSING = (
    "aten::_to_copy", "aten::copy_", "aten::_foreach_copy_", "aten::to", "aten::_scaled_mm",
    "aten::native_batch_norm",  # on CUDA torch gives a half its fp32 weights, and computes in fp32
)  # fmt: skip
_FUSED_ATTENTION = (
    "aten::_scaled_dot_product_", "aten::_flash_attention_", "aten::_efficient_attention_", "flash_attn::",
)  # fmt: skip
_BY_ENTRY = ("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_amp_foreach_")


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _entries(values: tuple[Any, ...]) -> Iterable[tuple[Any, ...]]:
    """Entry i of every list among ``values``, with what is not a list, for each i."""
    longest = max((len(v) for v in values if isinstance(v, (list, tuple))), default=0)
    for i in range(longest):
        yield tuple((v[i] if i < len(v) else None) if isinstance(v, (list, tuple)) else v for v in values)


_NOTHING_TO_MIX: dict[int, bool] = {}  # by an operator's id: torch keeps them for ever, and their hash is a call


def _nothing_to_mix(func: Any) -> bool:
    """Whether it crosses dtypes by purpose, or takes one tensor at most: half of what a run does."""
    schema = func._schema
    if schema.name in _CROSSING or schema.name.startswith(_FUSED_ATTENTION):
        return True
    kinds = [str(argument.type) for argument in schema.arguments if "Tensor" in str(argument.type)]
    return len(kinds) < 2 and not any("List" in kind for kind in kinds)


class StrictPromotion(TorchDispatchMode):
    """Context manager in which an operation on tensors of different floating dtypes raises ``RuntimeError``."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap the method below so that torch.compile passes by it: a third of its time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Every operation of the suite comes by, and this costs several times what it does on a small tensor: what is
        # usual, tensors among the positional arguments, is looked at without a call or a set, and `_op` is not wrapped.
        kwargs = kwargs or {}
        nothing = _NOTHING_TO_MIX.get(id(func))
        if nothing is None:
            nothing = _NOTHING_TO_MIX[id(func)] = _nothing_to_mix(func)
        if nothing:
            return func._op(*args, **kwargs)
        found, usual = None, True
        for value in args:
            if isinstance(value, Tensor):
                dtype = value.dtype
                if dtype is not found and dtype.is_floating_point and value.dim():
                    usual = usual and found is None
                    found = dtype
            elif isinstance(value, (list, tuple)):
                usual = usual and not any(isinstance(each, Tensor) for each in value)
        for value in kwargs.values():
            usual = usual and not isinstance(value, (Tensor, list, tuple))
        if not usual:
            self._look(func._schema.name, (*args, *kwargs.values()))
        return func._op(*args, **kwargs)

    @staticmethod
    def _look(name: str, values: tuple[Any, ...]) -> None:
        for group in _entries(values) if name.startswith(_BY_ENTRY) else (values,):
            dtypes = {t.dtype for t in _tensors(group) if t.is_floating_point() and t.dim() > 0}
            if len(dtypes) > 1:
                listed = ", ".join(sorted(str(d) for d in dtypes))
                # not TypeError: Python would take it for an unsupported operand and lose the message
                raise RuntimeError(f"strict promotion: {name} mixes {listed}; cast one of them explicitly")
