"""Transformers' own code with its products computed otherwise: as fp8 or another engine would, and nothing else.

Not adopted, and not exact: torch's own functions compute all but the products with weights. What is altered there is
what a diagnosis asks for: operands on fp8's grids (``ScaledLinear``, from fp32 masters), or sums in parts.

Legend: N rows of any leading shape, E features in, F features out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.adopted.route import ROUTES, Routed, base_of, check_layers
from mantissa.precision import FP32, Fp8Policy, NumberFormat

_WIDENING = (Tensor.to, Tensor.float, Tensor.type)
How = Literal["wide", "narrow"]
_PRODUCTS = ("linear", "matmul", "mm", "bmm", "__matmul__", "addmm")


class Altered(Routed):
    """The products of ``model``, whose parameters are fp32 masters, in ``fmt``; a context around a forward.

    ``fp8``: whose operands are quantised. ``parts``: of a sum over the features, added in fp32. ``quantized``: names of
    the parameters that were seen in a quantised product. ``how``: within what is ``wide`` products are not rounded,
    within what is ``narrow`` nothing is widened to fp32 (``doctor/habits.py``); the last one holds.
    """

    def __init__(self, model: nn.Module, fmt: NumberFormat, fp8: Fp8Policy | None = None, parts: int = 1) -> None:
        super().__init__(fmt, fmt is not FP32, fp8=fp8)
        self.routes: dict[Any, Callable[..., Any]] = {f: r for f, r in ROUTES.items() if f.__name__ in _PRODUCTS}
        self.plans, self.parts = {}, parts
        self.names = {id(p): name.removesuffix(".weight") for name, p in model.named_parameters()}
        self.quantized: set[str] = set()
        self.how: list[How] = []
        if fp8 is not None:
            check_layers(fp8, model)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if self.how[-1:] == ["narrow"] and func in _WIDENING and not isinstance(args[0], nn.Parameter):
            wide = func is Tensor.float or torch.float32 in (*args[1:], *(kwargs or {}).values())
            if wide:
                return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    def linear(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None, wide: bool = False) -> Tensor:
        if self.how[-1:] == ["wide"]:
            return self._wide(x_NE, weight_FE, bias_F)
        if x_NE.dtype is torch.float32 and weight_FE.dtype is self.format.dtype:
            x_NE = x_NE.to(weight_FE.dtype)  # what a habit kept in fp32 is rounded where it is an operand
        if self.parts == 1 or not x_NE.is_floating_point() or x_NE.dtype is not weight_FE.dtype:
            return F.linear(x_NE, weight_FE, bias_F)
        return self._wide(x_NE, weight_FE, bias_F).to(x_NE.dtype)

    def _quantized(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        self.quantized.add(self.names[id(base_of(weight_FE))])
        return super()._quantized(x_NE, weight_FE, bias_F)

    def _wide(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        """x @ weight^T + bias, fp32, not rounded."""
        parts = zip(*(t.float().tensor_split(self.parts, -1) for t in (x_NE, weight_FE)), strict=True)
        sums = [F.linear(x, weight) for x, weight in parts if x.shape[-1]]  # fewer features than parts
        out_NF = sum(sums[1:], sums[0])
        return out_NF if bias_F is None else out_NF + bias_F.float()
