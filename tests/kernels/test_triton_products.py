"""Triton's products and quantisation against float64, against the CPU's twins, and rows against themselves.

On a GPU, or interpreted on a CPU with TRITON_INTERPRET=1: there ``dot`` is numpy's, so what these tests show is that
masks, places, blocks and scales are right, and not how a tensor core sums.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import block_reference

pytest.importorskip("triton")

from mantissa.precision import BF16, E4M3, E5M2, FP16, FP32, SQUARE, BlockScaled, NumberFormat, dequantize, quantize
from triton_interpreter import DEVICE, INTERPRETED, needs_a_device

pytestmark = needs_a_device
formats = pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=str)
ADDITIONS = 2.0**-20  # of the sum of |terms|: what a few hundred fp32 additions may lose
FP8_ADDITIONS = ADDITIONS if INTERPRETED else 2.0**-12  # Hopper's accumulator of fp8 products keeps about 14 bits


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    from mantissa.kernels.triton import products as triton_products

    on_device = (None if t is None else t.to(DEVICE) for t in (x, weight, bias))
    return triton_products.matmul(*on_device, dtype).cpu()  # type: ignore[arg-type]


def quantized(x: Tensor, fmt: NumberFormat, rows: int = 1, power_of_two: bool = False) -> BlockScaled:
    from mantissa.kernels.triton import products as triton_products

    found = triton_products.quantize(x.to(DEVICE), fmt, rows, power_of_two)
    return BlockScaled(found.codes.cpu(), found.scales.cpu())


def scaled_matmul(x: BlockScaled, weight: BlockScaled, bias: Tensor | None, dtype: torch.dtype, rows: int) -> Tensor:
    from mantissa.kernels.triton import products as triton_products

    a, b = (BlockScaled(s.codes.to(DEVICE), s.scales.to(DEVICE)) for s in (x, weight))
    return triton_products.scaled_matmul(a, b, None if bias is None else bias.to(DEVICE), dtype, rows).cpu()


def check(out: Tensor, exact: Tensor, terms: Tensor, fmt: NumberFormat, additions: float = ADDITIONS) -> None:
    """One rounding to ``fmt`` of a sum that is itself off by ``additions`` of its terms."""
    bound = fmt.epsilon / 2 * exact.abs() + additions * terms * (1 + fmt.epsilon) + fmt.smallest_subnormal
    assert bool(((out.double() - exact).abs() <= bound).all())


@formats
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 33, 70), (130, 65, 64), (70, 200, 160)], ids=str)
def test_products_against_float64(shape: tuple[int, int, int], fmt: NumberFormat) -> None:
    rows, outputs, inputs = shape
    x, w, b = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    x, w, b = (t.to(fmt.dtype) for t in (x, w, b))
    exact = x.double() @ w.double().t()
    terms = x.double().abs() @ w.double().abs().t()
    check(matmul(x, w, None, fmt.dtype), exact, terms, fmt)
    check(matmul(x, w, b, fmt.dtype), exact + b.double(), terms + b.double().abs(), fmt)
    logits = matmul(x, w, None, torch.float32)
    assert logits.dtype == torch.float32
    check(logits, exact, terms, FP32)


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_an_fp32_result_is_the_accumulator(fmt: NumberFormat) -> None:
    x, w = torch.tensor([[1.0, fmt.epsilon / 4]]).to(fmt.dtype), torch.ones(1, 2).to(fmt.dtype)
    assert matmul(x, w, None, torch.float32).item() == 1 + fmt.epsilon / 4
    assert matmul(x, w, None, fmt.dtype).item() == 1.0
    bias = torch.tensor([fmt.epsilon / 2 + 0.0]).to(fmt.dtype)  # with the bias before the one rounding: above half
    assert matmul(x, w, bias, fmt.dtype).item() == 1 + fmt.epsilon


@formats
def test_a_row_is_the_same_among_any_number_of_rows(fmt: NumberFormat) -> None:
    """1 to 70 rows, cut out at any offset, in an operand that starts at any address."""
    x, w, b = (t.to(fmt.dtype) for t in (torch.randn(140, 70), torch.randn(48, 70), torch.randn(48)))
    whole = matmul(x, w, b, fmt.dtype)
    generator = torch.Generator().manual_seed(1)
    counts = range(1, 71) if fmt is BF16 or not INTERPRETED else range(1, 71, 9)
    for rows in counts:
        start = int(torch.randint(0, 140 - rows + 1, (), generator=generator))
        part = matmul(x[start : start + rows], w, b, fmt.dtype)
        assert torch.equal(part, whole[start : start + rows])


@formats
@pytest.mark.parametrize("shape", [(17, 256), (70, 520), (48, 1030)], ids=str)
def test_ranges_of_k_apart_or_by_one_program(
    shape: tuple[int, int], fmt: NumberFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits do not depend on who takes the ranges; the tree does on the weight's shape, and on nothing else."""
    from mantissa.kernels.triton import products as triton_products

    outputs, inputs = shape
    x, w, b = (t.to(fmt.dtype) for t in (torch.randn(9, inputs), torch.randn(outputs, inputs), torch.randn(outputs)))
    tile = triton_products.product_tile(fmt.dtype, outputs, inputs)
    assert tile.splits == (8 if inputs > 1000 else 4 if inputs > 512 else 2) or fmt is not FP32
    assert tile.splits > 1 or inputs < 512
    monkeypatch.setattr(triton_products, "product_tile", lambda *shape: tile)
    found = []
    for programs in (0, 1 << 30):
        monkeypatch.setattr(triton_products, "PROGRAMS", programs)
        found += [matmul(x, w, b, fmt.dtype), matmul(x[3:4], w, b, fmt.dtype)]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert torch.equal(found[0][3:4], found[1])
    terms = x.double().abs() @ w.double().abs().t() + b.double().abs()
    check(found[0], x.double() @ w.double().t() + b.double(), terms, fmt)


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("shape", [(4096, 4096), (1024, 3072), (32000, 2048), (11008, 4096)], ids=str)
def test_rows_are_the_same_at_real_sizes(shape: tuple[int, int], fmt: NumberFormat) -> None:
    outputs, inputs = shape
    x, w = (torch.randn(n, inputs, device="cuda").to(fmt.dtype) for n in (1500, outputs))
    from mantissa.kernels.triton import products as triton_products

    whole = triton_products.matmul(x, w, None, fmt.dtype)
    for rows in [*range(1, 71), 127, 128, 129, 500]:
        for start in (0, 13, 1500 - rows):
            part = triton_products.matmul(x[start : start + rows], w, None, fmt.dtype)
            assert torch.equal(part, whole[start : start + rows])
    exact = x[:64].double() @ w.double().t()
    check(whole[:64].cpu(), exact.cpu(), (x[:64].double().abs() @ w.double().abs().t()).cpu(), fmt, 2.0**-18)


# ---- quantisation

SCALES = [(fmt, rows, power) for fmt in (E4M3, E5M2) for rows in (1, 128) for power in (False, True)]
each_scale = pytest.mark.parametrize(("fmt", "rows", "power_of_two"), SCALES, ids=str)


def awkward(rows: int, columns: int) -> Tensor:
    """Values of every size from 2^-40 to 2^40, with a block of zeros and one of the smallest and the largest values."""
    x = torch.randn(rows, columns) * torch.exp2(torch.randint(-40, 41, (rows, 1)).float())
    x[0] = 0.0
    x[-1, : columns // 2] = 1e-38
    x[-1, -1] = 3.0e38
    return x


@each_scale
@pytest.mark.parametrize("shape", [(1, 1), (5, 128), (37, 300), (131, 257)], ids=str)
def test_codes_and_scales_are_the_rules_to_the_bit(
    shape: tuple[int, int], fmt: NumberFormat, rows: int, power_of_two: bool
) -> None:
    """Against the CPU's ``quantize`` and against a slow one in numpy."""
    x = awkward(*shape)
    ours = quantized(x, fmt, rows, power_of_two)
    twin = quantize(x, fmt, (rows, 128), power_of_two)
    assert torch.equal(ours.scales, twin.scales)
    assert torch.equal(ours.codes.float(), twin.codes.float())
    if shape == (37, 300):
        codes, scales = block_reference.quantize(x.numpy(), fmt.name, (rows, 128), power_of_two)
        assert (ours.scales.numpy() == scales).all()
        assert (ours.codes.view(torch.uint8).numpy() == codes).all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("rows", [1, 128])
def test_a_block_that_is_not_finite_is_nan_throughout(rows: int, bad: float, fmt: NumberFormat) -> None:
    x = torch.randn(3, 300)
    x[1, 200] = bad
    found = quantized(x, fmt, rows)
    lost = torch.zeros(3, 300, dtype=torch.bool)
    lost[slice(1, 2) if rows == 1 else slice(None), 128:256] = True
    assert torch.equal(found.codes.float().isnan(), lost)
    assert int(found.scales.isnan().sum()) == 1


# ---- fp8 products


@pytest.mark.parametrize("base", [BF16, FP16], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("weight_rows", [1, 128])
@pytest.mark.parametrize("shape", [(3, 5, 7), (66, 130, 300)], ids=str)
def test_scaled_products_against_float64(
    shape: tuple[int, int, int], weight_rows: int, fmt: NumberFormat, base: NumberFormat
) -> None:
    rows, outputs, inputs = shape
    x, w, b = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs).to(base.dtype)
    xq, wq = quantized(x, fmt), quantized(w, E4M3, weight_rows)
    x, w = dequantize(xq).double(), dequantize(wq, (weight_rows, 128)).double()
    exact, terms = x @ w.t(), x.abs() @ w.abs().t()
    check(scaled_matmul(xq, wq, None, torch.float32, weight_rows), exact, terms, FP32, FP8_ADDITIONS)
    out = scaled_matmul(xq, wq, b, base.dtype, weight_rows)
    check(out, exact + b.double(), terms + b.double().abs(), base, FP8_ADDITIONS)


def test_what_does_not_fit_is_refused() -> None:
    x, w = quantized(torch.randn(4, 256), E4M3), quantized(torch.randn(8, 256), E4M3, 128)
    with pytest.raises(ValueError, match="scales"):
        scaled_matmul(x, w, None, torch.bfloat16, 1)
    with pytest.raises(ValueError, match="product of"):
        matmul(torch.randn(2, 3), torch.randn(2, 4), None, torch.float32)
    with pytest.raises(TypeError, match="cast one of them"):
        matmul(torch.randn(2, 3), torch.randn(2, 3).half(), None, torch.float32)
    assert matmul(torch.randn(0, 3), torch.randn(2, 3), None, torch.float32).shape == (0, 2)
    assert dequantize(w, SQUARE).shape == (8, 256)
