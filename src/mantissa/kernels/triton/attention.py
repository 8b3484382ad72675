"""Row-invariant attention on a GPU: one kernel for whole sequences, for one query over a cache, and for all between.

Keys are taken in blocks of 64 from position 0 of the row, with a running maximum and sum (online softmax), all fp32;
after every ``CHUNK`` of keys the chunk's maximum, sum and mixed values are joined with those of the chunks before it,
in order. A query's result is a function of the query and of the keys up to its own position:

- a tile's rows are the queries of one row and one key head, with the query heads that share it; each row of a tile goes
  through the same operations wherever in the tile it stands, so a decoded query (a tile of its own) and the same query
  inside a whole sequence do the same;
- a block of keys that lies beyond a query has scores of -inf: the maximum stays, the factor that rescales is
  2^0 = 1, the block's probabilities and their sum are 0, and 0 is added. So blocks that only later queries of the same
  tile need change nothing, and neither do chunks;
- what a cache holds beyond a row's length is neither loaded nor counted;
- a value that is inf or NaN makes the queries that see it NaN there, and no others: it enters no product, where an
  earlier query would multiply it by its probability of 0.

Who walks that tree depends on how much there is to do. With many queries one program takes all chunks of its tile; with
few, as in decoding, a program takes one chunk, its three results go through memory, and a second kernel joins them, so
that a long cache is read by the whole GPU.

Probabilities are rounded to the format before the second product (unnormalised: the division by their sum comes at the
end, in fp32) and the result is rounded once, as flash attention rounds.

The backward pass has no part in exactness: it recomputes with the fast family's attention in the same dtype, whose
memory is linear in the length too.

``masked_attention`` is what other people's models ask for: a mask in place of a length, a window, sinks, a soft cap of
the scores, values of another size than keys. Its blocks of keys begin at *position* 0 of the row, wherever its first
column stands, with a running maximum and sum, all fp32. A block of which a query sees nothing leaves its maximum as it
is, the factor that rescales is 2^0 = 1, and 0 is added: so blocks that no query of a tile sees are left out, and which
queries share a tile changes nothing. A sink is where the maximum and the sum begin: the score itself, and 1. A query
that sees nothing, sinks aside, gets 0.

Interpreted on a CPU, compiled for sm_80 and sm_90, run on an H200 (docs/exactness.md has what was measured).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mantissa.kernels.triton import LAUNCH, PROGRAMS, aligned, ceil_div, exp, power_of_two_above

KEYS = 64  # a block of keys
_LOG2E = math.log2(math.e)
CHUNK = 512  # keys that a program takes where there are few queries: a multiple of KEYS
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
    tile, warps, stages = (16, 8, 1) if fp32 else (64, 8 if size > 64 else 4, 2)
    tiles, chunks = ceil_div(queries * (heads // kv_heads), tile), ceil_div(keys, CHUNK)
    programs, depth = tiles * rows * kv_heads, power_of_two_above(size, 16)
    apart = chunks > 1 and programs < PROGRAMS
    # A chunk's sums of every query, and beside each its maximum and its sum.
    parts, sums = (
        torch.empty(chunks if apart else 0, *q.shape[:3], n, dtype=torch.float32, device=q.device) for n in (size, 2)
    )
    _attention[programs, chunks if apart else 1](
        q, k, v, first, out, parts, sums, queries, keys, tiles, math.log2(math.e) / math.sqrt(size),
        HEADS=heads, KV_HEADS=kv_heads, SIZE=size, APART=apart, CHUNK=CHUNK, BLOCK_D=depth, BLOCK_Q=tile,
        BLOCK_K=KEYS, num_warps=warps, num_stages=stages, **LAUNCH,
    )  # fmt: skip
    if apart:
        count = rows * heads * queries
        _join[(count,)](parts, sums, out, count, chunks, SIZE=size, BLOCK_D=depth, num_warps=1, **LAUNCH)
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


@triton.jit
def _chunk(
    q_tile: tl.tensor, k_base: tl.tensor, v_base: tl.tensor, position: tl.tensor, start: tl.tensor, end: tl.tensor,
    limit: tl.tensor, scale: tl.tensor, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Largest score, sum of 2^(score - largest) and values mixed by it, over the keys from ``start`` to ``end``."""
    d = tl.arange(0, BLOCK_D)
    largest = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
    spoiled = tl.full((BLOCK_D,), 0x7FFFFFFF, dtype=tl.int32)  # the first position whose value is not finite
    for block in range(start, end, BLOCK_K):
        s = block + tl.arange(0, BLOCK_K)
        in_k = (s < limit)[None, :] & (d < SIZE)[:, None]
        k_tile = tl.load(k_base + s[None, :] * SIZE + d[:, None], mask=in_k, other=0.0)
        scores = tl.dot(q_tile, k_tile, input_precision="ieee") * scale  # in units of log2, for exp2
        scores = tl.where(s[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a query that sees nothing yet
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(p, axis=1)
        in_v = (s < limit)[:, None] & (d < SIZE)[None, :]
        v_tile = tl.load(v_base + s[:, None] * SIZE + d[None, :], mask=in_v, other=0.0)
        finite = tl.abs(v_tile) < float("inf")
        spoiled = tl.minimum(spoiled, tl.min(tl.where(finite, 0x7FFFFFFF, s[:, None]), axis=0))
        v_tile = tl.where(finite, v_tile, 0.0)
        mixed = tl.dot(p.to(v_tile.dtype), v_tile, mixed * shrink[:, None], input_precision="ieee")
        largest = higher
    return largest, total, tl.where(position[:, None] >= spoiled[None, :], float("nan"), mixed)


@triton.jit
def _joined(
    largest: tl.tensor, total: tl.tensor, mixed: tl.tensor, top: tl.tensor, sum: tl.tensor, more: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What came before, and the next chunk. Of two that see nothing the result sees nothing."""
    higher = tl.maximum(largest, top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    before, now = tl.exp2(largest - base), tl.exp2(top - base)
    return higher, total * before + sum * now, mixed * before[:, None] + more * now[:, None]


@triton.jit
def _place(
    tiles: tl.tensor, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_Q: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """This program's tile, row and key head, and of each of its queries the position and the head."""
    pairs = tl.num_programs(0) // tiles  # of a row and a key head
    tile = tiles - 1 - tl.program_id(0) // pairs  # the longest first
    pair = tl.program_id(0) % pairs
    kv_head = pair % KV_HEADS
    r = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    return tile, (pair // KV_HEADS).to(tl.int64), kv_head, r // GROUP, kv_head * GROUP + r % GROUP


@triton.jit(do_not_specialize=["queries", "keys", "tiles"])
def _attention(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, first: tl.tensor, out: tl.tensor, parts: tl.tensor, sums: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, tiles: tl.tensor, scale: tl.tensor, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, APART: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile, row, kv_head, t, head = _place(tiles, GROUP, KV_HEADS, BLOCK_Q)
    start = tl.load(first + row)
    position = start + t
    d = tl.arange(0, BLOCK_D)
    in_q = (t < queries)[:, None] & (d < SIZE)[None, :]
    query = (row * HEADS + head) * queries + t
    q_tile = tl.load(q + query[:, None] * SIZE + d[None, :], mask=in_q, other=0.0)
    limit = tl.minimum(start + queries, keys)  # positions that this row has
    end = tl.minimum(start + (tile * BLOCK_Q + BLOCK_Q - 1) // GROUP + 1, limit)  # and that this tile sees
    kv_base = (row * KV_HEADS + kv_head) * keys * SIZE
    tl.assume(end > 0)
    if APART:
        begin = tl.program_id(1) * CHUNK
        largest, total, mixed = _chunk(
            q_tile, k + kv_base, v + kv_base, position, begin, tl.minimum(begin + CHUNK, end), limit, scale, SIZE,
            BLOCK_D, BLOCK_Q, BLOCK_K,
        )  # fmt: skip
        place = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // tiles // KV_HEADS * HEADS * queries) + query
        tl.store(parts + place[:, None] * SIZE + d[None, :], mixed, mask=in_q)
        tl.store(sums + place * 2, largest, mask=t < queries)
        tl.store(sums + place * 2 + 1, total, mask=t < queries)
    else:
        largest = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_Q,), dtype=tl.float32)
        mixed = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
        for begin in range(0, end, CHUNK):
            chunk_end = tl.minimum(begin + CHUNK, end)
            top, sum, more = _chunk(
                q_tile, k + kv_base, v + kv_base, position, begin, chunk_end, limit, scale, SIZE, BLOCK_D, BLOCK_Q,
                BLOCK_K,
            )  # fmt: skip
            largest, total, mixed = _joined(largest, total, mixed, top, sum, more)
        tl.store(out + query[:, None] * SIZE + d[None, :], (mixed / total[:, None]).to(out.dtype.element_ty), mask=in_q)


@triton.jit(do_not_specialize=["count", "chunks"])
def _join(
    parts: tl.tensor, sums: tl.tensor, out: tl.tensor, count: tl.tensor, chunks: tl.tensor, SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Join the chunks of one query, as ``_attention`` does where it takes them all."""
    query = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    d = tl.arange(0, BLOCK_D)
    largest = tl.full((1,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((1,), dtype=tl.float32)
    mixed = tl.zeros((1, BLOCK_D), dtype=tl.float32)
    place = query
    for _ in range(0, chunks):
        more = tl.load(parts + place[:, None] * SIZE + d[None, :], mask=(d < SIZE)[None, :], other=0.0)
        top, sum = tl.load(sums + place * 2), tl.load(sums + place * 2 + 1)
        largest, total, mixed = _joined(largest, total, mixed, top, sum, more)
        place += count
    inside = (d < SIZE)[None, :]
    tl.store(out + query[:, None] * SIZE + d[None, :], (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)


def masked_attention(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSE: Tensor,
    seen_BHTS: Tensor,
    first_B: Tensor,
    scale: float,
    cap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """softmax(s) v over the keys that ``seen`` is true of, s = scale q k^T, or cap tanh(scale q k^T / cap).

    H a multiple of K; one dtype (fp32, bf16, fp16). ``seen``: bool, its first two dimensions may be 1. ``first_B``:
    the position in its row of each row's first key; where it is below 0, keys before position 0 are never seen.
    ``sinks_H``: a score that takes part in the softmax, without a value. B,H,T,E in the dtype of ``q``; no gradient.
    """
    if not q_BHTD.dtype == k_BKSD.dtype == v_BKSE.dtype:
        raise TypeError(f"attention of {q_BHTD.dtype}, {k_BKSD.dtype} and {v_BKSE.dtype}: cast them to one dtype")
    (rows, heads, queries, size), (kv_heads, keys), values = q_BHTD.shape, k_BKSD.shape[1:3], v_BKSE.shape[3]
    q, k, v = aligned(q_BHTD), aligned(k_BKSD), aligned(v_BKSE)
    seen, first = aligned(seen_BHTS).view(torch.uint8), aligned(first_B.to(torch.int32))
    sinks = first if sinks_H is None else aligned(sinks_H.float())
    out = torch.empty(rows, heads, queries, values, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    fp32 = q.dtype == torch.float32
    wide = max(size, values) > 64
    tile, warps, stages = (16, 8, 1) if fp32 else (64, 8 if wide else 4, 2)  # as ``attention``'s
    tiles = ceil_div(queries * (heads // kv_heads), tile)
    one = queries * keys  # mask values of a head
    of_head, of_row = one if seen.shape[1] > 1 else 0, one * seen.shape[1] if seen.shape[0] > 1 else 0
    _masked_attention[(tiles * rows * kv_heads,)](
        q, k, v, seen, first, sinks, out, queries, keys, tiles, of_row, of_head, scale / cap if cap else scale * _LOG2E,
        cap * _LOG2E, HEADS=heads, KV_HEADS=kv_heads, SIZE=size, VALUES=values, CAPPED=bool(cap),
        SINKS=sinks_H is not None, BLOCK_D=power_of_two_above(size, 16), BLOCK_E=power_of_two_above(values, 16),
        BLOCK_Q=tile, BLOCK_K=KEYS, num_warps=warps, num_stages=stages, **LAUNCH,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["queries", "keys", "tiles", "of_row", "of_head"])
def _masked_attention(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, seen: tl.tensor, first: tl.tensor, sinks: tl.tensor, out: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, tiles: tl.tensor, of_row: tl.tensor, of_head: tl.tensor, scale: tl.tensor,
    cap: tl.tensor, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, VALUES: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    _, row, kv_head, t, head = _place(tiles, HEADS // KV_HEADS, KV_HEADS, BLOCK_Q)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    in_q = t < queries
    query = (row * HEADS + head) * queries + t
    q_tile = tl.load(q + query[:, None] * SIZE + d[None, :], mask=in_q[:, None] & (d < SIZE)[None, :], other=0.0)
    start = tl.load(first + row)
    k_base = k + (row * KV_HEADS + kv_head) * keys * SIZE
    v_base = v + (row * KV_HEADS + kv_head) * keys * VALUES
    mask = seen + row * of_row + head.to(tl.int64) * of_head + t.to(tl.int64) * keys
    if SINKS:
        largest = tl.load(sinks + head, mask=in_q, other=0.0) * 1.4426950408889634
        total = tl.full((BLOCK_Q,), 1.0, dtype=tl.float32)
    else:
        largest, total = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32), tl.zeros((BLOCK_Q,), dtype=tl.float32)
    sees = tl.zeros((BLOCK_Q,), dtype=tl.int32)
    mixed = tl.zeros((BLOCK_Q, BLOCK_E), dtype=tl.float32)
    begin, end = tl.maximum(start, 0) // BLOCK_K * BLOCK_K, start + keys
    low, high = end, begin  # of the blocks of which a query of this tile sees any
    for block in range(begin, end, BLOCK_K):
        s = block + tl.arange(0, BLOCK_K) - start  # the column of each key
        inside = in_q[:, None] & ((s >= 0) & (s < keys))[None, :]
        any = tl.max(tl.max(tl.load(mask[:, None] + s[None, :], mask=inside, other=0).to(tl.int32), axis=1), axis=0)
        low = tl.where(any > 0, tl.minimum(low, block), low)
        high = tl.where(any > 0, block + BLOCK_K, high)
    for block in range(low, high, BLOCK_K):
        s = block + tl.arange(0, BLOCK_K) - start
        inside = (s >= 0) & (s < keys)
        k_tile = tl.load(k_base + s[None, :] * SIZE + d[:, None], mask=inside[None, :] & (d < SIZE)[:, None], other=0.0)
        scores = tl.dot(q_tile, k_tile, input_precision="ieee") * scale
        if CAPPED:  # tanh(x) = 1 - 2 / (e^2x + 1)
            twice = tl.minimum(tl.maximum(scores * 2.0, -100.0), 80.0)
            scores = (1.0 - tl.div_rn(tl.full((BLOCK_Q, BLOCK_K), 2.0, dtype=tl.float32), exp(twice) + 1.0)) * cap
        visible = tl.load(mask[:, None] + s[None, :], mask=in_q[:, None] & inside[None, :], other=0) != 0
        scores = tl.where(visible, scores, float("-inf"))
        sees = tl.maximum(sees, tl.max(visible.to(tl.int32), axis=1))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a query that sees nothing yet
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(p, axis=1)
        in_v = inside[:, None] & (e < VALUES)[None, :]
        v_tile = tl.load(v_base + s[:, None] * VALUES + e[None, :], mask=in_v, other=0.0)
        mixed = tl.dot(p.to(v_tile.dtype), v_tile, mixed * shrink[:, None], input_precision="ieee")
        largest = higher
    result = tl.where((sees > 0)[:, None], mixed / tl.where(sees > 0, total, 1.0)[:, None], 0.0)
    place = out + query[:, None] * VALUES + e[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=in_q[:, None] & (e < VALUES)[None, :])
