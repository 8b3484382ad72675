"""Exact kernels on a CPU that multiplies bf16 itself: tensors, weights and cache in two bytes, the fast family's.

The rules are those of ``ExactKernels``, the arithmetic and its roundings those of ``NativeKernels``. A product of bf16
tensors goes in the tiles that the probe found to add alike. Where it found none, the operands are widened, multiplied
in fp32, as the simulated family does, and the result is rounded once: what flows are values of bf16 either way.

Logits, what a router chooses by, and attention have fp32 results, of widened values, by the calls of ``ExactKernels``:
fp32 products, in attention products of bf16 where the plan found such calls to hold.
What is computed row by row begins in fp32, with the very operations that the probe tried there, and is rounded where
the interface says. Each is one function for both policies: what torch computes with a graph or without is its choice.

Legend: N rows, E features in, F features out, V vocabulary, X experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mantissa.kernels.compiled import Laid, Operation, SpansOf, is_laid
from mantissa.kernels.cpu import CpuProducts
from mantissa.kernels.exact.kernels import PART, ExactAttention, Planned, cached, laid, product
from mantissa.kernels.exact.plan import ExactPlan
from mantissa.kernels.native import NativeKernels
from mantissa.kernels.simulated import ProductOf, inverse_rms, norm_gradients
from mantissa.precision import BF16, FP32, BlockScaled, NumberFormat, round_to_format


class ExactBf16Kernels(Planned, NativeKernels):
    """The operations in bf16, on bf16 tensors of a CPU, by the calls that ``plan`` allows. See ``Kernels``.

    ``kv_format``: as of ``ExactKernels``.
    """

    def __init__(
        self,
        plan: ExactPlan,
        logits_format: NumberFormat = FP32,
        kv_format: NumberFormat | None = None,
        table: CpuProducts | None = None,
        copies: bool = False,
    ) -> None:
        super().__init__(BF16, logits_format, None, table, copies)
        self.plan = plan
        self.kv_format = kv_format or BF16

    @property
    def wide_head(self) -> bool:
        return True

    def laid(self, copy: Tensor | BlockScaled, layer: str = "") -> Tensor:
        assert isinstance(copy, Tensor)  # values: codes are the fast native family's
        return laid(copy, self.plan.products if layer == "lm_head" else self.plan.bf16, "bf16")

    def copied(self, master: Tensor, layer: str = "") -> Tensor | BlockScaled:
        choice = self.plan.bf16.get(tuple(master.shape)) if layer else None
        if layer != "lm_head" and choice is not None and not choice.bf16:
            return round_to_format(master.detach(), BF16)  # widened once, here, where the copy stays as it is
        return super().copied(master, layer)

    def linear(
        self, x_NE: Tensor, weight_FE: Tensor | BlockScaled, bias_F: Tensor | None = None, layer: str = ""
    ) -> Tensor:
        assert isinstance(weight_FE, Tensor)  # bf16 alone: no codes
        weight_FE = weight_FE if is_laid(weight_FE) else self.weight(weight_FE)
        bias_F = None if bias_F is None else self.weight(bias_F)
        if not torch.is_grad_enabled():
            return self._rounded(x_NE, weight_FE, bias_F)
        return ProductOf.apply(x_NE, weight_FE, bias_F, self._rounded)

    def _rounded(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        self.plan.check_threads(torch.get_num_threads())
        choice = self.plan.product(weight_FE.shape, bf16=True)
        if choice.bf16:
            return product(x_NE, _dense(weight_FE, torch.bfloat16), choice, bias_F)
        out_NF = product(x_NE.float(), _dense(weight_FE, torch.float32), choice)
        return (out_NF if bias_F is None else out_NF.add_(bias_F.float())).bfloat16()

    def router(self, x_NE: Tensor, weight_XE: Tensor) -> Tensor:
        weight_XE = weight_XE if is_laid(weight_XE) else self.weight(weight_XE)
        return ProductOf.apply(x_NE, weight_XE, None, self._product_to_float)

    def _product_to_float(self, x_NE: Tensor, weight_VE: Tensor, _: Tensor | None) -> Tensor:
        self.plan.check_threads(torch.get_num_threads())
        return product(x_NE.float(), _dense(weight_VE, torch.float32), self.plan.product(weight_VE.shape))

    def rms_norm(self, x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        if self.compiles(x_NE):
            return super().rms_norm(x_NE, weight_E, eps)
        return _RMSNorm.of(x_NE, self.weight(weight_E), eps)

    def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
        return super().swiglu(gate_NE, up_NE) if self.compiles(gate_NE) else _SwiGLU.of(gate_NE, up_NE)

    def sigmoid(self, x_NE: Tensor) -> Tensor:
        return _Sigmoid.apply(x_NE)

    def causal_attention(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        self.plan.check_length(k_BKTD.shape[2])
        wide = (x.float() for x in (q_BHTD, k_BKTD, v_BKTD))
        cache = FP32 if self.kv_format is BF16 else self.kv_format  # as they are
        return ExactAttention.of(*wide, BF16, self.products, cache, self.plan.attention).bfloat16()

    def packed_attention(self, q: Tensor, k: Tensor, v: Tensor, spans: SpansOf) -> Tensor | None:
        return self.packed(q, k, v, spans) if self.kv_format is BF16 else None

    def cached_attention(self, q_BHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, length_B: Tensor) -> Tensor:
        self.plan.check_length(k_BKSD.shape[2])
        if self.plan.attention.way == "in order":
            return cached(q_BHD, k_BKSD, v_BKSD, length_B, BF16, self.plan.attention)
        q, k, v = (x.float() for x in (q_BHD, k_BKSD, v_BKSD))
        return cached(q, k, v, length_B, BF16, self.plan.attention, self._mask).bfloat16()


def _dense(weight_FE: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in ``dtype``, in whatever layout it has; out of oneDNN's where it must be cast (a plan made anew)."""
    if weight_FE.dtype is dtype or isinstance(weight_FE, Laid):
        return weight_FE
    return (weight_FE.to_dense() if weight_FE.is_mkldnn else weight_FE).to(dtype)


def _normed(x_NE: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """round(x * s), and s."""
    x, scale = x_NE.float(), inverse_rms(x_NE, eps)
    return x.mul_(scale).bfloat16(), scale


class _RMSNorm(Operation):
    """As ``simulated.RMSNorm``: y = round(w * n), n and s by ``_normed``."""

    @staticmethod
    def forward(ctx: Any, x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        normed, scale = _normed(x_NE, eps)
        ctx.save_for_backward(x_NE, weight_E, scale)
        return normed * weight_E

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NE, weight_E, scale_N1 = ctx.saved_tensors
        return *norm_gradients(ctx, grads[0], x_NE, weight_E, scale_N1, Tensor.bfloat16), None


class _SwiGLU(Operation):
    """y = round(silu(g)) * u, silu(g) = g / (1 + exp(-g)) in fp32: ``ExactKernels`` says why not torch's own."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        silu = _silu(gate)
        ctx.save_for_backward(gate, up, silu)
        return silu * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, silu = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0] * up, gate), grads[0] * silu


def _silu(gate: Tensor) -> Tensor:
    out = torch.empty(gate.shape, dtype=torch.bfloat16, device=gate.device)
    # Part by part, so that the next operation finds in the cache what the last one wrote.
    for gate_N, out_N in zip(gate.reshape(-1).split(PART), out.view(-1).split(PART), strict=True):
        wide = gate_N.float()
        out_N.copy_(torch.div(wide, torch.neg(wide).exp_().add_(1.0), out=wide))
    return out


class _Sigmoid(torch.autograd.Function):
    """y = round(1 / (1 + exp(-x)))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.float().neg_().exp_().add_(1.0).reciprocal_().bfloat16()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.ops.aten.sigmoid_backward(grads[0], ctx.saved_tensors[0])
