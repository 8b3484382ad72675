"""The products of the fast families on a CPU: oneDNN's where it is the faster library, else torch's own.

What torch calls for ``x @ w^T`` packs the weight anew at each call, which for a few rows costs as much as the product:
16 rows of a 576 x 3072 weight run at 40 GFLOP/s on one core of an AMD EPYC (Zen 4, AVX-512) whose peak is 105. oneDNN,
which comes with torch, gives 48 there, and 73 where the weight was packed beforehand; from 512 rows on it gives 100
where the other gives 85. Both compute in fp32. It costs 10 us a call, so small products stay where they are.

A packed weight is an ordinary tensor in a layout of oneDNN's own: its values are the same, and ``to_dense`` gives them
back. Only what does not train is kept so. In bf16, where the processor multiplies it itself, a packed product takes
half of fp32's time from one row on (1 to 512 rows of 576 x 1536, AMD Zen 5): its weight has half the bytes.

Legend: N any leading shape, E features in, F features out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.precision import BlockScaled, cpu, int8_codes

_ONEDNN = torch.backends.mkldnn.is_available()
_SMALL_PRODUCT = 1 << 21  # multiplications below which a call's overhead is more than what oneDNN saves
_SMALL_WEIGHT = 1 << 16
_INT8_FEATURES = (1 << 17) - 1  # of 128 * 128 each: one more could make 2^31


def product(x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias, fp32; ``weight_FE`` may be packed. Not differentiable: for use inside an operation."""
    packed = weight_FE.is_mkldnn
    small = x_NE.numel() * len(weight_FE) < _SMALL_PRODUCT
    if not packed and (small or not _ONEDNN or x_NE.is_cuda or not weight_FE.is_contiguous()):
        return F.linear(x_NE, weight_FE, bias_F)  # oneDNN reads parts of weights by a loop a thousand times slower
    if not x_NE.numel():
        return x_NE.new_zeros(*x_NE.shape[:-1], weight_FE.shape[0])
    return onednn(x_NE, weight_FE, bias_F)


def onednn(x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """The same by oneDNN, whatever the size."""
    out_NF: Tensor = torch.ops.mkldnn._linear_pointwise(x_NE.contiguous(), weight_FE, bias_F, "none", [], "")
    return out_NF


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
