"""Row-invariant attention on a GPU: one kernel for whole sequences, for one query over a cache, and for all between.

Keys are taken in blocks of 64 from position 0 of the row, with a running maximum and sum (online softmax), all fp32.
A query's result is a function of the query and of the keys up to its own position:

- a tile's rows are the queries of one row and one key head, with the query heads that share it; each row of a tile goes
  through the same operations wherever in the tile it stands, so a decoded query (a tile of its own) and the same query
  inside a whole sequence do the same;
- a block of keys that lies beyond a query has scores of -inf: the maximum stays, the factor that rescales is
  2^0 = 1, the block's probabilities and their sum are 0, and 0 is added. So blocks that only later queries of the same
  tile need change nothing;
- what a cache holds beyond a row's length is neither loaded nor counted.

Probabilities are rounded to the format before the second product (unnormalised: the division by their sum comes at the
end, in fp32) and the result is rounded once, as flash attention rounds.

The backward pass has no part in exactness: it recomputes with the fast family's attention in the same dtype, whose
memory is linear in the length too.

Interpreted on a CPU and compiled for sm_80 and sm_90; not yet run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mantissa.kernels.triton_common import LAUNCH, aligned, ceil_div, power_of_two_above

KEYS = 64  # a block of keys
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, first_B: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, where query t of row b stands at position ``first_B[b] + t`` and sees keys up to it.

    H a multiple of K; one dtype (fp32, bf16, fp16); ``first_B`` integer, ``first_B + T <= S``. Shape of ``q``; no
    gradient. Whole sequences: ``first`` 0 and T = S. Decoding: T = 1 and ``first`` = length - 1. A prompt in chunks: as
    many queries as the chunk has.
    """
    if not q_BHTD.dtype == k_BKSD.dtype == v_BKSD.dtype:
        raise TypeError(f"attention of {q_BHTD.dtype}, {k_BKSD.dtype} and {v_BKSD.dtype}: cast them to one dtype")
    rows, heads, queries, size = q_BHTD.shape
    kv_heads, keys = k_BKSD.shape[1], k_BKSD.shape[2]
    q, k, v, first = aligned(q_BHTD), aligned(k_BKSD), aligned(v_BKSD), aligned(first_B.to(torch.int32))
    out = torch.empty_like(q)
    if out.numel() == 0:
        return out
    fp32 = q.dtype == torch.float32
    # 64 rows fill a warpgroup's tensor core instruction. fp32 has none: a larger tile would spill its registers.
    tile, warps, stages = (16, 8, 1) if fp32 else (64, 4, 2)
    tiles = ceil_div(queries * (heads // kv_heads), tile)
    _attention[(tiles * rows * kv_heads,)](
        q, k, v, first, out, queries, keys, tiles, math.log2(math.e) / math.sqrt(size),
        HEADS=heads, KV_HEADS=kv_heads, SIZE=size, BLOCK_D=power_of_two_above(size, 16), BLOCK_Q=tile, BLOCK_K=KEYS,
        num_warps=warps, num_stages=stages, **LAUNCH,
    )  # fmt: skip
    return out


class CausalInvariantAttention(torch.autograd.Function):
    """``attention`` of whole sequences. Gradients are those of ``other``, another attention, which is recomputed."""

    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, other: Attention) -> Tensor:
        ctx.save_for_backward(q_BHTD, k_BKTD, v_BKTD)
        ctx.other = other
        first_B = torch.zeros(q_BHTD.shape[0], dtype=torch.int32, device=q_BHTD.device)
        return attention(q_BHTD, k_BKTD, v_BKTD, first_B)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = [i for i in range(3) if ctx.needs_input_grad[i]]
        leaves = [x.detach().requires_grad_(i in needed) for i, x in enumerate(ctx.saved_tensors)]
        with torch.enable_grad():
            out = ctx.other(*leaves)
        found = iter(torch.autograd.grad(out, [leaves[i] for i in needed], grads[0]))
        return (*(next(found) if i in needed else None for i in range(3)), None)


@triton.jit(do_not_specialize=["queries", "keys", "tiles"])
def _attention(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, first: tl.tensor, out: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    tiles: tl.tensor, scale: tl.tensor, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    pairs = tl.num_programs(0) // tiles  # of a row and a key head
    tile = tiles - 1 - tl.program_id(0) // pairs  # the longest first
    pair = tl.program_id(0) % pairs
    row, kv_head = (pair // KV_HEADS).to(tl.int64), pair % KV_HEADS
    r = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    t, head = r // GROUP, kv_head * GROUP + r % GROUP
    start = tl.load(first + row)
    position = start + t
    d = tl.arange(0, BLOCK_D)
    in_q = (t < queries)[:, None] & (d < SIZE)[None, :]
    q_place = ((row * HEADS + head)[:, None] * queries + t[:, None]) * SIZE + d[None, :]
    q_tile = tl.load(q + q_place, mask=in_q, other=0.0)
    limit = tl.minimum(start + queries, keys)  # positions that this row has
    end = tl.minimum(start + (tile * BLOCK_Q + BLOCK_Q - 1) // GROUP + 1, limit)  # and that this tile sees
    kv_base = (row * KV_HEADS + kv_head) * keys * SIZE
    largest = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
    tl.assume(end > 0)
    for block in range(0, end, BLOCK_K):
        s = block + tl.arange(0, BLOCK_K)
        in_k = (s < limit)[None, :] & (d < SIZE)[:, None]
        k_tile = tl.load(k + kv_base + s[None, :] * SIZE + d[:, None], mask=in_k, other=0.0)
        scores = tl.dot(q_tile, k_tile, input_precision="ieee") * scale  # in units of log2, for exp2
        scores = tl.where(s[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        p = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(largest - higher)
        total = total * shrink + tl.sum(p, axis=1)
        in_v = (s < limit)[:, None] & (d < SIZE)[None, :]
        v_tile = tl.load(v + kv_base + s[:, None] * SIZE + d[None, :], mask=in_v, other=0.0)
        mixed = tl.dot(p.to(v_tile.dtype), v_tile, mixed * shrink[:, None], input_precision="ieee")
        largest = higher
    tl.store(out + q_place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=in_q)
