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
embeddings and logits are rounded by ``Rounded``, and so are their gradients.

Cost: a rounding is one pass where it is compiled (``compiled.py``), 0.06 ms per million elements, else two casts, 0.07
to 0.25, against 256 fused multiply-adds per element in a product with 128 features in.

Held in fp32, values on their blocks' grids (``round_in_blocks``, no codes) are multiplied by an ordinary product. On a
tensor core codes are multiplied and each block's sum by two scales: the same sum, in another order of roundings.

Attention, norms, SwiGLU and rotation are compiled, with their gradients, where a CPU has what that takes
(``compiled.py``); what follows here is how they are computed elsewhere, and what the compiled ones are held to.
Causal attention goes in blocks of queries, in fp32 arithmetic, each result rounded where a flash kernel rounds. In
fp32, where rounding is the identity, it is ``native.py``'s on a CPU too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.kernels import compiled
from mantissa.kernels.compiled import (
    Compiles,
    Kind,
    Operation,
    on_grid,
    rounded,
    rounded_,
)
from mantissa.kernels.cpu import CpuProducts, Products, activation_values, weight_values
from mantissa.precision import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    BF16,
    E4M3,
    FP16,
    FP32,
    BlockScaled,
    Fp8Policy,
    NumberFormat,
    round_in_blocks,
    token_logprob,
)

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # of rows N,E, a weight F,E and a bias: N,F


class Rounded(Operation):
    """round(x), and its gradient rounded, as that of two casts is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: NumberFormat) -> Tensor:
        ctx.fmt = fmt
        return rounded(x, fmt)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return rounded(grads[0], ctx.fmt), None


class ScaledLinear(Operation):
    """The three products, on fp32 tensors. ``weight_FE`` is the master, or with ``on_grid`` its codes' values.

    ``product`` computes the forward product of operands on their grids, unrounded. ``bias_F`` is in the base already.

    Legend: N tokens (any leading shape, flattened where a product sums over them), E features in, F features out.

        y       = Q(x) Q(W)^T + b       x: e4m3 in 1 x 128 along E; W: e4m3 in 128 x 128, from the fp32 master
        grad x  = Q(grad) Q(W)          grad: 1 x 128 along F; W: the same codes as forward
        grad W  = Q(grad)^T Q(x)        grad and x quantised anew, 128 x 1 along N, over which this product sums

    A scale can leave a sum only where it is one number along the summed dimension: that is what the direction of a
    block is for. A square block has both directions, so the weight is quantised once. The gradient's format is the
    policy's choice: e4m3, e5m2, or ``high``, where both gradients' products take what the base format holds: grad and
    x as they are, and the weight's fp8 values, which are what the forward pass multiplied.

    A ``Quantized`` policy (``precision/schemes.py``) has other grids in the forward, for both operands or the weight
    alone, and ``high``: gradients pass straight through both roundings, which is quantisation-aware training.

    The weight is quantised from its fp32 master: by way of the half copy 2-3% of the codes would differ. Accumulation
    is fp32, each result is rounded to the base format once, and so are the gradients, the weight's too; the bias is
    the base's alone. The rounding of values to codes passes gradients straight through. A block of a gradient that
    overflowed (fp16's beyond 65504) becomes NaN throughout, so the overflow reaches both results and the loss scaler.
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
        products: Products,
        on_grid: bool,
    ) -> Tensor:
        values_FE = weight_FE if on_grid else weight_values(weight_FE, fp8)
        operand_NE = activation_values(x_NE, fp8)
        ctx.save_for_backward(x_NE, values_FE)
        ctx.fp8, ctx.base, ctx.products = fp8, base, products
        return rounded_(product(operand_NE, values_FE, bias_F), base)

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None, None]:
        x_NE, values_FE = ctx.saved_tensors
        fp8, base = ctx.fp8, ctx.base
        fmt, power_of_two = fp8.backward_format, fp8.power_of_two
        grad_NF = on_grid(grads[0], base)
        flat_NF = grad_NF.reshape(-1, grad_NF.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            operand_NF = grad_NF if fmt is None else round_in_blocks(grad_NF, fmt, ALONG_ROWS, power_of_two)
            grad_x = rounded_(ctx.products.of_input(operand_NF, values_FE), base)
        if ctx.needs_input_grad[1]:
            g_NF, x_NE = flat_NF, x_NE.reshape(-1, x_NE.shape[-1])
            if fmt is not None:
                g_NF = round_in_blocks(g_NF, fmt, ALONG_COLUMNS, power_of_two)
                x_NE = round_in_blocks(x_NE, E4M3, ALONG_COLUMNS, power_of_two)
            grad_weight = rounded_(ctx.products.of_weight(g_NF, x_NE), base)
        if ctx.needs_input_grad[2]:
            grad_bias = flat_NF.sum(0)  # rounded where the bias was
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


class SimulatedKernels(Compiles):
    """The operations in ``fmt``, on fp32 tensors. See ``Kernels`` for each one's contract.

    ``weights_on_grid``: the weights given are already rounded (a rollout's own copy), so they are not rounded again.
    ``fp8``: which projections have fp8 operands (``ScaledLinear``); ``fmt`` is then their base. ``table``: which way a
    CPU multiplies; None: as measured on this machine.
    """

    def __init__(
        self,
        fmt: NumberFormat,
        logits_format: NumberFormat = FP32,
        weights_on_grid: bool = False,
        fp8: Fp8Policy | None = None,
        table: CpuProducts | None = None,
    ) -> None:
        if fmt is FP32 and type(self) is SimulatedKernels:
            raise ValueError("fp32 needs no simulation: use NativeKernels")
        self.format = fmt
        self.dtype = torch.float32
        self.logits_format = logits_format
        self.weights_on_grid = weights_on_grid
        self.fp8 = fp8
        self.products = Products("bf16" if fmt is BF16 else "fp32", table)
        # Codes of at most 8 bits times a power of two are values of bf16 as well.
        scaled_bf16 = fmt is BF16 and fp8 is not None and fp8.power_of_two
        self._scaled_products = Products("bf16" if scaled_bf16 else "fp32", table)
        self._mask = CachedMask()

    def weight(self, master: Tensor) -> Tensor:
        return master if self.weights_on_grid else Rounded.of(master, self.format)

    def embedding(self, tokens_BT: Tensor, weight_VE: Tensor) -> Tensor:
        rows = F.embedding(tokens_BT, weight_VE)
        return rows if self.weights_on_grid else Rounded.of(rows, self.format)

    def copied(self, master: Tensor, layer: str = "") -> Tensor | BlockScaled:
        if self.fp8 is not None and master.dim() == 2 and self.fp8.quantizes(layer):
            return weight_values(master, self.fp8)
        return rounded(master.detach(), self.format)

    def laid(self, copy: Tensor | BlockScaled, layer: str = "") -> Tensor:
        assert isinstance(copy, Tensor)  # values: codes are the fast native family's
        if not self.weights_on_grid:  # a learner's, which rounds what it reads: no copy of its own
            return copy
        return self.products.laid(copy, self.kind_of(layer))

    def kind_of(self, layer: str) -> Kind:
        """What holds the values of that layer's copy: two bytes where they do."""
        if self.fp8 is not None and self.fp8.quantizes(layer):
            return "bf16" if self.fp8.power_of_two else "fp32"  # codes of at most 8 bits times a power of two
        return "bf16" if self.format is BF16 else "fp16" if self.format is FP16 else "fp32"

    def product(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        """x @ weight^T + bias of operands on their grids, fp32, not rounded; an exact family replaces it."""
        return self.products.forward(x_NE, weight_FE, bias_F)

    def product_of(self, layer: str) -> Product:
        """The product of the projection of that name; an emulated family divides some."""
        return self.product

    def linear(
        self, x_NE: Tensor, weight_FE: Tensor | BlockScaled, bias_F: Tensor | None = None, layer: str = ""
    ) -> Tensor:
        assert isinstance(weight_FE, Tensor)  # a simulated copy holds the codes' values
        bias = None if bias_F is None else self.weight(bias_F)
        if self.fp8 is not None and self.fp8.quantizes(layer):
            scaled = self.product_of(layer), self._scaled_products, self.weights_on_grid
            return ScaledLinear.of(x_NE, weight_FE, bias, self.fp8, self.format, *scaled)
        how = self.format, self.format, self.product_of(layer), self.products
        return Linear.of(x_NE, self.weight(weight_FE), bias, *how)

    def logits(self, x_NE: Tensor, weight_VE: Tensor) -> Tensor:
        logits_NV, fmt = self.router(x_NE, weight_VE), self.logits_format
        return logits_NV if fmt is FP32 else Rounded.of(logits_NV, fmt)

    def router(self, x_NE: Tensor, weight_XE: Tensor) -> Tensor:
        return Linear.of(x_NE, self.weight(weight_XE), None, self.format, FP32, self.product, self.products)

    def token_logprob(self, logits_NV: Tensor, tokens_N: Tensor, temperature: float = 1.0) -> Tensor:
        return token_logprob(logits_NV, tokens_N, temperature)

    def rms_norm(self, x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        if self.compiles(x_NE):
            return compiled.Norm.of(x_NE, self.weight(weight_E), eps, self.format)
        return RMSNorm.of(x_NE, self.weight(weight_E), eps, self.format)

    def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
        if self.compiles(gate_NE):
            return compiled.SwiGLU.of(gate_NE, up_NE, self.format)
        return _SwiGLU.of(gate_NE, up_NE, self.format)

    def sigmoid(self, x_NE: Tensor) -> Tensor:
        return _Sigmoid.of(x_NE, self.format, torch.sigmoid)

    def scale(self, x_NE: Tensor, weight_N: Tensor) -> Tensor:
        return _Scale.of(x_NE, weight_N, self.format)

    def rotate(self, x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        if self.compiles(x_BHTD, x_BHTD.shape[3] // 2):
            return compiled.Rotation.of(x_BHTD, cos_BTD, sin_BTD, self.format)
        return Rotate.of(x_BHTD, cos_BTD, sin_BTD, self.format)

    def add(self, x_NE: Tensor, y_NE: Tensor) -> Tensor:
        return _Add.of(x_NE, y_NE, self.format)

    def add_norm(self, x_NE: Tensor, y_NE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if self.compiles(x_NE):
            return compiled.AddedNorm.of(x_NE, y_NE, self.weight(weight_E), eps, self.format)
        total_NE = self.add(x_NE, y_NE)
        return total_NE, self.rms_norm(total_NE, weight_E, eps)

    def causal_attention(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        if self.compiles(q_BHTD, part="attention"):
            return compiled.causal_attention(q_BHTD, k_BKTD, v_BKTD, self.format)
        return CausalAttention.of(q_BHTD, k_BKTD, v_BKTD, self.format, self.products)

    def cached_attention(self, q_BHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, length_B: Tensor) -> Tensor:
        (rows, heads, size), (kv_heads, keys) = q_BHD.shape, k_BKSD.shape[1:3]
        if not torch.is_grad_enabled() and self.compiles(q_BHD, part="attention"):
            return compiled.attention(q_BHD.unsqueeze(2), k_BKSD, v_BKSD, self.format, length_B).squeeze(2)
        mask_N1S = self._mask(length_B, kv_heads, keys)
        with self.products.heads(q_BHD, heads // kv_heads, keys * size):
            q_NGD = q_BHD.reshape(rows * kv_heads, -1, size)
            p_NGS = rounded_(cached_probabilities(q_NGD, k_BKSD.flatten(0, 1), mask_N1S), self.format)
            return rounded_(torch.bmm(p_NGS, v_BKSD.flatten(0, 1)), self.format).view(q_BHD.shape)


class Linear(Operation):
    """x @ w^T + b with the result in ``result_fmt``.

    The weight's gradient leaves in fp32 and is rounded where the compute copy was (``Rounded``).
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
        products: Products,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.fmt, ctx.products = fmt, products
        return rounded_(product(x, weight, bias), result_fmt)

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]:
        x, weight = ctx.saved_tensors
        grad = on_grid(grads[0], ctx.fmt)  # in a decoder it is, but for that of logits
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = rounded_(ctx.products.of_input(grad, weight), ctx.fmt) if ctx.needs_input_grad[0] else None
        grad_weight = ctx.products.of_weight(flat, x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        grad_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None, None


class ProductOf(torch.autograd.Function):
    """x @ w^T + b by ``product``; its gradients by torch's products, with operands in the dtype of ``x``."""

    @staticmethod
    def forward(ctx: Any, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, product: Product) -> Tensor:
        ctx.save_for_backward(x_NE, weight_FE)
        out = product(x_NE.reshape(-1, x_NE.shape[-1]), weight_FE, bias_F)
        return out.view(*x_NE.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_NE, weight_FE = ctx.saved_tensors
        grad_NF = grads[0].to(x_NE.dtype)  # the logits' gradient is fp32
        flat = grad_NF.reshape(-1, grad_NF.shape[-1])
        grad_x = grad_NF @ weight_FE if ctx.needs_input_grad[0] else None
        # None of a frozen head: V by E values that nobody reads.
        grad_weight = flat.t() @ x_NE.reshape(-1, x_NE.shape[-1]) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, flat.sum(0) if ctx.needs_input_grad[2] else None, None


def inverse_rms(x_NE: Tensor, eps: float) -> Tensor:
    """s = (mean(x^2) + eps)^-1/2 of each row, in fp32, in every family: the sum of fp16's squares overflows fp16."""
    return x_NE.float().square().mean(-1, keepdim=True).add_(eps).rsqrt_()


class RMSNorm(Operation):
    """y = w * n, n = round(x * s), s = ``inverse_rms``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, fmt: NumberFormat) -> Tensor:
        scale = inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.fmt = fmt
        return rounded_(rounded_(x * scale, fmt).mul_(weight), fmt)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        fmt = ctx.fmt
        x, weight, scale = ctx.saved_tensors
        grad = rounded(grads[0], fmt)
        return *norm_gradients(ctx, grad, x, weight, scale, lambda x: rounded_(x, fmt)), None, None


def norm_gradients(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, to_grid: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """RMSNorm's, of x and of the weight, in every family: ``to_grid`` rounds a tensor, in place or to a half's dtype.

    dx = s * (dn - xs * mean(dn * xs)), dn = round(dy * w). dw = sum of round(dy * n) over rows: autograd makes a half
    tensor of the product before it sums. ``scale``: s, fp32. ``grad``: dy, rounded.
    """
    normed = x.float() * scale
    grad_weight = None
    if ctx.needs_input_grad[1]:
        n = to_grid(x.float() * scale)  # anew, since ``normed`` is needed as it is
        grad_weight = to_grid(n.mul_(grad)).reshape(-1, x.shape[-1]).sum(0)
    grad_normed = to_grid(grad * weight).float()
    projection = (grad_normed * normed).mean(-1, keepdim=True)
    return to_grid(grad_normed.sub_(normed.mul_(projection)).mul_(scale)), grad_weight


class _SwiGLU(Operation):
    """y = round(silu(g)) * u."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, fmt: NumberFormat) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.fmt = fmt
        return rounded_(rounded_(F.silu(gate), fmt).mul_(up), fmt)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        # dy is on the grid: the one consumer of y is a product, which rounds what it returns
        return *unit_gradients(grads[0], gate, up, lambda x: rounded_(x, ctx.fmt)), None


def unit_gradients(
    grad: Tensor, gate: Tensor, up: Tensor, to_grid: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """SwiGLU's, of gate and up, in every family: ``to_grid`` rounds a new tensor; that of half tensors is the identity.

    du = round(dy * round(silu(g))); dg = round(dy * u) * sigmoid(g) * (1 + g * (1 - sigmoid(g))), rounded.
    """
    grad_up = to_grid(to_grid(F.silu(gate)).mul_(grad))
    return to_grid(torch.ops.aten.silu_backward(to_grid(grad * up), gate)), grad_up


class _Sigmoid(Operation):
    """y = round(sigmoid(x)). dx = round(dy * y * (1 - y))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: NumberFormat, sigmoid: Callable[[Tensor], Tensor]) -> Tensor:
        y = rounded_(sigmoid(x), fmt)
        ctx.save_for_backward(y)
        ctx.fmt = fmt
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        return rounded_(torch.ops.aten.sigmoid_backward(grads[0], y), ctx.fmt), None, None


class _Scale(Operation):
    """y = round(w * x), a weight a row. dx = round(dy * w); dw = sum of dy * x over the row, fp32."""

    @staticmethod
    def forward(ctx: Any, x_NE: Tensor, weight_N: Tensor, fmt: NumberFormat) -> Tensor:
        ctx.save_for_backward(x_NE, weight_N)
        ctx.fmt = fmt
        return rounded_(x_NE * weight_N.unsqueeze(-1), fmt)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x_NE, weight_N = ctx.saved_tensors
        grad = rounded(grads[0], ctx.fmt)
        grad_weight = (grad * x_NE).sum(-1) if ctx.needs_input_grad[1] else None
        return rounded_(grad * weight_N.unsqueeze(-1), ctx.fmt), grad_weight, None


class Rotate(Operation):
    """A rotation; its backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, fmt: NumberFormat) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.fmt = fmt
        return rounded_(rotate_fp32(x, cos, sin), fmt)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return rounded_(rotate_fp32(grads[0], cos, -sin), ctx.fmt), None, None, None


class _Add(Operation):
    """x + y; both receive the same gradient, which autograd may have summed from two branches: rounded here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, fmt: NumberFormat) -> Tensor:
        ctx.fmt = fmt
        return rounded_(x + y, fmt)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad = rounded(grads[0], ctx.fmt)
        return grad, grad, None


_QUERY_BLOCK = 64  # queries at a time: small enough to skip most keys of the future and to stay in the cache


class CausalAttention(Operation):
    """softmax(q k^T / sqrt(D)) v, as a flash kernel rounds it: scores and softmax fp32, P rounded, the output rounded.

    Backward: dV = round(P)^T dO; dS = P * (dO V^T - rowsum(dO * O)); dQ = round(dS) K / sqrt(D);
    dK = round(dS)^T Q / sqrt(D). P is recomputed, block of queries by block, so memory is linear in T.
    Heads that share keys are folded into the query dimension (q as B*K, G*T, D), so that keys are never copied.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, fmt: NumberFormat, products: Products
    ) -> Tensor:
        q, k, v = _fold(q_BHTD, k_BKTD.shape[1]), k_BKTD.flatten(0, 1), v_BKTD.flatten(0, 1)
        out = torch.empty_like(q)
        with _heads(products, q, k):
            for start, stop in _query_blocks(q.shape[2]):
                p = _causal_probabilities(q, k, start, stop)
                product = rounded_(p, fmt).flatten(1, 2) @ v[:, :stop]
                out[:, :, start:stop] = rounded_(product, fmt).view(*p.shape[:3], -1)
        ctx.save_for_backward(q, k, v, out)
        ctx.fmt, ctx.shape, ctx.block, ctx.products = fmt, q_BHTD.shape, None, products
        return out.view(q_BHTD.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        with _heads(ctx.products, *ctx.saved_tensors[:2]):
            return *CausalAttention._gradients(ctx, grads[0]), None, None

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out = ctx.saved_tensors
        fmt, scale = ctx.fmt, q.shape[-1] ** -0.5
        grad_out = grad.reshape(out.shape)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for start, stop in _query_blocks(q.shape[2], ctx.block):
            p = _causal_probabilities(q, k, start, stop)
            d_out = grad_out[:, :, start:stop]
            delta = (d_out * out[:, :, start:stop]).sum(-1, keepdim=True)
            flat = d_out.flatten(1, 2)
            d_scores = (flat @ v[:, :stop].transpose(1, 2)).view(p.shape)
            d_scores = d_scores.sub_(delta).mul_(p)
            p_rounded, ds = rounded_(p, fmt).flatten(1, 2), rounded_(d_scores, fmt).flatten(1, 2)
            grad_v[:, :stop] += p_rounded.transpose(1, 2) @ flat
            grad_k[:, :stop] += ds.transpose(1, 2) @ q[:, :, start:stop].flatten(1, 2)
            grad_q[:, :, start:stop] = (ds @ k[:, :stop]).view(d_out.shape)
        rows, _, length, size = ctx.shape
        kv_shape = (rows, -1, length, size)
        return (
            rounded_(grad_q.mul_(scale), fmt).view(ctx.shape),
            rounded_(grad_k.mul_(scale), fmt).view(kv_shape),
            rounded_(grad_v, fmt).view(kv_shape),
        )


def _heads(products: Products, q: Tensor, k: Tensor) -> AbstractContextManager[None]:
    """How the products of a block of queries (q: B*K, G, T, D) with all keys are taken."""
    return products.heads(q, q.shape[1] * min(q.shape[2], _QUERY_BLOCK), k[0].numel())


def _fold(q_BHTD: Tensor, kv_heads: int) -> Tensor:
    """Query heads by the key head they share: (B*K, H/K, T, D), contiguous."""
    rows, heads, length, size = q_BHTD.shape
    return q_BHTD.reshape(rows * kv_heads, heads // kv_heads, length, size)


def _query_blocks(length: int, block: int | None = None) -> list[tuple[int, int]]:
    block = block or _QUERY_BLOCK
    return [(start, min(start + block, length)) for start in range(0, length, block)]


def _causal_probabilities(q: Tensor, k: Tensor, start: int, stop: int) -> Tensor:
    """Softmax over keys 0..stop of queries start..stop. Shape (B*K, H/K, stop - start, stop), fp32."""
    block = q[:, :, start:stop]
    mask = torch.full((stop - start, stop), float("-inf"), device=q.device).triu_(start + 1).repeat(block.shape[1], 1)
    # Mask and scale enter with the product: on their own they would each be one more pass over the scores.
    scores = torch.baddbmm(mask, block.flatten(1, 2), k[:, :stop].transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    return torch.softmax(scores.view(*block.shape[:3], stop), dim=-1)


def rotate_fp32(x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin, rotate_half(a, b) = (-b, a) on the halves of D. All fp32; shape of ``x``."""
    out, turned = x_BHTD * cos_BTD.unsqueeze(1), x_BHTD * sin_BTD.unsqueeze(1)
    (a, b), (turned_a, turned_b) = out.chunk(2, -1), turned.chunk(2, -1)
    a.sub_(turned_b)  # in place: at a few rows it is the number of calls that costs
    b.add_(turned_a)
    return out


class CachedMask:
    """-inf where a row's cache goes on beyond its length, 0 before: N,1,S with N = rows x key heads, fp32.

    All layers of a decode step ask for the same one, with the same tensor of lengths: it is made once. That tensor must
    not be written to afterwards.
    """

    def __init__(self) -> None:
        self._of: tuple[Tensor, tuple[int, ...]] | None = None
        self._mask_N1S = torch.empty(0)

    def __call__(self, length_B: Tensor, kv_heads: int, keys: int) -> Tensor:
        shape = kv_heads, keys
        if self._of is None or self._of[0] is not length_B or self._of[1] != shape:
            self._of, self._mask_N1S = (length_B, shape), mask_beyond(length_B, kv_heads, keys)
        return self._mask_N1S


def mask_beyond(length_B: Tensor, kv_heads: int, keys: int) -> Tensor:
    """The mask of ``CachedMask``, made anew."""
    beyond_BS = torch.arange(keys, device=length_B.device) >= length_B.unsqueeze(1)
    mask_BS = torch.zeros(beyond_BS.shape, device=length_B.device).masked_fill_(beyond_BS, float("-inf"))
    return mask_BS.repeat_interleave(kv_heads, 0).unsqueeze(1)


def cached_probabilities(q_NGD: Tensor, k_NSD: Tensor, mask_N1S: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D) + mask) in fp32. N: rows x key heads; G: the queries of a key head. Shape N,G,S."""
    scale = q_NGD.shape[-1] ** -0.5
    # Mask and scale enter with the product: at a few rows it is the number of calls that costs.
    return torch.softmax(torch.baddbmm(mask_N1S, q_NGD.float(), k_NSD.float().transpose(1, 2), alpha=scale), dim=-1)
