"""Triton's attention under any mask: against float64, and one query by itself against the same in any batch.

On a GPU, or interpreted on a CPU with TRITON_INTERPRET=1: there ``dot`` is numpy's, so what these tests show is that
masks, places and blocks are right, and not how a tensor core sums.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mantissa.adopted.attention import plain
from mantissa.precision import BF16, FP16, FP32, NumberFormat
from triton_interpreter import DEVICE, needs_a_device

pytestmark = needs_a_device
formats = pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=str)
SHAPES = [(4, 4, 16, 16), (6, 2, 32, 24), (8, 1, 24, 40)]  # query heads, key heads, size of a key, of a value
KINDS = ["causal", "window", "sinks", "cap", "a mask for each head"]


def attention(q, k, v, seen, first, scale=0.3, cap=0.0, sinks=None) -> Tensor:
    from mantissa.kernels.triton.attention import masked_attention

    given = [None if x is None else x.to(DEVICE) for x in (q, k, v, seen, torch.tensor(first))]
    return masked_attention(*given, scale, cap, None if sinks is None else sinks.to(DEVICE)).cpu()


def drawn(fmt: NumberFormat, shape: tuple[int, ...], length: int, rows: int = 2) -> tuple[Tensor, ...]:
    heads, kv_heads, size, values = shape
    q, k, v = (torch.randn(rows, h, length, n) for h, n in ((heads, size), (kv_heads, size), (kv_heads, values)))
    return tuple(x.to(fmt.dtype) for x in (q, k, v))


def settings(kind: str, heads: int, length: int) -> tuple[Tensor, float, Tensor | None]:
    """What is seen, the cap, the sinks."""
    seen = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    if kind == "window":
        seen = seen & ~torch.ones(length, length, dtype=torch.bool).tril(-30)
    if kind == "a mask for each head":
        seen = seen & (torch.rand(2, heads, length, length) < 0.7)
    return seen, 2.0 if kind == "cap" else 0.0, torch.randn(heads) if kind == "sinks" else None


@formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_against_float64(kind: str, shape: tuple[int, ...], fmt: NumberFormat) -> None:
    """Each probability and the result are rounded once; what sees nothing gets 0."""
    length = 90
    q, k, v = drawn(fmt, shape, length)
    seen, cap, sinks = settings(kind, shape[0], length)
    found = attention(q, k, v, seen, [0, 0], cap=cap, sinks=sinks).double()
    wide = [x.double() for x in (q, k, v)]
    expected = plain(*wide, seen, 0.3, cap, None if sinks is None else sinks.double())
    largest = v.double().abs().amax()
    assert bool(((found - expected).abs() <= (fmt.epsilon + 2.0**-19) * largest).all())
    assert found.shape == (2, shape[0], length, shape[3])


@formats
@pytest.mark.parametrize("kind", KINDS)
def test_a_query_is_the_same_alone_behind_padding_and_from_a_cache(kind: str, fmt: NumberFormat) -> None:
    shape, length, pad = (6, 2, 32, 24), 140, 5
    q, k, v = drawn(fmt, shape, length)
    seen, cap, sinks = settings(kind, shape[0], length)
    whole = attention(q, k, v, seen, [0, 0], cap=cap, sinks=sinks)
    seen = seen.expand(2, *seen.shape[1:]) if seen.shape[0] == 1 else seen

    def padded(x: Tensor) -> Tensor:
        return torch.cat((torch.randn(*x.shape[:2], pad, x.shape[3]).to(x.dtype), x), 2)

    unseen = torch.zeros(*seen.shape[:2], pad + length, pad + length, dtype=torch.bool)
    unseen[:, :, pad:, pad:] = seen
    behind = attention(*(padded(x) for x in (q, k, v)), unseen, [-pad, -pad], cap=cap, sinks=sinks)
    assert torch.equal(behind[:, :, pad:], whole)
    assert not behind[:, :, :pad].any()
    for at in (0, 63, 64, 100, 139):
        rest = slice(at + 1)
        one = attention(q[:, :, at : at + 1], k[:, :, rest], v[:, :, rest], seen[:, :, at : at + 1, rest], [0, 0],
                        cap=cap, sinks=sinks)  # fmt: skip
        assert torch.equal(one, whole[:, :, at : at + 1])
        if kind == "window" and at > 30:  # a cache that has dropped what no query sees
            kept = slice(at - 29, at + 1)
            one = attention(q[:, :, at : at + 1], k[:, :, kept], v[:, :, kept], seen[:, :, at : at + 1, kept],
                            [at - 29, at - 29])  # fmt: skip
            assert torch.equal(one, whole[:, :, at : at + 1])
    for row in range(2):
        own = slice(row, row + 1)
        alone = attention(q[own], k[own], v[own], seen[own], [0], cap=cap, sinks=sinks)
        assert torch.equal(alone, whole[own])


@pytest.mark.parametrize("size", [1, 7, 64, 100, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_has_the_same_sum_wherever_it_stands(size: int, dtype: torch.dtype) -> None:
    from mantissa.kernels.triton.rows import row_sums

    x = torch.randn(37, size).to(dtype).to(DEVICE)
    sums = row_sums(x)
    assert torch.allclose(sums.double(), x.double().sum(-1), rtol=1e-5, atol=1e-5 * size**0.5)
    assert torch.equal(sums[11:12], row_sums(x[11:12]))
    assert torch.equal(sums[5:], row_sums(x[5:]))
