"""Row-invariant norm, gated unit, rotation and log-prob on a GPU.

What torch's own CUDA kernels do, read from its sources, and what follows:

- A sum over the last dimension (``mean``, ``sum``) chooses the shape of its thread block from the number of *rows*
  (``Reduce.cuh``: the block's height is taken from the outputs, its width from what is left), and may split a row over
  blocks where rows are few. One row alone is summed in another order than the same row among many. So RMSNorm has a
  kernel of its own: one program a row.
- ``log_softmax`` gives each row a block whose size comes from the vocabulary alone; but beyond 1024 entries each row
  starts with a part that brings it to 16-byte alignment, and where the vocabulary is no multiple of 4 that part is
  another for every row. ``token_logprob`` here has one order for all.
- Element by element torch is invariant as far as one function is compiled to one sequence everywhere; for the sigmoid
  that is likely, not certain, so SwiGLU is a kernel. Sums of two tensors, casts and gathers are exact by IEEE and stay
  torch's. The rotation would be too; here it is one pass over memory in place of seven.

Rounding points are those of ``NativeKernels``. Products and sums are not fused, so the rotation's bits are also those
of torch's separate operations. Backward passes are torch operations: they may use any order.

Interpreted on a CPU, compiled for sm_80 and sm_90, run on an H200 (docs/exactness.md has what was measured).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mantissa.kernels.simulated import inverse_rms, norm_gradients, unit_gradients
from mantissa.kernels.triton import LAUNCH, aligned, ceil_div, exp, power_of_two_above


class RMSNorm(torch.autograd.Function):
    """y = w * round(x s), s = (mean(x^2) + eps)^-1/2, fp32 inside. ``weight`` in the dtype of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = aligned(x)
        out = torch.empty_like(x)
        size = x.shape[-1]
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        if x.numel():
            block = power_of_two_above(size, 32)
            _rms_norm[(x.numel() // size,)](
                x, aligned(weight), out, eps, SIZE=size, BLOCK=block, num_warps=min(8, max(1, block // 512)), **LAUNCH
            )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        scale = inverse_rms(x, ctx.eps)
        return *norm_gradients(ctx, grads[0], x, weight, scale, lambda wide: wide.to(x.dtype)), None


class SwiGLU(torch.autograd.Function):
    """round(g / (1 + e^-g)) * u, rounded."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = aligned(gate), aligned(up)
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        block = 1024
        if gate.numel():
            _swiglu[(ceil_div(gate.numel(), block),)](gate, up, out, gate.numel(), BLOCK=block, num_warps=4, **LAUNCH)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return unit_gradients(grads[0], gate, up, lambda x: x)


class Rotate(torch.autograd.Function):
    """x * cos + rotate_half(x) * sin in fp32, rounded once; the gradient is rotated back. Result contiguous."""

    @staticmethod
    def forward(ctx: Any, x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BTD, sin_BTD)
        return _rotated(x_BHTD, cos_BTD, sin_BTD, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_BTD, sin_BTD = ctx.saved_tensors
        return _rotated(grads[0], cos_BTD, sin_BTD, -1.0), None, None


def _rotated(x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, turn: float) -> Tensor:
    rows, heads, length, size = x_BHTD.shape
    if size % 2:
        raise ValueError(f"a head of {size} values has no two halves to rotate")
    x = x_BHTD if x_BHTD.stride(-1) == 1 else x_BHTD.contiguous()
    shape = (rows, length, size)
    cos, sin = cos_BTD.expand(shape), sin_BTD.expand(shape)
    cos, sin = (a if a.stride(-1) == 1 else a.contiguous() for a in (cos, sin))
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(x_BHTD.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        # Element by element and unfused: no compilation of it can differ, so strides may be specialised on.
        _rotate[(rows * length,)](
            x, cos, sin, out, length, *x.stride()[:3], *cos.stride()[:2], turn, HEADS=heads, HALF=size // 2,
            BLOCK_H=power_of_two_above(heads, 1), BLOCK_D=power_of_two_above(size // 2, 1), num_warps=4, **LAUNCH,
        )  # fmt: skip
    return out


def token_logprob(logits_NV: Tensor, tokens_N: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-prob of each token under softmax(logits / temperature), as ``mantissa.precision.token_logprob``.

    fp32 logits on the GPU, any leading shape; differentiable.
    """
    if logits_NV.dtype != torch.float32:
        raise TypeError(f"token_logprob needs fp32 logits, not {logits_NV.dtype}: cast on a line of its own")
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}: a greedy choice has no density")
    return _TokenLogprob.apply(logits_NV if temperature == 1.0 else logits_NV / temperature, tokens_N)


class _TokenLogprob(torch.autograd.Function):
    """(y_t - max y) - log sum e^(y - max y). Gradient: dy_v = g (1[v = t] - softmax(y)_v)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        flat = aligned(logits.reshape(-1, logits.shape[-1]))
        largest, total = (torch.empty(flat.shape[0], dtype=torch.float32, device=flat.device) for _ in range(2))
        if flat.shape[0]:
            block = min(4096, power_of_two_above(flat.shape[1], 32))
            _softmax_sums[(flat.shape[0],)](
                flat, largest, total, WORDS=flat.shape[1], BLOCK=block, num_warps=min(8, max(1, block // 512)), **LAUNCH
            )
        picked = flat.gather(-1, tokens.reshape(-1, 1)).squeeze(-1)
        return ((picked - largest) - total.log()).view(tokens.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, tokens = ctx.saved_tensors
        grad = torch.softmax(logits, dim=-1).mul_(-grads[0].unsqueeze(-1))
        return grad.scatter_add_(-1, tokens.unsqueeze(-1), grads[0].unsqueeze(-1)), None


def row_sums(x_NE: Tensor) -> Tensor:
    """The sum over the last dimension, fp32, in an order that its length alone decides. No gradient."""
    size = x_NE.shape[-1]
    flat = aligned(x_NE.reshape(-1, size))
    out = torch.empty(flat.shape[0], dtype=torch.float32, device=flat.device)
    if flat.numel() == 0:
        return out.zero_().view(x_NE.shape[:-1])
    block = min(4096, power_of_two_above(size, 16))
    rows = max(1, 1024 // block)
    _row_sums[(ceil_div(flat.shape[0], rows),)](
        flat, out, flat.shape[0], SIZE=size, ROWS=rows, BLOCK=block, num_warps=4, **LAUNCH
    )
    return out.view(x_NE.shape[:-1])


@triton.jit(do_not_specialize=["rows"])
def _row_sums(
    x: tl.tensor, out: tl.tensor, rows: tl.tensor, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, BLOCK)
    sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, SIZE, BLOCK):
        inside = (r < rows)[:, None] & (start + e < SIZE)[None, :]
        sums += tl.load(x + r[:, None] * SIZE + start + e[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + r, tl.sum(sums, axis=1), mask=r < rows)


@triton.jit
def _rms_norm(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    e = tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * SIZE + e
    value = tl.load(x + place, mask=e < SIZE, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) * (1.0 / SIZE) + eps)
    normed = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + e, mask=e < SIZE, other=0.0).to(tl.float32)
    tl.store(out + place, (normed * w).to(out.dtype.element_ty), mask=e < SIZE)


@triton.jit(do_not_specialize=["count"])
def _swiglu(gate: tl.tensor, up: tl.tensor, out: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + i, mask=i < count, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=i < count, other=0.0).to(tl.float32)
    silu = tl.div_rn(g, 1.0 + exp(tl.minimum(tl.maximum(-g, -200.0), 100.0)))
    silu = silu.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + i, (silu * u).to(out.dtype.element_ty), mask=i < count)


@triton.jit
def _rotate(
    x: tl.tensor, cos: tl.tensor, sin: tl.tensor, out: tl.tensor, length: tl.tensor, x_row: tl.tensor,
    x_head: tl.tensor, x_time: tl.tensor, angle_row: tl.tensor, angle_time: tl.tensor, turn: tl.tensor,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    row, t = tl.program_id(0).to(tl.int64) // length, tl.program_id(0).to(tl.int64) % length
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    angle = row * angle_row + t * angle_time + d
    c = tl.load(cos + angle, mask=d < HALF, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=d < HALF, other=0.0)[None, :] * turn
    inside = (h < HEADS)[:, None] & (d < HALF)[None, :]
    source = row * x_row + h.to(tl.int64)[:, None] * x_head + t * x_time + d[None, :]
    first = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + source + HALF, mask=inside, other=0.0).to(tl.float32)
    target = ((row * HEADS + h[:, None]) * length + t) * (2 * HALF) + d[None, :]
    tl.store(out + target, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + target + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _softmax_sums(
    logits: tl.tensor, largest: tl.tensor, total: tl.tensor, WORDS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Largest logit of a row, and the sum of e^(logit - largest)."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, WORDS, BLOCK):
        inside = start + v < WORDS
        highest = tl.maximum(highest, tl.load(logits + row * WORDS + start + v, mask=inside, other=float("-inf")))
    top = tl.max(highest, axis=0)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WORDS, BLOCK):
        inside = start + v < WORDS
        value = tl.load(logits + row * WORDS + start + v, mask=inside, other=float("-inf"))
        below = value - top  # NaN where a logit is NaN or +inf, and so is the sum
        sums += exp(tl.where(below < -200.0, -200.0, below))
    tl.store(largest + row, top)
    tl.store(total + row, tl.sum(sums, axis=0))
