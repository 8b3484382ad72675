"""Native kernels: tensors have the format's own dtype, and the device's libraries do the arithmetic.

On CUDA the products run on the tensor cores with fp32 accumulation and attention is a flash kernel: flash-attn's where
it is installed, else the one behind torch's ``scaled_dot_product_attention`` (both take fp16 and bf16 only, so fp32
uses torch's memory-efficient one, which wants as many key heads as query heads).

On a CPU this family is fp32's, and bf16's where the processor multiplies it itself (``cpu.py``): products of bf16
tensors, summed in fp32 and rounded once; over it those of codes (``cpu.quantized_product``). Attention and rows are our
own, and fp32 logits, whose sum no library on a CPU hands out: compiled, or of widened operands. fp16 is slow there.

Every cast is on a line of its own. The two-line ``weight`` is all that mixed precision needs: the fp32 master is cast
where it is used, and autograd casts the gradient back.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.kernels import compiled, cpu
from mantissa.kernels.compiled import Compiles, Kind, is_laid
from mantissa.kernels.cpu import CpuProducts, Products
from mantissa.kernels.simulated import (
    CachedMask,
    CausalAttention,
    Linear,
    ProductOf,
    RMSNorm,
    Rotate,
    cached_probabilities,
    inverse_rms,
)
from mantissa.precision import (
    BF16,
    FP32,
    BlockScaled,
    Fp8Policy,
    NumberFormat,
    round_to_format,
    token_logprob,
)


class NativeKernels(Compiles):
    """The operations in ``fmt``, on tensors of dtype ``fmt.dtype``. See ``Kernels`` for each one's contract.

    ``fp8``: which products have fp8 operands (CUDA, Hopper and later), or on a CPU, and of copies alone, codes of any
    scaled format (``cpu.quantized_copy``); ``fmt`` is then their base. ``table``: which way a CPU
    multiplies; None: as measured on this machine. ``copies``: the weights given are those that ``copied`` made, and
    have no gradient.
    """

    def __init__(
        self,
        fmt: NumberFormat,
        logits_format: NumberFormat = FP32,
        fp8: Fp8Policy | None = None,
        table: CpuProducts | None = None,
        copies: bool = False,
    ) -> None:
        self.format = fmt
        self.dtype = fmt.dtype
        self.logits_format = logits_format
        self.fp8 = fp8
        self.copies, self.weights_on_grid = copies, copies and fp8 is not None
        self.products = Products("bf16" if fmt is BF16 else "fp32", table)
        self._mask = CachedMask()
        self._flash_attn = fmt is not FP32 and importlib.util.find_spec("flash_attn") is not None

    def weight(self, master: Tensor) -> Tensor:
        return master.to(self.dtype)  # the identity where they agree: fp32, or a rollout's own copy

    def embedding(self, tokens_BT: Tensor, weight_VE: Tensor) -> Tensor:
        return F.embedding(tokens_BT, weight_VE).to(self.dtype)  # gather first: only the rows used are cast

    def copied(self, master: Tensor, layer: str = "") -> Tensor | BlockScaled:
        if layer == "lm_head" and self.wide_head and master.device.type == "cpu":
            return round_to_format(master.detach(), self.format)  # logits are an fp32 product: widened once, here
        if self.fp8 is None or not self._in_fp8(layer):
            return self.weight(master.detach())
        if not _by_triton(master):
            return cpu.quantized_copy(master, self.fp8, self.products)
        from mantissa.kernels.triton.products import quantized_weight

        return quantized_weight(master, self.fp8)

    @property
    def wide_head(self) -> bool:
        """Whether logits need a product with an fp32 result: in bf16 they are rounded once by the product itself."""
        return self.format is not BF16 or self.logits_format is not BF16

    def laid(self, copy: Tensor | BlockScaled, layer: str = "") -> Tensor:
        if isinstance(copy, BlockScaled):
            return self.products.laid_codes(copy, self.fp8)
        kind: Kind | None = "fp32" if self.format is FP32 else "pairs" if self.format is BF16 else None
        return copy if kind is None else self.products.laid(copy, kind)

    def linear(
        self, x_NE: Tensor, weight_FE: Tensor | BlockScaled, bias_F: Tensor | None = None, layer: str = ""
    ) -> Tensor:
        bias = None if bias_F is None else self.weight(bias_F)
        if not self._in_fp8(layer):
            assert isinstance(weight_FE, Tensor)  # only what the policy names is kept as codes
            weight = self.weight(weight_FE)
            if is_laid(weight):
                return self.products.forward(x_NE, weight, bias)
            if self._is_cpus_own(x_NE):
                return Linear.of(x_NE, weight, bias, FP32, FP32, self.products.forward, self.products)
            return F.linear(x_NE, weight, bias)
        assert self.fp8 is not None
        if not _by_triton(x_NE):
            return cpu.quantized_product(x_NE, weight_FE, bias, self.fp8, self.products)
        from mantissa.kernels.triton.products import Fp8Linear

        if isinstance(weight_FE, BlockScaled):
            return Fp8Linear.apply(x_NE, weight_FE.codes, weight_FE.scales, bias, self.fp8)
        return Fp8Linear.apply(x_NE, weight_FE, None, bias, self.fp8)

    def _in_fp8(self, layer: str) -> bool:
        return self.fp8 is not None and self.fp8.quantizes(layer)

    def _is_cpus_own(self, x: Tensor) -> bool:
        """Where the simulated family's operations are this one's too: its roundings are the identity in fp32."""
        return self.format is FP32 and not x.is_cuda

    def logits(self, x_NE: Tensor, weight_VE: Tensor) -> Tensor:
        return round_to_format(self.router(x_NE, weight_VE), self.logits_format)

    def router(self, x_NE: Tensor, weight_XE: Tensor) -> Tensor:
        if is_laid(weight_XE):  # a copy on a CPU, widened when it was made unless logits are rounded anyway
            return self.products.forward(x_NE.to(weight_XE.dtype), weight_XE).float()
        if self._is_cpus_own(x_NE):
            how = FP32, FP32, self.products.forward, self.products
            return Linear.of(x_NE, self.weight(weight_XE), None, *how)
        weight = self.weight(weight_XE)
        if self.format is FP32:
            return F.linear(x_NE, weight)
        return ProductOf.apply(x_NE, weight, None, self._product_to_float)

    def _product_to_float(self, x_NE: Tensor, weight_VE: Tensor, _: Tensor | None) -> Tensor:
        """x @ w^T of halves, its fp32 sum unrounded: by ``mm``'s ``out_dtype`` (CUDA alone has it), by compiled pairs,
        or of widened operands, whose products are the same."""
        if x_NE.is_cuda:
            return torch.mm(x_NE, weight_VE.t(), out_dtype=torch.float32)
        return self.products.to_float(x_NE, weight_VE)

    def token_logprob(self, logits_NV: Tensor, tokens_N: Tensor, temperature: float = 1.0) -> Tensor:
        return token_logprob(logits_NV, tokens_N, temperature)

    def rms_norm(self, x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        if self.compiles(x_NE):
            return compiled.Norm.of(x_NE, self.weight(weight_E), eps, self.format)
        if not x_NE.is_cuda and not torch.is_grad_enabled():  # the same arithmetic in torch's own loop over few calls
            return F.rms_norm(x_NE, weight_E.shape, None, eps) * self.weight(weight_E)
        if self._is_cpus_own(x_NE):
            return RMSNorm.apply(x_NE, weight_E, eps, FP32)
        x = x_NE.float()  # once, so that autograd sums what comes back before it is rounded
        return (x * inverse_rms(x, eps)).to(self.dtype) * self.weight(weight_E)

    def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
        if self.compiles(gate_NE):
            return compiled.SwiGLU.of(gate_NE, up_NE, self.format)
        return F.silu(gate_NE) * up_NE  # torch's silu computes in fp32 and rounds once

    def sigmoid(self, x_NE: Tensor) -> Tensor:
        return torch.sigmoid(x_NE)

    def scale(self, x_NE: Tensor, weight_N: Tensor) -> Tensor:
        return (x_NE.float() * weight_N.unsqueeze(-1)).to(self.dtype)

    def rotate(self, x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        if self.compiles(x_BHTD, x_BHTD.shape[3] // 2):
            return compiled.Rotation.of(x_BHTD, cos_BTD, sin_BTD, self.format)
        return Rotate.of(x_BHTD.float(), cos_BTD, sin_BTD, FP32).to(self.dtype)

    def add(self, x_NE: Tensor, y_NE: Tensor) -> Tensor:
        return x_NE + y_NE

    def add_norm(self, x_NE: Tensor, y_NE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if self.compiles(x_NE):
            return compiled.AddedNorm.of(x_NE, y_NE, self.weight(weight_E), eps, self.format)
        total_NE = self.add(x_NE, y_NE)
        return total_NE, self.rms_norm(total_NE, weight_E, eps)

    def causal_attention(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        if self._flash_attn and q_BHTD.is_cuda:
            from flash_attn import flash_attn_func

            out_BTHD = flash_attn_func(
                q_BHTD.transpose(1, 2), k_BKTD.transpose(1, 2), v_BKTD.transpose(1, 2), causal=True
            )
            return out_BTHD.transpose(1, 2)
        if self.compiles(q_BHTD, part="attention"):
            return compiled.causal_attention(q_BHTD, k_BKTD, v_BKTD, self.format)
        if not q_BHTD.is_cuda:  # in a half, torch's own is no faster, and rounds gradients at other places
            wide = (x.float() for x in (q_BHTD, k_BKTD, v_BKTD))
            return CausalAttention.of(*wide, self.format, self.products).to(self.dtype)
        group = q_BHTD.shape[1] // k_BKTD.shape[1]
        if group > 1 and q_BHTD.is_cuda and self.format is FP32:
            k_BKTD, v_BKTD = k_BKTD.repeat_interleave(group, 1), v_BKTD.repeat_interleave(group, 1)
        grouped = q_BHTD.shape[1] != k_BKTD.shape[1]
        return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=grouped)

    def cached_attention(self, q_BHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, length_B: Tensor) -> Tensor:
        (rows, heads, size), (kv_heads, keys) = q_BHD.shape, k_BKSD.shape[1:3]
        if not torch.is_grad_enabled() and self.compiles(q_BHD, part="attention"):
            return compiled.attention(q_BHD.unsqueeze(2), k_BKSD, v_BKSD, self.format, length_B).squeeze(2)
        mask_N1S = self._mask(length_B, kv_heads, keys)
        with self.products.heads(q_BHD, heads // kv_heads, keys * size):
            q_NGD = q_BHD.reshape(rows * kv_heads, -1, size)
            p_NGS = cached_probabilities(q_NGD, k_BKSD.flatten(0, 1), mask_N1S).to(self.dtype)
        v_NSD = v_BKSD.flatten(0, 1).to(self.dtype)  # a cache may be coarser than the rollout
        return torch.bmm(p_NGS, v_NSD).view(q_BHD.shape)


def _by_triton(x: Tensor) -> bool:
    """Whether fp8 is codes that Triton multiplies; on a CPU it is values on their grid."""
    return x.is_cuda
