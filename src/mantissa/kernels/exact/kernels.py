"""Exact kernels on a CPU: the number that a position gets is the same in training, in prefill and in decode.

A log-prob is a tree of rounded operations. Two policies with the same weights give the same log-prob, to the last bit,
if and only if each node of that tree depends on nothing but its position's own past: not on the batch, the row, what
follows, the length of the cache or the threads. The fast kernels break that at three places, and this family replaces
them; the rest (norms, rotation, sums of two, embedding) computes each row for itself as it is, which the probe checks.

- Products: a library chooses its routine by the number of rows, and each adds in another order. ``attention.product``.
  The bias is added as an operation of its own, since a fused one may be rounded otherwise.
- Attention: ``attention.ExactAttention``.
- SwiGLU: torch's ``silu`` computes what is left over from whole vectors by another exponential, so that a number
  depends on where it stands. ``x / (1 + exp(-x))`` by torch's ``exp`` and correctly rounded operations does not.

The arithmetic is that of ``SimulatedKernels``, at the same rounding points, and its backward passes are used as they
are: nothing compares gradients bit by bit. In fp32 the roundings are identities.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mantissa.kernels.exact import attention
from mantissa.kernels.exact.plan import ExactPlan
from mantissa.kernels.simulated import SimulatedKernels, _SwiGLU
from mantissa.precision import FP32, Fp8Policy, NumberFormat, round_to_format_

_PART = 1 << 19  # values of SwiGLU at a time: 2 MB


class ExactKernels(SimulatedKernels):
    """The operations in ``fmt``, fp32 included, on fp32 tensors, by the calls that ``plan`` allows. See ``Kernels``.

    ``kv_format``: what keys and values are rounded to before anything attends to them: the cache's format, in training
    too; None where it is ``fmt``. A cache's keys and values have been rounded by whoever wrote them.
    """

    def __init__(
        self,
        fmt: NumberFormat,
        plan: ExactPlan,
        logits_format: NumberFormat = FP32,
        weights_on_grid: bool = False,
        kv_format: NumberFormat | None = None,
        fp8: Fp8Policy | None = None,
    ) -> None:
        super().__init__(fmt, logits_format, weights_on_grid, fp8)
        self.plan = plan
        self.kv_format = kv_format or fmt

    @property
    def packs(self) -> bool:
        return any(choice.onednn for choice in self.plan.products.values())

    def product(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        self.plan.check_threads(torch.get_num_threads())
        out_NF = attention.product(x_NE, weight_FE, self.plan.product(weight_FE.shape))
        return out_NF if bias_F is None else out_NF.add_(bias_F)

    def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
        return _ExactSwiGLU.apply(gate_NE, up_NE, self.format)

    def causal_attention(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        self.plan.check_length(k_BKTD.shape[2])
        return attention.ExactAttention.apply(q_BHTD, k_BKTD, v_BKTD, self.format, self.kv_format, self.plan.attention)

    def cached_attention(self, q_BHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, length_B: Tensor) -> Tensor:
        self.plan.check_length(k_BKSD.shape[2])
        return attention.cached(q_BHD, k_BKSD, v_BKSD, length_B, self.format, self.plan.attention)


class _ExactSwiGLU(_SwiGLU):
    """The forward of ``_SwiGLU`` with x / (1 + exp(-x)) for silu; where exp(-x) is inf the result is -0, as it is."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, fmt: NumberFormat) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.fmt = fmt
        if gate.numel() <= _PART:
            return _swiglu(gate, up, torch.neg(gate), fmt)
        out = torch.empty(gate.shape, device=gate.device)
        # Part by part, so that the next operation finds in the cache what the last one wrote.
        for gate_N, up_N, out_N in zip(*(x.reshape(-1).split(_PART) for x in (gate, up, out)), strict=True):
            _swiglu(gate_N, up_N, torch.neg(gate_N, out=out_N), fmt)
        return out


def _swiglu(gate: Tensor, up: Tensor, negated: Tensor, fmt: NumberFormat) -> Tensor:
    """Written over ``negated``, which is -gate."""
    silu = torch.div(gate, negated.exp_().add_(1.0), out=negated)
    return round_to_format_(round_to_format_(silu, fmt).mul_(up), fmt)
