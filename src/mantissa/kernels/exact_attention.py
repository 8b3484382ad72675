"""Attention of which each query's row is the same in training, in prefill and in decode, to the last bit.

Legend: B sequences, H query heads, K key heads, G = H / K queries that share a key head, T query positions, S key
positions, D head size, N = B*K, M rows of queries that see the same keys (G times some positions).

What a row's number may depend on is its query and the keys and values up to its own position. Three rules make it so:

- Keys come in fixed blocks from position 0. A number of keys is rounded up to ``KEYS`` = 16, which the cache's lengths
  are multiples of, and what lies beyond the query has a score of -inf, so a probability of exactly 0. Adding 0 * v,
  v finite, changes no sum; so it does not matter how many such keys there are, or what they hold.
- P V is summed in blocks of ``VALUES`` = 128 keys, and the blocks' sums are added in order: libraries cut a long sum
  where its length suggests (at some 200 terms, here), a short one not at all.
- The number of rows is a multiple of what the probe found sufficient, or every product is a tile of one size.

``rows``, one function, serves all three uses: what differs is the mask. The rounding points are the fast family's:
scores and softmax in fp32, the normalised probabilities rounded to the format, the result rounded once.

Of the two possible schemes, softmax over all keys (two-pass) and a running maximum (online), this is the first: the
maximum over all keys is exact in any order, so nothing is ever rescaled, and the fast family's roundings stay.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mantissa.kernels.attention import CausalAttention
from mantissa.kernels.exact_plan import Choice
from mantissa.precision import NumberFormat, round_cached, round_to_format_

KEYS = 16  # keys come in multiples of this: the widest vector of a CPU, so that a softmax's lanes stay the same
VALUES = 128  # keys of one sum of P V
_TILE = 64  # keys of one tile, where every product is a tile
_QUERIES = 64  # positions at a time in training: a multiple of every number of rows that the probe tries


class ExactAttention(torch.autograd.Function):
    """``CausalAttention`` with the exact forward; the backward is its own, which need not be exact.

    Keys and values are rounded to ``kv_fmt`` first, as the cache would, gradients passing straight through.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BHTD: Tensor,
        k_BKTD: Tensor,
        v_BKTD: Tensor,
        fmt: NumberFormat,
        kv_fmt: NumberFormat,
        choice: Choice,
    ) -> Tensor:
        (batch, heads, length, size), kv_heads = q_BHTD.shape, k_BKTD.shape[1]
        group = heads // kv_heads
        step = choice.rows // math.gcd(group, choice.rows)  # positions that make whole multiples of rows
        q = _padded(q_BHTD.reshape(batch * kv_heads, group, length, size), 2, step)
        k, v = (_padded(round_cached(x, kv_fmt).flatten(0, 1), 1, KEYS) for x in (k_BKTD, v_BKTD))
        out = q.new_empty(batch * kv_heads, group, length, size)
        for start in range(0, length, _QUERIES):
            stop, padded = min(start + _QUERIES, length), min(start + _QUERIES, q.shape[2])
            keys = -(-padded // KEYS) * KEYS
            mask = torch.full((padded - start, keys), float("-inf"), device=q.device).triu_(start + 1)
            rows_NMD = attended(
                q[:, :, start:padded].flatten(1, 2), k[:, :keys], v[:, :keys], mask.repeat(group, 1), fmt, choice
            )
            out[:, :, start:stop] = rows_NMD.view(-1, group, padded - start, size)[:, :, : stop - start]
        ctx.save_for_backward(q[:, :, :length], k[:, :length], v[:, :length], out)
        ctx.fmt, ctx.shape = fmt, q_BHTD.shape
        return out.view(q_BHTD.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*CausalAttention.backward(ctx, *grads), None, None)


def cached(
    q_BHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, length_B: Tensor, fmt: NumberFormat, choice: Choice
) -> Tensor:
    """One query a row against the first ``length_B`` keys of a cache. Shape of ``q``."""
    (batch, heads, size), (kv_heads, _) = q_BHD.shape, k_BKSD.shape[1:3]
    group = heads // kv_heads
    q = _padded(q_BHD.reshape(batch * kv_heads, group, size), 1, choice.rows)
    k, v = (_padded(x.flatten(0, 1), 1, KEYS) for x in (k_BKSD, v_BKSD))
    beyond_BS = torch.arange(k.shape[1], device=q.device) >= length_B.unsqueeze(1)
    mask_BS = torch.zeros(beyond_BS.shape, device=q.device).masked_fill_(beyond_BS, float("-inf"))
    mask_N1S = mask_BS.repeat_interleave(kv_heads, 0).unsqueeze(1)
    return attended(q, k, v, mask_N1S, fmt, choice)[:, :group].reshape(q_BHD.shape)


def attended(q_NMD: Tensor, k_NSD: Tensor, v_NSD: Tensor, mask: Tensor, fmt: NumberFormat, choice: Choice) -> Tensor:
    """round(round(softmax(q k^T / sqrt(D) + mask)) v). ``mask``: 0 or -inf, broadcast to N,M,S. Shape of ``q``."""
    if choice.way == "row tiles":
        return _in_tiles(q_NMD, k_NSD, v_NSD, mask, fmt, choice.rows)
    scale = q_NMD.shape[-1] ** -0.5
    wide = choice.way == "fp64"
    if wide:
        scores = torch.bmm(q_NMD.double(), k_NSD.double().transpose(1, 2)).mul_(scale).float().add_(mask)
        p = torch.softmax(scores.double(), dim=-1).float()
    else:
        # Mask and scale enter with the product: on their own they would each be one more pass over the scores.
        scores = torch.baddbmm(mask, q_NMD, k_NSD.transpose(1, 2), alpha=scale)
        p = torch.softmax(scores, dim=-1)
    p = round_to_format_(p, fmt)
    if wide:
        return round_to_format_(torch.bmm(p.double(), v_NSD.double()).float(), fmt)
    return round_to_format_(_summed(p, v_NSD, VALUES), fmt)


def _summed(p_NMS: Tensor, v_NSD: Tensor, block: int) -> Tensor:
    """P V, block of keys by block of keys, in order."""
    total = torch.bmm(p_NMS[:, :, :block], v_NSD[:, :block])
    for start in range(block, p_NMS.shape[2], block):
        total += torch.bmm(p_NMS[:, :, start : start + block], v_NSD[:, start : start + block])
    return total


def _in_tiles(q_NMD: Tensor, k_NSD: Tensor, v_NSD: Tensor, mask: Tensor, fmt: NumberFormat, rows: int) -> Tensor:
    """The same with every product one tile: ``rows`` queries of one head by ``_TILE`` keys; sums over keys too."""
    heads, count, size = q_NMD.shape
    keys = v_NSD.shape[1]
    k, v = _padded(k_NSD, 1, _TILE), _padded(v_NSD, 1, _TILE)
    whole = k.shape[1]
    p = torch.full((heads, count, whole), float("-inf"), device=q_NMD.device)
    for head, row, start in _tiles(heads, count, whole, rows):
        tile_RS = torch.mm(q_NMD[head, row : row + rows], k[head, start : start + _TILE].t())
        p[head, row : row + rows, start : start + _TILE] = tile_RS
    p = p.mul_(size**-0.5)
    p[:, :, :keys] += mask
    p[:, :, keys:] = float("-inf")
    p = p.sub_(p.amax(-1, keepdim=True)).exp_()
    total = p[:, :, :_TILE].sum(-1, keepdim=True)
    for start in range(_TILE, whole, _TILE):
        total += p[:, :, start : start + _TILE].sum(-1, keepdim=True)
    p = round_to_format_(p.div_(total), fmt)
    out = torch.zeros(q_NMD.shape, device=q_NMD.device)
    for head, row, start in _tiles(heads, count, whole, rows):
        part = torch.mm(p[head, row : row + rows, start : start + _TILE], v[head, start : start + _TILE])
        out[head, row : row + rows] += part
    return round_to_format_(out, fmt)


def _tiles(heads: int, count: int, keys: int, rows: int) -> list[tuple[int, int, int]]:
    """Head, first row and first key of every tile, keys in order."""
    return [
        (head, row, start) for head in range(heads) for row in range(0, count, rows) for start in range(0, keys, _TILE)
    ]


def _padded(x: Tensor, dim: int, multiple: int) -> Tensor:
    """``x``, contiguous, with zeros behind it along ``dim`` up to a multiple; ``x`` itself where it is that already."""
    length = x.shape[dim]
    padded = -(-length // multiple) * multiple
    if padded == length:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = padded
    out = x.new_empty(shape)
    out.narrow(dim, 0, length).copy_(x)
    out.narrow(dim, length, padded - length).zero_()
    return out
