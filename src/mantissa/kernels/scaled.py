"""The fp8 linear map, simulated: three products whose operands are 8-bit codes with a scale a block.

Legend: N tokens (any leading shape, flattened where a product sums over them), E features in, F features out.

    y       = Q(x) Q(W)^T + b       x: e4m3 in 1 x 128 along E; W: e4m3 in 128 x 128, from the fp32 master
    grad x  = Q(grad) Q(W)          grad: 1 x 128 along F; W: the same codes as forward
    grad W  = Q(grad)^T Q(x)        grad and x quantised anew, 128 x 1 along N, over which this product sums

A scale can leave a sum only where it is one number along the summed dimension: that is what the direction of a block is
for. A square block has both directions, so the weight is quantised once. The gradient's format is the policy's choice:
e4m3, e5m2, or ``high``, where both gradients' products take what the base format holds: grad and x as they are, and the
weight's fp8 values, which are what the forward pass multiplied.

The weight is quantised from its fp32 master: by way of the half copy 2-3% of the codes would differ. Accumulation is
fp32, each result is rounded to the base format once, and so are the gradients, the weight's too; the bias is the base's
alone. The rounding of values to codes passes gradients straight through. A block of a gradient that overflowed (fp16's
beyond 65504) becomes NaN throughout, so the overflow reaches both results and the loss scaler.

Held in fp32, values on their blocks' grids (``round_in_blocks``, no codes) are multiplied by an ordinary product. On a
tensor core codes are multiplied and each block's sum by two scales: the same sum, in another order of roundings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mantissa.precision import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    SQUARE,
    Fp8Policy,
    NumberFormat,
    round_in_blocks,
    round_to_format,
    round_to_format_,
)

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def weight_values(master_FE: Tensor, fp8: Fp8Policy) -> Tensor:
    """The fp32 values of a weight's codes: what the simulated products multiply, in learner and rollout alike."""
    return round_in_blocks(master_FE, fp8.forward_format, SQUARE, fp8.power_of_two)


class ScaledLinear(torch.autograd.Function):
    """The three products, on fp32 tensors. ``weight_FE`` is the master, or with ``on_grid`` its codes' values.

    ``product`` computes the forward product of operands on their grids, unrounded. ``bias_F`` is in the base already.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NE: Tensor,
        weight_FE: Tensor,
        bias_F: Tensor | None,
        fp8: Fp8Policy,
        base: NumberFormat,
        product: Product,
        on_grid: bool,
    ) -> Tensor:
        values_FE = weight_FE if on_grid else weight_values(weight_FE, fp8)
        operand_NE = round_in_blocks(x_NE, fp8.forward_format, ALONG_ROWS, fp8.power_of_two)
        ctx.save_for_backward(x_NE, values_FE)
        ctx.fp8, ctx.base = fp8, base
        return round_to_format_(product(operand_NE, values_FE, bias_F), base)

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]:
        x_NE, values_FE = ctx.saved_tensors
        fp8, base = ctx.fp8, ctx.base
        fmt, power_of_two = fp8.backward_format, fp8.power_of_two
        grad_NF = round_to_format(grads[0], base)
        flat_NF = grad_NF.reshape(-1, grad_NF.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            operand_NF = grad_NF if fmt is None else round_in_blocks(grad_NF, fmt, ALONG_ROWS, power_of_two)
            grad_x = round_to_format_(operand_NF @ values_FE, base)
        if ctx.needs_input_grad[1]:
            g_NF, x_NE = flat_NF, x_NE.reshape(-1, x_NE.shape[-1])
            if fmt is not None:
                g_NF = round_in_blocks(g_NF, fmt, ALONG_COLUMNS, power_of_two)
                x_NE = round_in_blocks(x_NE, fp8.forward_format, ALONG_COLUMNS, power_of_two)
            grad_weight = round_to_format_(g_NF.t() @ x_NE, base)
        if ctx.needs_input_grad[2]:
            grad_bias = flat_NF.sum(0)  # rounded where the bias was
        return grad_x, grad_weight, grad_bias, None, None, None, None
