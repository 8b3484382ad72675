"""The products of the fast families on a CPU, by the library that is the faster one for a shape (``precision/cpu.py``).

What torch calls for ``x @ w^T`` packs the weight anew at each call, which for a few rows costs as much as the product:
16 rows of a 576 x 3072 weight run at 40 GFLOP/s on one core of an AMD EPYC (Zen 4, AVX-512) whose peak is 105. oneDNN,
which comes with torch, gives 48 there, and 73 where the weight was packed beforehand. On Zen 5 it takes less than half
of the other's time from 64 rows on, in all three products of a linear map (576 x 1536, one thread).

A packed weight is an ordinary tensor in a layout of oneDNN's own: its values are the same, and ``to_dense`` gives them
back. Only what does not train is kept so. In bf16, where the processor multiplies it itself, a packed product takes
half of fp32's time from one row on (1 to 512 rows of 576 x 1536, AMD Zen 5): its weight has half the bytes.

Legend: N any leading shape, E features in, F features out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.precision import BlockScaled, cpu, int8_codes

_ONEDNN = torch.backends.mkldnn.is_available()
_SMALL_WEIGHT = 1 << 16
_INT8_FEATURES = (1 << 17) - 1  # of 128 * 128 each: one more could make 2^31


class Products:
    """The three products of a linear map, each by the way that was measured to be the fastest for its shape.

    ``operands``: what the fp32 tensors hold, any values or bf16's; what has bf16's dtype has one way. ``table``: what
    was measured (``precision/cpu.py``); None: on this machine. Not differentiable: for use inside an operation.
    """

    def __init__(self, operands: cpu.Operands = "fp32", table: cpu.CpuProducts | None = None) -> None:
        self.operands, self.table = operands, table

    def _way(self, side: cpu.Side, x: Tensor, rows: int, weight: int) -> str:
        if x.is_cuda:
            return cpu.TORCH
        if self.table is None:  # not before there is a product: what runs on a GPU needs none
            self.table = cpu.products()
        return self.table.way(self.operands, side, rows, weight)

    def forward(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None) -> Tensor:
        """x @ weight^T + bias; ``weight_FE`` may be packed."""
        if weight_FE.is_mkldnn:
            return cpu.multiply(cpu.ONEDNN, x_NE, weight_FE, bias_F)
        way = self._way("forward", x_NE, x_NE.numel() // max(1, x_NE.shape[-1]), weight_FE.numel())
        return cpu.multiply(way, x_NE, weight_FE, bias_F)

    def of_input(self, grad_NF: Tensor, weight_FE: Tensor) -> Tensor:
        """The gradient of x: grad @ weight."""
        rows = grad_NF.numel() // max(1, grad_NF.shape[-1])
        return cpu.multiply(self._way("input", grad_NF, rows, weight_FE.numel()), grad_NF, weight_FE.t())

    def of_weight(self, grad_NF: Tensor, x_NE: Tensor) -> Tensor:
        """The gradient of the weight: grad^T @ x, of two matrices."""
        way = self._way("weight", grad_NF, len(grad_NF), grad_NF.shape[1] * x_NE.shape[1])
        return cpu.multiply(way, grad_NF.t(), x_NE.t())

    def heads(self, x: Tensor, rows: int, values: int) -> AbstractContextManager[None]:
        """Within this, batched products take the way of ``rows`` rows by ``values`` values for each head."""
        return cpu.switched(self._way("heads", x, rows, values) == cpu.BF16)


def int8(x_NE: Tensor, weight_FE: BlockScaled, bias_F: Tensor | None = None) -> Tensor:
    """Q(x) Q(W)^T + bias, fp32, both operands int8: ``x_NE`` quantised here by row, the weight by row beforehand.

    The sum of the codes' products is exact, as int32, in whatever order a library adds. It is rounded to fp32 once and
    multiplied by the two scales.
    """
    if x_NE.shape[-1] > _INT8_FEATURES:
        raise MantissaError(f"int8: a product sums {x_NE.shape[-1]:,} features, at most {_INT8_FEATURES:,} fit int32")
    codes_NE, scales_N1 = int8_codes(x_NE.reshape(-1, x_NE.shape[-1]))
    sums_NF = torch._int_mm(codes_NE, weight_FE.codes.t()).float()
    out_NF = sums_NF.mul_(scales_N1).mul_(weight_FE.scales.view(-1))
    return (out_NF if bias_F is None else out_NF.add_(bias_F)).view(*x_NE.shape[:-1], len(weight_FE.codes))


def packable(shape: tuple[int, ...]) -> bool:
    """Whether a weight of this shape gains from oneDNN and its layout."""
    return _ONEDNN and len(shape) == 2 and math.prod(shape) >= _SMALL_WEIGHT


def joinable(weights_FE: Sequence[Tensor]) -> bool:
    """Whether these weights of one input gain from being one product's: each would be ``packed``."""
    return all(_lays_out(weight) for weight in weights_FE)


def packed(weight_FE: Tensor) -> Tensor:
    """``weight_FE`` in the layout that ``product`` reads fastest; itself where that is the one it has."""
    if not _lays_out(weight_FE):
        return weight_FE
    layout: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_FE.contiguous())
    return layout


def _lays_out(weight_FE: Tensor) -> bool:
    own = weight_FE.dtype is torch.bfloat16 and "bf16" in cpu.products().own  # else oneDNN may have no such product
    known = weight_FE.device.type == "cpu" and (weight_FE.dtype is torch.float32 or own)
    return known and packable(tuple(weight_FE.shape))
