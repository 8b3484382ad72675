"""Simulated kernels: fp16 and bf16 on any device, by values on the grid held in fp32.

What a tensor core does to a product is: operands in the format, exact products, fp32 accumulation, one rounding of the
result. An fp32 product of operands that are on the grid does the same, up to the order of the sum (a product of two
11-bit significands has 22 bits and is exact in fp32). So each operation here computes in fp32 and rounds its result;
and each *gradient* is rounded where native autograd would have made a half tensor, so that a gradient beyond 65504
becomes inf and one below 2^-25 becomes 0. Loss scaling then has real work to do on a laptop.

Rules of the backward pass: a product's gradient operands are rounded before the product; results are rounded; where
autograd has summed gradients (the residual stream, a norm that three projections read), the sum is rounded when it is
next read. A half tensor's is rounded at every addition: for three terms the two may differ in the last bit. SwiGLU,
rotation and attention do not round what they receive: in a decoder it comes from one operation that did. Weights,
embeddings and logits need no rule of their own: ``round_to_format`` is two casts, and autograd casts the gradient too.

Cost: a rounding is two casts, 0.07-0.25 ms per million elements, against 256 fused multiply-adds per element in a
product with 128 features in.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.kernels import products
from mantissa.kernels.attention import CausalAttention, cached_probabilities, rotate_fp32
from mantissa.kernels.scaled import Product, ScaledLinear, weight_values
from mantissa.precision import FP32, BlockScaled, Fp8Policy, NumberFormat, round_to_format, round_to_format_
from mantissa.precision.numerics import token_logprob


class SimulatedKernels:
    """The operations in ``fmt``, on fp32 tensors. See ``Kernels`` for each one's contract.

    ``weights_on_grid``: the weights given are already rounded (a rollout's own copy), so they are not rounded again.
    ``fp8``: which projections have fp8 operands (``scaled.py``); ``fmt`` is then their base.
    """

    def __init__(
        self,
        fmt: NumberFormat,
        logits_format: NumberFormat = FP32,
        weights_on_grid: bool = False,
        fp8: Fp8Policy | None = None,
    ) -> None:
        if fmt is FP32 and type(self) is SimulatedKernels:
            raise ValueError("fp32 needs no simulation: use NativeKernels")
        self.format = fmt
        self.dtype = torch.float32
        self.logits_format = logits_format
        self.weights_on_grid = weights_on_grid
        self.fp8 = fp8

    def weight(self, master: Tensor) -> Tensor:
        return master if self.weights_on_grid else round_to_format(master, self.format)

    def embedding(self, tokens_BT: Tensor, weight_VE: Tensor) -> Tensor:
        rows = F.embedding(tokens_BT, weight_VE)
        return rows if self.weights_on_grid else round_to_format(rows, self.format)

    def copied(self, master: Tensor, layer: str = "") -> Tensor | BlockScaled:
        if self.fp8 is not None and master.dim() == 2 and self.fp8.quantizes(layer):
            return weight_values(master, self.fp8)
        return round_to_format(master.detach(), self.format)

    @property
    def packs(self) -> bool:
        return type(self).product is SimulatedKernels.product  # an exact family has products of its own

    def product(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        """x @ weight^T + bias of operands on their grids, fp32, not rounded; an exact family replaces it."""
        return products.product(x_NE, weight_FE, bias_F)

    def linear(
        self, x_NE: Tensor, weight_FE: Tensor | BlockScaled, bias_F: Tensor | None = None, layer: str = ""
    ) -> Tensor:
        assert isinstance(weight_FE, Tensor)  # a simulated copy holds the codes' values
        bias = None if bias_F is None else self.weight(bias_F)
        if self.fp8 is not None and self.fp8.quantizes(layer):
            on_grid = self.weights_on_grid
            return ScaledLinear.apply(x_NE, weight_FE, bias, self.fp8, self.format, self.product, on_grid)
        return Linear.apply(x_NE, self.weight(weight_FE), bias, self.format, self.format, self.product)

    def logits(self, x_NE: Tensor, weight_VE: Tensor) -> Tensor:
        logits = Linear.apply(x_NE, self.weight(weight_VE), None, self.format, FP32, self.product)
        return round_to_format(logits, self.logits_format)

    def token_logprob(self, logits_NV: Tensor, tokens_N: Tensor, temperature: float = 1.0) -> Tensor:
        return token_logprob(logits_NV, tokens_N, temperature)

    def rms_norm(self, x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        return RMSNorm.apply(x_NE, self.weight(weight_E), eps, self.format)

    def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
        return _SwiGLU.apply(gate_NE, up_NE, self.format)

    def rotate(self, x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        return Rotate.apply(x_BHTD, cos_BTD, sin_BTD, self.format)

    def add(self, x_NE: Tensor, y_NE: Tensor) -> Tensor:
        return _Add.apply(x_NE, y_NE, self.format)

    def causal_attention(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        return CausalAttention.apply(q_BHTD, k_BKTD, v_BKTD, self.format)

    def cached_attention(self, q_BHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, length_B: Tensor) -> Tensor:
        probabilities = round_to_format_(cached_probabilities(q_BHD, k_BKSD, length_B), self.format)
        return round_to_format_(probabilities @ v_BKSD, self.format).reshape(q_BHD.shape)


class Linear(torch.autograd.Function):
    """x @ w^T + b with the result in ``result_fmt``.

    The weight's gradient leaves in fp32 and is rounded by the casts that made the compute copy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        fmt: NumberFormat,
        result_fmt: NumberFormat,
        product: Product,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.fmt = fmt
        return round_to_format_(product(x, weight, bias), result_fmt)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        grad = round_to_format(grads[0], ctx.fmt)
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = round_to_format_(products.product(grad, weight.t()), ctx.fmt) if ctx.needs_input_grad[0] else None
        grad_weight = flat.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        grad_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None


class RMSNorm(torch.autograd.Function):
    """y = w * n, n = round(x * s), s = (mean(x^2) + eps)^-1/2. dx = s * (dn - xs * mean(dn * xs)), dn = round(dy * w).

    dw = sum of round(dy * n) over rows: autograd makes a half tensor of the product before it sums.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, fmt: NumberFormat) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        normed = x * scale
        ctx.save_for_backward(x, weight, scale)
        ctx.fmt = fmt
        return round_to_format_(round_to_format_(normed, fmt).mul_(weight), fmt)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, scale = ctx.saved_tensors
        grad = round_to_format(grads[0], ctx.fmt)
        normed = x * scale
        grad_weight = None
        if ctx.needs_input_grad[1]:
            rounded = round_to_format(normed, ctx.fmt)  # in fp32 the same tensor, which is needed again
            products = round_to_format_(rounded * grad if rounded is normed else rounded.mul_(grad), ctx.fmt)
            grad_weight = products.reshape(-1, x.shape[-1]).sum(0)
        grad_normed = round_to_format_(grad * weight, ctx.fmt)
        projection = (grad_normed * normed).mean(-1, keepdim=True)
        grad_x = grad_normed.sub_(normed.mul_(projection)).mul_(scale)
        return round_to_format_(grad_x, ctx.fmt), grad_weight, None, None


class _SwiGLU(torch.autograd.Function):
    """y = round(silu(g)) * u. du = dy * silu(g); dg = round(dy * u) * sigmoid(g) * (1 + g * (1 - sigmoid(g)))."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, fmt: NumberFormat) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.fmt = fmt
        return round_to_format_(round_to_format_(F.silu(gate), fmt).mul_(up), fmt)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        fmt = ctx.fmt
        grad = grads[0]  # on the grid: the one consumer of y is a product, which rounds what it returns
        grad_up = round_to_format_(round_to_format_(F.silu(gate), fmt).mul_(grad), fmt)
        grad_silu = round_to_format_(grad * up, fmt)
        grad_gate = torch.ops.aten.silu_backward(grad_silu, gate)
        return round_to_format_(grad_gate, fmt), grad_up, None


class Rotate(torch.autograd.Function):
    """A rotation; its backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, fmt: NumberFormat) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.fmt = fmt
        return round_to_format_(rotate_fp32(x, cos, sin), fmt)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return round_to_format_(rotate_fp32(grads[0], cos, -sin), ctx.fmt), None, None, None


class _Add(torch.autograd.Function):
    """x + y; both receive the same gradient, which autograd may have summed from two branches: rounded here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, fmt: NumberFormat) -> Tensor:
        ctx.fmt = fmt
        return round_to_format_(x + y, fmt)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad = round_to_format(grads[0], ctx.fmt)
        return grad, grad, None
