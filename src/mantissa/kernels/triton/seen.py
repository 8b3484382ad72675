"""Attention under any mask on a GPU, row-invariant: what other people's models ask for, in one kernel.

As ``attention.py``, with what a model of transformers may have besides: a mask in place of a length, a window, sinks,
a soft cap of the scores, values of another size than keys. Keys are taken in blocks of 64 from *position* 0 of the row,
wherever its first column stands, with a running maximum and sum, all fp32. A block of which a query sees nothing leaves
its maximum as it is, the factor that rescales is 2^0 = 1, and 0 is added: so blocks that no query of a tile sees are
left out, and which queries share a tile changes nothing.

A sink is where the maximum and the sum begin: the score itself, and 1. A query that sees nothing, sinks aside, gets 0.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mantissa.kernels.triton import LAUNCH, aligned, ceil_div, exp, power_of_two_above

KEYS = 64  # a block of keys
_LOG2E = math.log2(math.e)


def attention(
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
    tile, warps, stages = (16, 8, 1) if fp32 else (64, 8 if wide else 4, 2)  # as attention.py's
    tiles = ceil_div(queries * (heads // kv_heads), tile)
    one = queries * keys  # mask values of a head
    of_head, of_row = one if seen.shape[1] > 1 else 0, one * seen.shape[1] if seen.shape[0] > 1 else 0
    _attention[(tiles * rows * kv_heads,)](
        q, k, v, seen, first, sinks, out, queries, keys, tiles, of_row, of_head, scale / cap if cap else scale * _LOG2E,
        cap * _LOG2E, HEADS=heads, KV_HEADS=kv_heads, SIZE=size, VALUES=values, CAPPED=bool(cap),
        SINKS=sinks_H is not None, BLOCK_D=power_of_two_above(size, 16), BLOCK_E=power_of_two_above(values, 16),
        BLOCK_Q=tile, BLOCK_K=KEYS, num_warps=warps, num_stages=stages, **LAUNCH,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["queries", "keys", "tiles", "of_row", "of_head"])
def _attention(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, seen: tl.tensor, first: tl.tensor, sinks: tl.tensor, out: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, tiles: tl.tensor, of_row: tl.tensor, of_head: tl.tensor, scale: tl.tensor,
    cap: tl.tensor, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, VALUES: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    pairs = tl.num_programs(0) // tiles  # of a row and a key head
    tile = tiles - 1 - tl.program_id(0) // pairs  # the longest first
    pair = tl.program_id(0) % pairs
    row, kv_head = (pair // KV_HEADS).to(tl.int64), pair % KV_HEADS
    r = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    t, head = r // GROUP, kv_head * GROUP + r % GROUP
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
        largest = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_Q,), dtype=tl.float32)
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
