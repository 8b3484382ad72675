"""What is compiled for a decoder beside its products, with gradients: norms, SwiGLU, rotation, attention.

By torch's operations more than half of a small model's training step (512 completions, hidden 128, fp32, one core)
was passes over memory, and not products. Here an operation reads its operands once and writes its result, and its
backward likewise. The arithmetic, its formulas and its roundings are the families' (``simulated.py``): of fp32
tensors with values of a format, or bf16 tensors. Sums are fp32, in one order, whatever the number of threads.

Each ``of`` computes without gradients what it computes with them. Gradients of gradients there are none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mantissa.kernels import compiled
from mantissa.kernels.compiled import Spans
from mantissa.precision import NumberFormat


class _Nowhere:
    """What a forward without gradients keeps for its backward goes here: nothing stays."""

    def save_for_backward(self, *_: Tensor | None) -> None:
        pass

    def set_materialize_grads(self, _: bool) -> None:
        pass

    def __setattr__(self, name: str, value: object) -> None:
        pass


_NOWHERE = _Nowhere()


class Operation(torch.autograd.Function):
    """A function of autograd that costs less where nothing is differentiated."""

    @classmethod
    def of(cls, *given: Any) -> Any:
        """``apply``; without gradients the forward by itself, for to enter autograd takes as long as a small one."""
        return cls.apply(*given) if torch.is_grad_enabled() else cls.forward(_NOWHERE, *given)


class Norm(Operation):
    """y = w * n, n = round(x * s), of each row: ``simulated.RMSNorm``."""

    @staticmethod
    def forward(ctx: Any, x_NE: Tensor, weight_E: Tensor, eps: float, fmt: NumberFormat) -> Tensor:
        ctx.save_for_backward(x_NE, weight_E)
        ctx.eps, ctx.fmt = eps, fmt
        return compiled.norm(x_NE, weight_E, eps, fmt)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_NE, weight_E = ctx.saved_tensors
        return *compiled.norm_gradients(x_NE, weight_E, grads[0], ctx.eps, ctx.fmt), None, None


class AddedNorm(Operation):
    """t = round(x + y), and its norm. The gradient of x and of y is one: round(dt + that of the norm)."""

    @staticmethod
    def forward(
        ctx: Any, x_NE: Tensor, y_NE: Tensor, weight_E: Tensor, eps: float, fmt: NumberFormat
    ) -> tuple[Tensor, Tensor]:
        total_NE, out_NE = compiled.norm(x_NE, weight_E, eps, fmt, y_NE)
        ctx.save_for_backward(total_NE, weight_E)
        ctx.eps, ctx.fmt = eps, fmt
        ctx.set_materialize_grads(False)
        return total_NE, out_NE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        total, normed = grads
        if normed is None:  # nobody read the norm
            total = None if total is None else compiled.rounded(total, ctx.fmt)
            return total, total, None, None, None
        total_NE, weight_E = ctx.saved_tensors
        of_x, of_weight = compiled.norm_gradients(total_NE, weight_E, normed, ctx.eps, ctx.fmt, total)
        return of_x, of_x, of_weight, None, None


class SwiGLU(Operation):
    """y = round(silu(g)) * u, silu(g) = g / (1 + e^-g)."""

    @staticmethod
    def forward(ctx: Any, gate_NE: Tensor, up_NE: Tensor, fmt: NumberFormat) -> Tensor:
        ctx.save_for_backward(gate_NE, up_NE)
        ctx.fmt = fmt
        return compiled.swiglu(gate_NE, up_NE, fmt)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate_NE, up_NE = ctx.saved_tensors
        return *compiled.swiglu_gradients(gate_NE, up_NE, grads[0], ctx.fmt), None


class Rotation(Operation):
    """A rotation; its backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, fmt: NumberFormat) -> Tensor:
        ctx.save_for_backward(cos_BTD, sin_BTD)
        ctx.fmt = fmt
        return compiled.rotate(x_BHTD, cos_BTD, sin_BTD, fmt)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos_BTD, sin_BTD = ctx.saved_tensors
        return compiled.rotate(grads[0], cos_BTD, sin_BTD, ctx.fmt, back=True), None, None, None


class PackedAttention(Operation):
    """Attention of packed positions, each to those of its sequence up to itself: ``compiled.packed_attention``."""

    @staticmethod
    def forward(ctx: Any, q_1HND: Tensor, k_1KND: Tensor, v_1KND: Tensor, fmt: NumberFormat, spans: Spans) -> Tensor:
        out_1HND = compiled.packed_attention(q_1HND, k_1KND, v_1KND, fmt, spans)
        ctx.save_for_backward(q_1HND, k_1KND, v_1KND, out_1HND)
        ctx.fmt, ctx.spans = fmt, spans
        return out_1HND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out = ctx.saved_tensors
        return *compiled.packed_attention_gradients(q, k, v, out, grads[0], ctx.fmt, ctx.spans), None, None


def causal_attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, fmt: NumberFormat) -> Tensor:
    """``PackedAttention`` of whole sequences that share nothing. Shape of ``q``."""
    batch, heads, length, size = q_BHTD.shape
    packed = (x.transpose(1, 2).reshape(1, batch * length, -1, size).transpose(1, 2) for x in (q_BHTD, k_BKTD, v_BKTD))
    out_1HND: Tensor = PackedAttention.of(*packed, fmt, Spans.whole(batch, length))
    return out_1HND.transpose(1, 2).view(batch, length, heads, size).transpose(1, 2)
