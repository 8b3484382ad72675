"""Exact native kernels: on a GPU, the same bits for a token whether it is decoded or trained on.

The forward of each operation is a kernel whose result for a row depends on that row, the weights and its own prefix
alone (``triton_products``, ``triton_attention`` and ``triton_rows`` say how); casts, gathers and the sum of two tensors
are exact by IEEE and stay torch's. The backward may use any order, so it is the fast family's: torch's own products.

Keys and values are rounded to the cache's format before they are attended to, in a whole sequence too; the gradient
passes through unchanged.

Interpreted on a CPU and compiled for sm_80 and sm_90; not yet run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mantissa.kernels.native import NativeKernels
from mantissa.precision import FP32, BlockScaled, Fp8Policy, NumberFormat, round_cached, round_to_format


class ExactNativeKernels(NativeKernels):
    """The operations in ``fmt`` on CUDA tensors, row-invariant. See ``Kernels`` for each one's contract.

    ``kv_format``: the grid of the rollout's cache; None where it is ``fmt`` itself.
    """

    def __init__(
        self,
        fmt: NumberFormat,
        logits_format: NumberFormat = FP32,
        fp8: Fp8Policy | None = None,
        kv_format: NumberFormat | None = None,
    ) -> None:
        super().__init__(fmt, logits_format, fp8)
        self.kv_format = kv_format or fmt

    def linear(
        self, x_NE: Tensor, weight_FE: Tensor | BlockScaled, bias_F: Tensor | None = None, layer: str = ""
    ) -> Tensor:
        if self._in_fp8(layer):
            return super().linear(x_NE, weight_FE, bias_F, layer)  # row-invariant in the fast family too
        assert isinstance(weight_FE, Tensor)  # only what the policy names is kept as codes
        bias = None if bias_F is None else self.weight(bias_F)
        return _Linear.apply(x_NE, self.weight(weight_FE), bias, self.dtype)

    def logits(self, x_NE: Tensor, weight_VE: Tensor) -> Tensor:
        logits = _Linear.apply(x_NE, self.weight(weight_VE), None, torch.float32)
        return round_to_format(logits, self.logits_format)

    def token_logprob(self, logits_NV: Tensor, tokens_N: Tensor, temperature: float = 1.0) -> Tensor:
        from mantissa.kernels.triton_rows import token_logprob  # torch's sums depend on how a row of odd length lies

        return token_logprob(logits_NV, tokens_N, temperature)

    def rms_norm(self, x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        from mantissa.kernels.triton_rows import RMSNorm

        return RMSNorm.apply(x_NE, self.weight(weight_E), eps)

    def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
        from mantissa.kernels.triton_rows import SwiGLU

        return SwiGLU.apply(gate_NE, up_NE)

    def rotate(self, x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        from mantissa.kernels.triton_rows import Rotate

        return Rotate.apply(x_BHTD, cos_BTD, sin_BTD)

    def causal_attention(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        from mantissa.kernels.triton_attention import CausalInvariantAttention

        k_BKTD, v_BKTD = (_AsCached.apply(x, self.kv_format) for x in (k_BKTD, v_BKTD))
        return CausalInvariantAttention.apply(q_BHTD, k_BKTD, v_BKTD, super().causal_attention)

    def cached_attention(self, q_BHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, length_B: Tensor) -> Tensor:
        from mantissa.kernels.triton_attention import attention

        k_BKSD, v_BKSD = k_BKSD.to(self.dtype), v_BKSD.to(self.dtype)  # exact: a cache holds values of the format
        return attention(q_BHD.unsqueeze(2), k_BKSD, v_BKSD, length_B - 1).squeeze(2)


class _AsCached(torch.autograd.Function):
    """What a cache in ``fmt`` would hold of keys or values; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: NumberFormat) -> Tensor:
        return round_cached(x, fmt)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Linear(torch.autograd.Function):
    """x @ w^T + b by the row-invariant product; its gradients by torch's, with operands in the dtype of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        from mantissa.kernels.triton_products import matmul

        ctx.save_for_backward(x, weight)
        out = matmul(x.reshape(-1, x.shape[-1]), weight, bias, out_dtype)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)  # the logits' gradient is fp32
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_weight = flat.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        grad_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None
