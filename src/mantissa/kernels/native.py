"""Native kernels: tensors have the format's own dtype, and the device's libraries do the arithmetic.

On CUDA the products run on the tensor cores with fp32 accumulation and attention is a flash kernel: flash-attn's where
it is installed, else the one behind torch's ``scaled_dot_product_attention`` (both take fp16 and bf16 only, so fp32
uses torch's memory-efficient one, which wants as many key heads as query heads). On a CPU this family is fp32's, with
attention of our own (``attention.py`` says why); fp16 and bf16 are slow or vary from CPU to CPU.

Every cast is on a line of its own. The two-line ``weight`` is all that mixed precision needs: the fp32 master is cast
where it is used, and autograd casts the gradient back.

Causal attention in blocks of queries, in fp32 arithmetic, with each result rounded where a flash kernel rounds.

In a half format it is the simulated family's attention. In fp32, where rounding is the identity, it is the CPU's: for
the short sequences of a small policy it takes 0.6 of the time of torch's flash kernel (512 rows of 40 positions, 4
heads of 32, 2 threads: 26 against 41 ms for forward and backward), and at 1024 positions no more.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.kernels import products
from mantissa.kernels.simulated import Linear, RMSNorm, Rotate
from mantissa.precision import FP32, BlockScaled, Fp8Policy, NumberFormat, round_to_format, round_to_format_
from mantissa.precision.numerics import token_logprob

_QUERY_BLOCK = 64  # queries at a time: small enough to skip most keys of the future and to stay in the cache


class CausalAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(D)) v, as a flash kernel rounds it: scores and softmax fp32, P rounded, the output rounded.

    Backward: dV = round(P)^T dO; dS = P * (dO V^T - rowsum(dO * O)); dQ = round(dS) K / sqrt(D);
    dK = round(dS)^T Q / sqrt(D). P is recomputed, block of queries by block, so memory is linear in T.
    Heads that share keys are folded into the query dimension (q as B*K, G*T, D), so that keys are never copied.
    """

    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, fmt: NumberFormat) -> Tensor:
        q, k, v = _fold(q_BHTD, k_BKTD.shape[1]), k_BKTD.flatten(0, 1), v_BKTD.flatten(0, 1)
        out = torch.empty_like(q)
        for start, stop in _query_blocks(q.shape[2]):
            p = _causal_probabilities(q, k, start, stop)
            product = round_to_format_(p, fmt).flatten(1, 2) @ v[:, :stop]
            out[:, :, start:stop] = round_to_format_(product, fmt).view(*p.shape[:3], -1)
        ctx.save_for_backward(q, k, v, out)
        ctx.fmt, ctx.shape, ctx.block = fmt, q_BHTD.shape, None
        return out.view(q_BHTD.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out = ctx.saved_tensors
        fmt, scale = ctx.fmt, q.shape[-1] ** -0.5
        grad_out = grads[0].reshape(out.shape)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for start, stop in _query_blocks(q.shape[2], ctx.block):
            p = _causal_probabilities(q, k, start, stop)
            d_out = grad_out[:, :, start:stop]
            delta = (d_out * out[:, :, start:stop]).sum(-1, keepdim=True)
            flat = d_out.flatten(1, 2)
            d_scores = (flat @ v[:, :stop].transpose(1, 2)).view(p.shape)
            d_scores = d_scores.sub_(delta).mul_(p)
            p_rounded, ds = round_to_format_(p, fmt).flatten(1, 2), round_to_format_(d_scores, fmt).flatten(1, 2)
            grad_v[:, :stop] += p_rounded.transpose(1, 2) @ flat
            grad_k[:, :stop] += ds.transpose(1, 2) @ q[:, :, start:stop].flatten(1, 2)
            grad_q[:, :, start:stop] = (ds @ k[:, :stop]).view(d_out.shape)
        rows, _, length, size = ctx.shape
        kv_shape = (rows, -1, length, size)
        return (
            round_to_format_(grad_q.mul_(scale), fmt).view(ctx.shape),
            round_to_format_(grad_k.mul_(scale), fmt).view(kv_shape),
            round_to_format_(grad_v, fmt).view(kv_shape),
            None,
        )


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
    half = x_BHTD.shape[-1] // 2
    cos, sin = cos_BTD.unsqueeze(1)[..., :half], sin_BTD.unsqueeze(1)[..., :half]
    first, second = x_BHTD[..., :half], x_BHTD[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def cached_probabilities(q_BHD: Tensor, k_BKSD: Tensor, length_B: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) in fp32 over each row's first ``length_B`` keys. Shape B, K, H/K, S; zero beyond."""
    rows, heads, size = q_BHD.shape
    kv_heads, keys = k_BKSD.shape[1], k_BKSD.shape[2]
    q_BKGD = q_BHD.reshape(rows, kv_heads, heads // kv_heads, size).float()
    scores = (q_BKGD @ k_BKSD.float().transpose(-1, -2)) * size**-0.5
    beyond_BS = torch.arange(keys, device=q_BHD.device) >= length_B.unsqueeze(1)
    scores = scores.masked_fill_(beyond_BS[:, None, None, :], float("-inf"))
    return torch.softmax(scores, dim=-1)


class NativeKernels:
    """The operations in ``fmt``, on tensors of dtype ``fmt.dtype``. See ``Kernels`` for each one's contract.

    ``fp8``: which products have fp8 operands (CUDA, Hopper and later); ``fmt`` is then its base.
    """

    def __init__(self, fmt: NumberFormat, logits_format: NumberFormat = FP32, fp8: Fp8Policy | None = None) -> None:
        self.format = fmt
        self.dtype = fmt.dtype
        self.logits_format = logits_format
        self.fp8 = fp8
        self._flash_attn = fmt is not FP32 and importlib.util.find_spec("flash_attn") is not None

    def weight(self, master: Tensor) -> Tensor:
        return master.to(self.dtype)  # the identity where they agree: fp32, or a rollout's own copy

    def embedding(self, tokens_BT: Tensor, weight_VE: Tensor) -> Tensor:
        return F.embedding(tokens_BT, weight_VE).to(self.dtype)  # gather first: only the rows used are cast

    def copied(self, master: Tensor, layer: str = "") -> Tensor | BlockScaled:
        if self.fp8 is None or not self._in_fp8(layer):
            return self.weight(master.detach())
        from mantissa.kernels.triton.fp8 import quantized_weight

        return quantized_weight(master, self.fp8)

    @property
    def packs(self) -> bool:
        return self.format is FP32 and type(self).linear is NativeKernels.linear

    def linear(
        self, x_NE: Tensor, weight_FE: Tensor | BlockScaled, bias_F: Tensor | None = None, layer: str = ""
    ) -> Tensor:
        bias = None if bias_F is None else self.weight(bias_F)
        if not self._in_fp8(layer):
            assert isinstance(weight_FE, Tensor)  # only what the policy names is kept as codes
            weight = self.weight(weight_FE)
            if self._is_cpus_own(x_NE):
                return Linear.apply(x_NE, weight, bias, FP32, FP32, products.product)
            return F.linear(x_NE, weight, bias)
        from mantissa.kernels.triton.fp8 import Fp8Linear

        if isinstance(weight_FE, BlockScaled):
            return Fp8Linear.apply(x_NE, weight_FE.codes, weight_FE.scales, bias, self.fp8)
        return Fp8Linear.apply(x_NE, weight_FE, None, bias, self.fp8)

    def _in_fp8(self, layer: str) -> bool:
        return self.fp8 is not None and self.fp8.quantizes(layer)

    def _is_cpus_own(self, x: Tensor) -> bool:
        """Where the simulated family's operations are this one's too: its roundings are the identity in fp32."""
        return self.format is FP32 and not x.is_cuda

    def logits(self, x_NE: Tensor, weight_VE: Tensor) -> Tensor:
        weight = self.weight(weight_VE)
        if self._is_cpus_own(x_NE):
            logits = Linear.apply(x_NE, weight, None, FP32, FP32, products.product)
        else:
            logits = F.linear(x_NE, weight) if self.format is FP32 else _HalfProductToFloat.apply(x_NE, weight)
        return round_to_format(logits, self.logits_format)

    def token_logprob(self, logits_NV: Tensor, tokens_N: Tensor, temperature: float = 1.0) -> Tensor:
        return token_logprob(logits_NV, tokens_N, temperature)

    def rms_norm(self, x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        if self._is_cpus_own(x_NE):
            return RMSNorm.apply(x_NE, weight_E, eps, FP32)
        x = x_NE.float()  # the sum of squares of fp16 values overflows fp16 from |x| = 256 on
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return normed.to(self.dtype) * self.weight(weight_E)

    def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
        return F.silu(gate_NE) * up_NE  # torch's silu computes in fp32 and rounds once

    def rotate(self, x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        if self._is_cpus_own(x_BHTD):
            return Rotate.apply(x_BHTD, cos_BTD, sin_BTD, FP32)
        return rotate_fp32(x_BHTD.float(), cos_BTD, sin_BTD).to(self.dtype)

    def add(self, x_NE: Tensor, y_NE: Tensor) -> Tensor:
        return x_NE + y_NE

    def causal_attention(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        if self._flash_attn and q_BHTD.is_cuda:
            from flash_attn import flash_attn_func

            out_BTHD = flash_attn_func(
                q_BHTD.transpose(1, 2), k_BKTD.transpose(1, 2), v_BKTD.transpose(1, 2), causal=True
            )
            return out_BTHD.transpose(1, 2)
        if self._is_cpus_own(q_BHTD):
            return CausalAttention.apply(q_BHTD, k_BKTD, v_BKTD, FP32)
        group = q_BHTD.shape[1] // k_BKTD.shape[1]
        if group > 1 and q_BHTD.is_cuda and self.format is FP32:
            k_BKTD, v_BKTD = k_BKTD.repeat_interleave(group, 1), v_BKTD.repeat_interleave(group, 1)
        grouped = q_BHTD.shape[1] != k_BKTD.shape[1]
        return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=grouped)

    def cached_attention(self, q_BHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, length_B: Tensor) -> Tensor:
        p_BKGS = cached_probabilities(q_BHD, k_BKSD, length_B).to(self.dtype)
        return (p_BKGS @ v_BKSD.to(self.dtype)).reshape(q_BHD.shape)  # a cache may be coarser than the rollout


class _HalfProductToFloat(torch.autograd.Function):
    """x @ w^T with half operands and an fp32 result; the backward's operands are half again, its results half.

    Torch's ``mm`` with ``out_dtype=torch.float32`` (CUDA only) keeps the accumulator instead of rounding it. A CPU has
    no such product; widening the operands gives the same products and the same fp32 sum.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x_NE: Tensor, weight_VE: Tensor) -> Tensor:
        ctx.save_for_backward(x_NE, weight_VE)
        flat = x_NE.reshape(-1, x_NE.shape[-1])
        if x_NE.is_cuda:
            logits_NV = torch.mm(flat, weight_VE.t(), out_dtype=torch.float32)
        else:
            logits_NV = flat.float() @ weight_VE.float().t()
        return logits_NV.view(*x_NE.shape[:-1], -1)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x_NE, weight_VE = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_NV = grads[0].to(x_NE.dtype)
        if not ctx.needs_input_grad[1]:  # type: ignore[attr-defined]
            return grad_NV @ weight_VE, None  # a frozen head: V by E values that nobody reads
        flat_grad, flat_x = grad_NV.reshape(-1, grad_NV.shape[-1]), x_NE.reshape(-1, x_NE.shape[-1])
        return grad_NV @ weight_VE, flat_grad.t() @ flat_x
