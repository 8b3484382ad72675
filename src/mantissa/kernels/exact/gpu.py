"""Exact kernels on a GPU: the same bits for a token whether it is decoded or trained on.

The forward of each operation is a kernel whose result for a row depends on that row, the weights and its own prefix
alone (``kernels/triton`` says how); casts, gathers and the sum of two tensors
are exact by IEEE and stay torch's. The backward may use any order, so it is the fast family's: torch's own products.

Keys and values are rounded to the cache's format before they are attended to, in a whole sequence too; the gradient
passes through unchanged.

Interpreted on a CPU, compiled for sm_80 and sm_90, run on an H200 (docs/exactness.md has what was measured).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mantissa.kernels.compiled import Part
from mantissa.kernels.native import NativeKernels
from mantissa.kernels.simulated import Product, ProductOf
from mantissa.precision import FP32, BlockScaled, Fp8Policy, NumberFormat, round_cached


class ExactGpuKernels(NativeKernels):
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

    def laid(self, copy: Tensor | BlockScaled, layer: str = "") -> Tensor:
        return copy if isinstance(copy, Tensor) else copy.codes  # its products are Triton's

    def linear(
        self, x_NE: Tensor, weight_FE: Tensor | BlockScaled, bias_F: Tensor | None = None, layer: str = ""
    ) -> Tensor:
        if self._in_fp8(layer):
            return super().linear(x_NE, weight_FE, bias_F, layer)  # row-invariant in the fast family too
        assert isinstance(weight_FE, Tensor)  # only what the policy names is kept as codes
        bias = None if bias_F is None else self.weight(bias_F)
        return ProductOf.apply(x_NE, self.weight(weight_FE), bias, _product_in(self.dtype))

    def router(self, x_NE: Tensor, weight_XE: Tensor) -> Tensor:
        return ProductOf.apply(x_NE, self.weight(weight_XE), None, _product_in(torch.float32))

    def token_logprob(self, logits_NV: Tensor, tokens_N: Tensor, temperature: float = 1.0) -> Tensor:
        from mantissa.kernels.triton.rows import token_logprob  # torch's sums depend on how a row of odd length lies

        return token_logprob(logits_NV, tokens_N, temperature)

    def rms_norm(self, x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        from mantissa.kernels.triton.rows import RMSNorm

        return RMSNorm.apply(x_NE, self.weight(weight_E), eps)

    def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
        from mantissa.kernels.triton.rows import SwiGLU

        return SwiGLU.apply(gate_NE, up_NE)

    def rotate(self, x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        from mantissa.kernels.triton.rows import Rotate

        return Rotate.apply(x_BHTD, cos_BTD, sin_BTD)

    def compiles(self, x: Tensor, width: int = 0, part: Part = "rows") -> bool:
        return False  # nothing of a CPU's, where Triton is interpreted

    def causal_attention(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        from mantissa.kernels.triton.attention import CausalInvariantAttention

        k_BKTD, v_BKTD = (_AsCached.apply(x, self.kv_format) for x in (k_BKTD, v_BKTD))
        return CausalInvariantAttention.apply(q_BHTD, k_BKTD, v_BKTD, super().causal_attention)

    def cached_attention(self, q_BHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, length_B: Tensor) -> Tensor:
        from mantissa.kernels.triton.attention import attention

        k_BKSD, v_BKSD = k_BKSD.to(self.dtype), v_BKSD.to(self.dtype)  # exact: a cache holds values of the format
        return attention(q_BHD.unsqueeze(2), k_BKSD, v_BKSD, length_B - 1).squeeze(2)


def _product_in(dtype: torch.dtype) -> Product:
    """The row-invariant product, rounded to ``dtype``."""

    def product(x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        from mantissa.kernels.triton.products import matmul

        return matmul(x_NE, weight_FE, bias_F, dtype)

    return product


class _AsCached(torch.autograd.Function):
    """What a cache in ``fmt`` would hold of keys or values; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: NumberFormat) -> Tensor:
        return round_cached(x, fmt)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
