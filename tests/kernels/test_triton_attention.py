"""Triton's attention against float64, and every way of asking for one query against every other, bit by bit.

On a GPU, or interpreted on a CPU with TRITON_INTERPRET=1: there ``dot`` is numpy's, so what these tests show is that
masks, places and blocks are right, and not how a tensor core sums.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from attention_oracle import attended
from mantissa.kernels import NativeKernels
from mantissa.precision import BF16, FP16, FP32, NumberFormat, round_to_format
from triton_interpreter import DEVICE, INTERPRETED, needs_a_device

pytestmark = needs_a_device
formats = pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=str)
HEADS = [(4, 4, 16), (6, 2, 32), (8, 1, 24)]  # query heads, key heads, size


def attention(q: Tensor, k: Tensor, v: Tensor, first: Tensor | None = None) -> Tensor:
    from mantissa.kernels.triton import attention as triton_attention

    first = torch.zeros(q.shape[0], dtype=torch.int32) if first is None else first
    return triton_attention.attention(*(x.to(DEVICE) for x in (q, k, v, first))).cpu()


def qkv(fmt: NumberFormat, heads: int, kv_heads: int, size: int, length: int, rows: int = 2) -> tuple[Tensor, ...]:
    return tuple(torch.randn(rows, h, length, size).to(fmt.dtype) for h in (heads, kv_heads, kv_heads))


@formats
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("length", [1, 17, 130])
def test_against_float64(length: int, shape: tuple[int, int, int], fmt: NumberFormat) -> None:
    """Each probability and the result are rounded once: an ulp of the largest value covers both."""
    q, k, v = qkv(fmt, *shape, length)
    error = (attention(q, k, v).double() - attended(q.double(), k.double(), v.double())).abs()
    largest = v.double().abs().amax()
    assert bool((error <= fmt.epsilon * largest + 2.0**-20 * largest).all())
    assert attention(q, k, v).shape == q.shape


@formats
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_a_decoded_query_is_the_sequence_s(shape: tuple[int, int, int], fmt: NumberFormat) -> None:
    """Each position, decoded over a cache that is longer and holds rubbish beyond the row's length."""
    length, capacity = 130, 160
    q, k, v = qkv(fmt, *shape, length)
    whole = attention(q, k, v)
    cache_k, cache_v = (torch.full((2, shape[1], capacity, shape[2]), float("nan")).to(fmt.dtype) for _ in range(2))
    positions = range(length) if not INTERPRETED else [0, 1, 30, 63, 64, 65, 100, 127, 128, 129]
    for t in positions:
        cache_k[:, :, : t + 1], cache_v[:, :, : t + 1] = k[:, :, : t + 1], v[:, :, : t + 1]
        cache_k[:, :, t + 1 :], cache_v[:, :, t + 1 :] = float("nan"), float("inf")
        one = attention(q[:, :, t : t + 1], cache_k, cache_v, torch.full((2,), t))
        assert torch.equal(one, whole[:, :, t : t + 1])


@formats
def test_batches_prefixes_and_chunks_change_nothing(fmt: NumberFormat) -> None:
    length, rows = (150, 3) if not INTERPRETED else (100, 2)
    q, k, v = qkv(fmt, 4, 2, 16, length, rows)
    whole = attention(q, k, v)
    for kept in (1, 64, length - 1):  # what follows a position
        assert torch.equal(attention(q[:, :, :kept], k[:, :, :kept], v[:, :, :kept]), whole[:, :, :kept])
    shuffled = torch.tensor([1, 0, 1])  # batch mates and the place among them
    assert torch.equal(attention(q[shuffled], k[shuffled], v[shuffled]), whole[shuffled])
    for chunk in (29, 64):  # a prompt in pieces, over a cache that holds all of it
        parts = []
        for start in range(0, length, chunk):
            first = torch.full((rows,), start)
            parts.append(attention(q[:, :, start : start + chunk], k, v, first))
        assert torch.equal(torch.cat(parts, 2), whole)


@pytest.mark.parametrize("fmt", [FP32, BF16], ids=str)
@pytest.mark.parametrize("length", [64, 130])
def test_chunks_apart_or_by_one_program(fmt: NumberFormat, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 keys: a query's bits do not depend on who takes them, nor on how many there are beyond it."""
    from mantissa.kernels.triton import attention as triton_attention

    monkeypatch.setattr(triton_attention, "CHUNK", 64)
    q, k, v = qkv(fmt, 4, 2, 16, length)
    found = []
    for programs in (0, 1 << 30):  # one program takes all chunks; every chunk has a program
        monkeypatch.setattr(triton_attention, "PROGRAMS", programs)
        found.append(attention(q, k, v))
        longer = torch.cat((k, torch.randn_like(k)), 2), torch.cat((v, torch.randn_like(v)), 2)
        found.append(attention(q[:, :, -1:], *longer, torch.full((2,), length - 1)))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert torch.equal(found[0][:, :, -1:], found[1])
    error = (found[0].double() - attended(q.double(), k.double(), v.double())).abs()
    assert bool((error <= (fmt.epsilon + 2.0**-20) * v.double().abs().amax()).all())


@pytest.mark.parametrize(("bad", "programs"), [(float("inf"), 0), (float("nan"), 1 << 30)])
def test_a_value_that_is_not_finite_reaches_who_sees_it(
    bad: float, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mantissa.kernels.triton import attention as triton_attention

    monkeypatch.setattr(triton_attention, "CHUNK", 64)
    monkeypatch.setattr(triton_attention, "PROGRAMS", programs)
    q, k, v = qkv(BF16, 4, 2, 16, 100)
    clean = attention(q, k, v)
    v[1, 0, 70, 3] = bad
    found = attention(q, k, v)
    assert torch.equal(found.isnan().nonzero().unique(dim=0), _places(q, slice(70, None), 3))
    assert torch.equal(found[:, :, :70], clean[:, :, :70])
    assert torch.equal(found[0], clean[0])


def _places(q: Tensor, positions: slice, feature: int) -> Tensor:
    """Indices in ``q`` of a feature at some positions of row 1, of the query heads that share key head 0."""
    places = torch.zeros(q.shape, dtype=torch.bool)
    places[1, : q.shape[1] // 2, positions, feature] = True
    return places.nonzero()


@formats
def test_scores_that_spread_far_do_not_overflow(fmt: NumberFormat) -> None:
    """Scores of 200 and of -200 in turn, the largest in the last block: every earlier sum is rescaled to zero."""
    q = torch.ones(1, 1, 130, 16)
    k = torch.full((1, 1, 130, 16), -50.0)
    k[:, :, 129] = 50.0
    v = torch.arange(130.0).view(1, 1, 130, 1).expand(1, 1, 130, 16)
    q, k, v = (round_to_format(x, fmt).to(fmt.dtype) for x in (q, k, v))
    out = attention(q, k, v)
    assert torch.equal(out[0, 0, 129], v[0, 0, 129])
    torch.testing.assert_close(out[0, 0, 128].double(), v[0, 0, :129].double().mean(0), rtol=fmt.epsilon * 2, atol=0)


@formats
def test_gradients_are_the_fast_family_s(fmt: NumberFormat) -> None:
    from mantissa.kernels.exact.gpu import ExactGpuKernels

    leaves = [x.to(DEVICE).requires_grad_() for x in qkv(fmt, 4, 2, 16, 70)]
    seed = torch.randn(2, 4, 70, 16).to(fmt.dtype).to(DEVICE)
    fast = torch.autograd.grad(NativeKernels(fmt).causal_attention(*leaves), leaves, seed)
    exact = torch.autograd.grad(ExactGpuKernels(fmt).causal_attention(*leaves), leaves, seed)
    slack = 0.0 if INTERPRETED else 4 * fmt.epsilon  # a GPU's flash backward adds up in any order
    for ours, theirs in zip(exact, fast, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=slack, atol=slack)
    only = leaves[0].detach(), leaves[1].detach(), leaves[2]  # frozen queries and keys
    (grad_v,) = torch.autograd.grad(ExactGpuKernels(fmt).causal_attention(*only), only[2], seed)
    torch.testing.assert_close(grad_v, fast[2], rtol=4 * fmt.epsilon, atol=4 * fmt.epsilon)


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("shape", [(16, 8, 128), (32, 8, 64)], ids=str)
def test_decoding_4096_positions_is_the_sequence(shape: tuple[int, int, int], fmt: NumberFormat) -> None:
    q, k, v = (x.cuda() for x in qkv(fmt, *shape, 4096))
    whole = attention(q, k, v)
    for t in [0, 1, 62, 63, 64, 65, *torch.randint(0, 4096, (60,)).tolist(), 4095]:
        one = attention(q[:, :, t : t + 1], k, v, torch.full((2,), t))
        assert torch.equal(one, whole[:, :, t : t + 1])
    exact = attended(*(x[:1, :1].cpu().double() for x in (q, k, v)))
    error = whole[0, :1, -64:].double() - exact[0, :, -64:]
    assert bool((error.abs() <= 2 * fmt.epsilon * v.float().abs().amax().cpu() + 2.0**-16).all())
