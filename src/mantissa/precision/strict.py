"""Strict promotion: no operation may mix floating-point dtypes.

Torch promotes silently: ``half * float`` is float, and a forgotten cast doubles memory or hides a rounding. Inside
``StrictPromotion`` such an operation raises, naming the operator and the dtypes. The whole test-suite runs in it.

Python scalars and zero-dimensional tensors do not promote in torch and are allowed, as are operators whose purpose is
to cross dtypes (casts and copies).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_CROSSING = ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_", "aten::to", "aten::_scaled_mm")


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class StrictPromotion(TorchDispatchMode):
    """Context manager in which an operation on tensors of different floating dtypes raises ``TypeError``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name not in _CROSSING:
            dtypes = {t.dtype for t in _tensors((*args, *kwargs.values())) if t.is_floating_point() and t.dim() > 0}
            if len(dtypes) > 1:
                listed = ", ".join(sorted(str(d) for d in dtypes))
                raise TypeError(f"strict promotion: {name} mixes {listed}; cast one of them explicitly")
        return func(*args, **kwargs)
