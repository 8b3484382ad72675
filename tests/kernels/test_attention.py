"""Attention against float64 and torch's own, over head groups, lengths, blocks, and the cached form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention_oracle import FAMILIES, attended, probabilities
from mantissa.kernels import Kernels, NativeKernels, SimulatedKernels, cpu
from mantissa.kernels.cpu import Products
from mantissa.precision import BF16, FP16, FP32, NumberFormat, is_on_grid, round_to_format

families = pytest.mark.parametrize("family", FAMILIES)


def qkv(fmt: NumberFormat, heads: int, kv_heads: int, length: int, rows: int = 2, size: int = 16) -> list[Tensor]:
    """float64, on the grid."""
    shapes = ((rows, heads, length, size), (rows, kv_heads, length, size), (rows, kv_heads, length, size))
    return [round_to_format(torch.randn(*s, dtype=torch.float64), fmt) for s in shapes]


def run(kernels: Kernels, operands: list[Tensor], seed: Tensor) -> list[Tensor]:
    """Output and gradients of q, k, v, as float64."""
    leaves = [x.to(kernels.dtype).requires_grad_() for x in operands]
    out = kernels.causal_attention(*leaves)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, seed.to(out.dtype)))]


def oracle(operands: list[Tensor], seed: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in operands]
    out = attended(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, seed)]


def assert_close_in_ulps(got: Tensor, expected: Tensor, fmt: NumberFormat, ulps: float) -> None:
    """Within ``ulps`` of the format at the size of the tensor's largest value, or of 1, the operands' size."""
    bound = ulps * max(fmt.epsilon, 2.0**-20) * expected.abs().max().clamp(min=1.0)
    assert (got - expected).abs().max() <= bound, (got - expected).abs().max() / bound


@families
@pytest.mark.parametrize(("heads", "kv_heads", "length"), [(4, 4, 1), (4, 1, 37), (4, 2, 130)])
def test_grouped_heads_against_float64(family: str, heads: int, kv_heads: int, length: int) -> None:
    kernels = FAMILIES[family]
    operands = qkv(kernels.format, heads, kv_heads, length)
    seed = round_to_format(torch.randn_like(operands[0]), kernels.format)
    for got, expected in zip(run(kernels, operands, seed), oracle(operands, seed), strict=True):
        assert bool(is_on_grid(got, kernels.format).all())
        assert_close_in_ulps(got, expected, kernels.format, 2.0)


@families
def test_no_position_sees_what_follows_it(family: str) -> None:
    kernels = FAMILIES[family]
    q, k, v = (x.to(kernels.dtype) for x in qkv(kernels.format, 4, 2, 24))
    before = kernels.causal_attention(q, k, v)
    changed_k, changed_v = k.clone(), v.clone()
    changed_k[:, :, 10:], changed_v[:, :, 10:] = 50.0, -50.0
    after = kernels.causal_attention(q, changed_k, changed_v)
    assert torch.equal(before[:, :, :10], after[:, :, :10])
    assert not torch.equal(before[:, :, 10:], after[:, :, 10:])


@families
def test_large_scores_stay_finite_and_choose_one_key(family: str) -> None:
    kernels = FAMILIES[family]
    q = torch.full((1, 1, 4, 16), 60.0, dtype=kernels.dtype)
    k = torch.zeros(1, 1, 4, 16, dtype=kernels.dtype)
    k[0, 0, 1] = 60.0  # a score of 14400, beyond what exp could take
    v = torch.arange(4.0).view(1, 1, 4, 1).expand(1, 1, 4, 16).to(kernels.dtype)
    assert kernels.causal_attention(q, k, v)[0, 0, :, 0].tolist() == [0.0, 1.0, 1.0, 1.0]


@families
@pytest.mark.parametrize("group", [1, 4])
def test_cached_attention_is_the_last_row_of_causal_attention(family: str, group: int) -> None:
    kernels = FAMILIES[family]
    lengths = torch.tensor([5, 24, 1])
    q, k, v = (x.to(kernels.dtype) for x in qkv(kernels.format, 4, 4 // group, 24, rows=3))
    stale_k, stale_v = k.clone(), v.clone()
    for row, length in enumerate(lengths.tolist()):
        stale_k[row, :, length:], stale_v[row, :, length:] = 777.0, -777.0  # an earlier sequence's
    last = q[torch.arange(3), :, lengths - 1]
    cached = kernels.cached_attention(last, stale_k, stale_v, lengths)
    assert cached.shape == last.shape
    assert cached.dtype == kernels.dtype
    assert bool(is_on_grid(cached, kernels.format).all())
    for row, length in enumerate(lengths.tolist()):
        operands = [x[row : row + 1, :, :length] for x in (q, k, v)]
        full = kernels.causal_attention(*operands)[0, :, -1]
        assert_close_in_ulps(cached[row].double(), full.double(), kernels.format, 1.0)
        exact = attended(*(x.double() for x in operands))[0, :, -1]
        assert_close_in_ulps(cached[row].double(), exact, kernels.format, 1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_attention_follows_the_lengths_from_step_to_step(family: str) -> None:
    """One instance, asked as decode steps ask: the same lengths for every layer, other ones at the next step."""
    kernels = FAMILIES[family]
    q, k, v = (x.to(kernels.dtype) for x in qkv(kernels.format, 4, 2, 24, rows=3))
    for keys in (24, 32):  # the cache grows between
        roomy = [torch.nn.functional.pad(x, (0, 0, 0, keys - 24)) for x in (k, v)]
        for values in ([5, 24, 1], [6, 24, 2], [6, 3, 2]):
            lengths = torch.tensor(values)
            last = q[torch.arange(3), :, lengths - 1]
            cached = kernels.cached_attention(last, *roomy, lengths)
            assert torch.equal(kernels.cached_attention(last, *roomy, lengths), cached)  # the next layer's
            for row, length in enumerate(values):
                exact = attended(*(x[row : row + 1, :, :length].double() for x in (q, k, v)))[0, :, -1]
                assert_close_in_ulps(cached[row].double(), exact, kernels.format, 1.0)


def test_cached_attention_takes_a_strided_query_and_a_coarser_cache() -> None:
    q, k, v = (x.float() for x in qkv(BF16, 4, 2, 9))
    query = q.transpose(1, 2)[:, -1].transpose(1, 2).contiguous().transpose(1, 2)  # B, H, D with swapped strides
    lengths = torch.tensor([9, 9])
    expected = attended(q.double(), k.double(), v.double())[:, :, -1]
    fp32 = NativeKernels(FP32).cached_attention(query, k.bfloat16(), v.bfloat16(), lengths)
    torch.testing.assert_close(fp32.double(), expected, rtol=1e-5, atol=1e-6)
    half = NativeKernels(FP16).cached_attention(query.half(), k.bfloat16(), v.bfloat16(), lengths)
    assert half.dtype == torch.float16
    assert_close_in_ulps(half.double(), expected, FP16, 1.0)


def modelled(q: Tensor, k: Tensor, v: Tensor, seed: Tensor, fmt: NumberFormat, inside: NumberFormat) -> list[Tensor]:
    """Output, dQ, dK, dV in float64, with P and dS rounded to ``inside`` and the results to ``fmt``."""
    p, scale = probabilities(q, k), q.shape[-1] ** -0.5
    p_inside = round_to_format(p, inside)
    out = round_to_format(p_inside @ v, fmt)
    ds = p * (seed @ v.transpose(-1, -2) - (seed * out).sum(-1, keepdim=True))
    ds = round_to_format(ds, inside)
    gradients = (ds @ k * scale, ds.transpose(-1, -2) @ q * scale, p_inside.transpose(-1, -2) @ seed)
    return [out, *(round_to_format(g, fmt) for g in gradients)]


@pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)
def test_p_and_ds_are_rounded_before_the_products_that_they_enter(fmt: NumberFormat) -> None:
    operands = qkv(fmt, 2, 2, 100)
    seed = round_to_format(torch.randn_like(operands[0]), fmt)
    got = run(SimulatedKernels(fmt), operands, seed)
    with_roundings, without = (modelled(*operands, seed, fmt, inside) for inside in (fmt, FP32))
    for ours, same, other in zip(got, with_roundings, without, strict=True):
        assert (ours != same).double().mean() < 0.02  # fp32 errors move a few results over a rounding's edge
        assert (ours != other).double().mean() > 0.1


@pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)
def test_cached_probabilities_are_rounded_too(fmt: NumberFormat) -> None:
    q, k, v = (x[:, :, :60] for x in qkv(fmt, 2, 2, 64, rows=16))
    cached = SimulatedKernels(fmt).cached_attention(q[:, :, -1].float(), k.float(), v.float(), torch.full((16,), 60))
    p = torch.softmax((q[:, :, -1:] @ k.transpose(-1, -2)) / 4, -1)
    with_rounding, without = (round_to_format(round_to_format(p, f) @ v, fmt)[:, :, 0] for f in (fmt, FP32))
    assert (cached.double() != with_rounding).double().mean() < 0.02
    assert (cached.double() != without).double().mean() > 0.1


@pytest.mark.parametrize("kernels", [NativeKernels(FP32), SimulatedKernels(FP16)], ids=["native", "simulated"])
def test_a_decode_steps_product_is_looked_up_by_the_size_that_it_has(
    kernels: NativeKernels | SimulatedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each key head: as many rows as query heads share it, by the keys in the cache times a head's size."""
    asked: list[tuple[str, int, int]] = []

    class Table:
        def way(self, operands: str, side: str, rows: int, weight: int) -> str:
            asked.append((side, rows, weight))
            return cpu.TORCH

    monkeypatch.setattr(kernels, "products", Products("fp32", Table()))  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=draw) for shape in ((5, 6, 16), (5, 2, 10, 16), (5, 2, 10, 16)))
    kernels.cached_attention(q, k, v, torch.tensor([1, 10, 4, 7, 2]))
    assert asked == [("heads", 3, 160)]
