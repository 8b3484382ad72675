"""The linear layer with fp8 operands on a GPU: three products, and in which format each operand is.

- y = x W^T: x in e4m3, a scale for each 1 x 128; W in e4m3, a scale for each 128 x 128, quantised from the fp32 master.
- dx = dy W: dy in the backward format, 1 x 128; the same codes of W (no second rounding of them).
- dW = dy^T x: both quantised again along the tokens, which is what this product sums over.

With ``backward: high`` the last two are ordinary products in the base format, of dy as it is, the values of W's codes,
and x as it was before it was quantised. Each result is rounded to the base format once, dW too (fp16's overflow must
reach the loss scaler), which is then held in the master's fp32.

The fast and the exact family share this forward product. It is row-invariant as it stands: a scale belongs to one row,
and the product's tiles do not depend on the number of rows.

Interpreted on a CPU and compiled for sm_90; not yet run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mantissa.kernels.triton.products import quantize, scaled_matmul
from mantissa.precision import E4M3, SQUARE, BlockScaled, Fp8Policy, NumberFormat, dequantize
from mantissa.precision.policy import BLOCK


def quantized_weight(master_FE: Tensor, fp8: Fp8Policy) -> BlockScaled:
    """Codes and scales of an fp32 master, in blocks of 128 by 128."""
    return quantize(master_FE.detach(), E4M3, BLOCK, fp8.power_of_two)


class Fp8Linear(torch.autograd.Function):
    """x @ weight^T + bias in block-scaled fp8, rounded to the dtype of ``x``.

    ``weight``: an fp32 master, or codes with their ``scales`` (then it has no gradient).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, fp8: Fp8Policy
    ) -> Tensor:
        codes = quantized_weight(weight, fp8) if scales is None else BlockScaled(weight, scales)
        flat = x.reshape(-1, x.shape[-1])
        out = scaled_matmul(quantize(flat, E4M3, 1, fp8.power_of_two), codes, bias, x.dtype)
        ctx.save_for_backward(x, codes.codes, codes.scales)
        ctx.fp8 = fp8
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, Tensor | None, None]:
        x, *weight = ctx.saved_tensors
        flat, grad = x.reshape(-1, x.shape[-1]), grads[0].reshape(-1, grads[0].shape[-1])
        fmt = ctx.fp8.backward_format
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _grad_x(grad, BlockScaled(*weight), fmt, ctx.fp8.power_of_two).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = _grad_weight(grad, flat, fmt, ctx.fp8.power_of_two)
        grad_bias = grad.sum(0) if ctx.needs_input_grad[3] else None
        return grad_x, grad_weight, None, grad_bias, None


def _grad_x(grad_NF: Tensor, weight_FE: BlockScaled, fmt: NumberFormat | None, power_of_two: bool) -> Tensor:
    if fmt is None:
        return grad_NF @ dequantize(weight_FE, SQUARE, grad_NF.dtype)
    transposed = BlockScaled(weight_FE.codes.t().contiguous(), weight_FE.scales.t().contiguous())
    return scaled_matmul(quantize(grad_NF, fmt, 1, power_of_two), transposed, None, grad_NF.dtype)


def _grad_weight(grad_NF: Tensor, x_NE: Tensor, fmt: NumberFormat | None, power_of_two: bool) -> Tensor:
    if fmt is None:
        return (grad_NF.t() @ x_NE).float()  # the master's dtype, from here on
    grad, x = (quantize(_by_tokens(a), f, 1, power_of_two) for a, f in ((grad_NF, fmt), (x_NE, E4M3)))
    return scaled_matmul(grad, x, None, x_NE.dtype, weight_rows=1).float()


def _by_tokens(x_NE: Tensor) -> Tensor:
    """Transposed, with zeros up to a multiple of 128 tokens, which change no sum: rows then stay aligned. E by N."""
    tokens, features = x_NE.shape
    padded = x_NE.new_zeros(features, -(-tokens // BLOCK) * BLOCK)
    padded[:, :tokens] = x_NE.t()
    return padded
