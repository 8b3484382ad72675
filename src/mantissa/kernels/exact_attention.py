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

``attended``, one function, serves all three uses: what differs is the mask. The rounding points are the fast family's:
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
_LONG = 128  # up to here 16 positions at a time save a quarter of all scores; beyond, 32 do with fewer calls


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
        k, v = round_cached(k_BKTD, kv_fmt), round_cached(v_BKTD, kv_fmt)
        length = q_BHTD.shape[2]
        q, k, v = _laid_out(q_BHTD, k, v, choice)
        out = _causal(q, k, v, length, length, fmt, choice)
        ctx.save_for_backward(q[:, :, :length], k[:, :length], v[:, :length], out)
        ctx.fmt, ctx.shape, ctx.block = fmt, q_BHTD.shape, _block(length)
        return out.view(q_BHTD.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*CausalAttention.backward(ctx, *grads), None, None)


def causal(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, fmt: NumberFormat, choice: Choice) -> Tensor:
    """Queries of the last T of S positions against the keys up to each of them: T = S but in a chunk of a prefill.

    Shape of ``q``. No gradient.
    """
    q, k, v = _laid_out(q_BHTD, k_BKSD, v_BKSD, choice)
    return _causal(q, k, v, q_BHTD.shape[2], k_BKSD.shape[2], fmt, choice).view(q_BHTD.shape)


def _laid_out(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, choice: Choice) -> tuple[Tensor, Tensor, Tensor]:
    """q as N,G,T,D and k, v as N,S,D, contiguous, with zeros behind: whole multiples of rows, and keys for them all."""
    kv_heads, first = k_BKSD.shape[1], k_BKSD.shape[2] - q_BHTD.shape[2]
    group = q_BHTD.shape[1] // kv_heads
    q = _padded(q_BHTD, 2, choice.rows // math.gcd(group, choice.rows))
    k, v = (_padded(x, 2, KEYS, first + q.shape[2]).flatten(0, 1) for x in (k_BKSD, v_BKSD))
    return q.view(-1, group, *q.shape[2:]), k, v


def _block(length: int) -> int:
    """Positions at a time: a multiple of every number of rows that the probe tries."""
    return 16 if length <= _LONG else 32


def _causal(q: Tensor, k: Tensor, v: Tensor, length: int, last: int, fmt: NumberFormat, choice: Choice) -> Tensor:
    """The first ``length`` positions of ``q``, of which the last stands at ``last`` - 1. Shape N,G,length,D."""
    group, first = q.shape[1], last - length
    out = q.new_empty(len(q), group, length, q.shape[3])
    queries = _block(last)
    for start in range(0, length, queries):
        stop, padded = min(start + queries, length), min(start + queries, q.shape[2])
        keys = -(-(first + padded) // KEYS) * KEYS
        mask = torch.full((padded - start, keys), float("-inf"), device=q.device).triu_(first + start + 1)
        scores = mask.repeat(group, 1).repeat(len(q), 1, 1)
        rows_NMD = attended(q[:, :, start:padded].flatten(1, 2), k[:, :keys], v[:, :keys], scores, fmt, choice)
        out[:, :, start:stop] = rows_NMD.view(len(q), group, padded - start, -1)[:, :, : stop - start]
    return out


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
    scores_BKMS = q.new_empty(batch, kv_heads, q.shape[1], k.shape[1]).copy_(mask_BS[:, None, None])
    return attended(q, k, v, scores_BKMS.flatten(0, 1), fmt, choice)[:, :group].reshape(q_BHD.shape)


def attended(
    q_NMD: Tensor, k_NSD: Tensor, v_NSD: Tensor, scores_NMS: Tensor, fmt: NumberFormat, choice: Choice
) -> Tensor:
    """round(round(softmax(q k^T / sqrt(D))) v). Shape of ``q``.

    ``scores_NMS``: 0 where a query sees a key and -inf where not; the scores are written over it.
    """
    if choice.way == "row tiles":
        return _in_tiles(q_NMD, k_NSD, v_NSD, scores_NMS, fmt, choice.rows)
    scale = q_NMD.shape[-1] ** -0.5
    if choice.way == "fp64":
        scores_NMS += torch.bmm(q_NMD.double(), k_NSD.double().transpose(1, 2)).mul_(scale).float()
        p = round_to_format_(torch.softmax(scores_NMS.double(), dim=-1).float(), fmt)
        return round_to_format_(torch.bmm(p.double(), v_NSD.double()).float(), fmt)
    # Mask and scale enter with the product: on their own they would each be one more pass over the scores.
    scores_NMS.baddbmm_(q_NMD, k_NSD.transpose(1, 2), alpha=scale)
    p = round_to_format_(torch.softmax(scores_NMS, dim=-1), fmt)
    return round_to_format_(_summed(p, v_NSD), fmt)


def _summed(p_NMS: Tensor, v_NSD: Tensor) -> Tensor:
    """P V, block of keys by block of keys, in order."""
    total = torch.bmm(p_NMS[:, :, :VALUES], v_NSD[:, :VALUES])
    for start in range(VALUES, p_NMS.shape[2], VALUES):
        total += torch.bmm(p_NMS[:, :, start : start + VALUES], v_NSD[:, start : start + VALUES])
    return total


def _in_tiles(q_NMD: Tensor, k_NSD: Tensor, v_NSD: Tensor, scores_NMS: Tensor, fmt: NumberFormat, rows: int) -> Tensor:
    """The same with every product one tile, ``rows`` queries of one head by ``_TILE`` keys, and sums over keys too."""
    heads, count, size = q_NMD.shape
    k, v = _padded(k_NSD, 1, _TILE), _padded(v_NSD, 1, _TILE)
    p = torch.full((heads, count, k.shape[1]), float("-inf"), device=q_NMD.device)
    p[:, :, : scores_NMS.shape[2]] = scores_NMS
    tiles = _tiles(heads, count, k.shape[1], rows)
    for head, row, key in tiles:
        tile_RS = torch.mm(q_NMD[head, row : row + rows], k[head, key : key + _TILE].t())
        p[head, row : row + rows, key : key + _TILE] += tile_RS.mul_(size**-0.5)
    p = p.sub_(p.amax(-1, keepdim=True)).exp_()
    sums = [p[:, :, key : key + _TILE].sum(-1, keepdim=True) for key in range(0, k.shape[1], _TILE)]
    p = round_to_format_(p.div_(sum(sums[1:], sums[0])), fmt)
    out = torch.zeros(q_NMD.shape, device=q_NMD.device)
    for head, row, key in tiles:
        p_RS, v_SD = p[head, row : row + rows, key : key + _TILE], v[head, key : key + _TILE]
        out[head, row : row + rows] += torch.mm(p_RS, v_SD)
    return round_to_format_(out, fmt)


def _tiles(heads: int, count: int, keys: int, rows: int) -> list[tuple[int, int, int]]:
    """Head, first row and first key of every tile, keys in order."""
    return [(head, row, key) for head in range(heads) for row in range(0, count, rows) for key in range(0, keys, _TILE)]


def _padded(x: Tensor, dim: int, multiple: int, least: int = 0) -> Tensor:
    """``x``, contiguous, with zeros behind it along ``dim`` up to a multiple that is at least ``least``."""
    length = x.shape[dim]
    padded = -(-max(length, least) // multiple) * multiple
    if padded == length:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = padded
    out = x.new_empty(shape)
    out.narrow(dim, 0, length).copy_(x)
    out.narrow(dim, length, padded - length).zero_()
    return out
