"""Block scaling against an independent numpy reference, bit for bit, and the properties that the kernels rely on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

import block_reference as reference
from mantissa.base.errors import MantissaError
from mantissa.precision import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    BF16,
    E4M3,
    E5M2,
    FP16,
    SQUARE,
    BlockScaled,
    NumberFormat,
    dequantize,
    is_on_grid,
    quantize,
    round_by_arithmetic,
    round_cached,
    round_in_blocks,
    round_to_format,
)
from mantissa.precision.schemes import round_bounded_

formats = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
blocks = pytest.mark.parametrize("block", [ALONG_ROWS, ALONG_COLUMNS, SQUARE], ids=["1x128", "128x1", "128x128"])
scales = pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", "power of two"])
FLOAT_MAX = torch.finfo(torch.float32).max


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def agrees(x: Tensor, fmt: NumberFormat, block: tuple[int, int], power_of_two: bool) -> None:
    """Codes, scales and values are the reference's bits, both ways in."""
    got = quantize(x, fmt, block, power_of_two)
    codes, of_blocks = reference.quantize(x.numpy(), fmt.name, block, power_of_two)
    assert got.codes.dtype is fmt.dtype
    assert got.scales.dtype is torch.float32
    assert torch.equal(got.scales, torch.from_numpy(of_blocks))
    assert torch.equal(got.codes.view(torch.uint8), torch.from_numpy(codes))
    values = dequantize(got, block)
    assert torch.equal(values, torch.from_numpy(reference.values(x.numpy(), fmt.name, block, power_of_two)))
    assert torch.equal(bits(round_in_blocks(x, fmt, block, power_of_two)), bits(values))


@scales
@blocks
@formats
def test_codes_scales_and_values_are_the_references(
    fmt: NumberFormat, block: tuple[int, int], power_of_two: bool
) -> None:
    for shape in [(256, 128), (3, 5), (130, 257), (2, 3, 129, 64), (1, 1), (128, 300), (0, 128)]:
        agrees(torch.randn(shape) * torch.exp2(torch.randint(-30, 30, shape).float()), fmt, block, power_of_two)


def hard_cases(fmt: NumberFormat) -> Tensor:
    """Rows of 128: ties, zeros, tiny and huge largest values, and neighbours of each."""
    table = torch.from_numpy(reference.positive_values(fmt.name)).float()
    middles = (table[:-1] + table[1:]) / 2  # exact in fp32: one digit more than the format
    near = torch.cat((torch.nextafter(middles, torch.zeros(())), torch.nextafter(middles, torch.full((), 1e9))))
    rows = []
    for part in (table, middles, *near.split(127)):
        row = torch.zeros(128)
        row[: part.numel()] = part
        row[127] = fmt.largest  # the scale is 1, and nothing else is rounded
        rows += [row, -row, row * 2.0**20, row * 2.0**-60, row * 0.37]
    smallest = torch.linspace(0, 2.0**-126, 128)
    rows += [torch.zeros(128), -torch.zeros(128), smallest, smallest * 2.0**-10, smallest * 2.0**8]
    rows += [torch.full((128,), 2.0**-149), torch.linspace(-1, 1, 128) * FLOAT_MAX]
    rows += [torch.randn(128) * 2.0**119, torch.tensor([1.0, 2.0**-149]).repeat(64)]
    return torch.stack(rows)


@scales
@blocks
@formats
def test_ties_zeros_subnormal_and_huge_blocks(fmt: NumberFormat, block: tuple[int, int], power_of_two: bool) -> None:
    rows = hard_cases(fmt)
    agrees(rows.t().contiguous() if block is ALONG_COLUMNS else rows, fmt, block, power_of_two)
    if block is SQUARE:
        for row in rows:
            agrees(row.view(2, 64), fmt, block, power_of_two)


elements = st.floats(allow_nan=False, allow_infinity=False, width=32)
spread = st.floats(-4.0, 4.0, width=32)


@settings(max_examples=40, deadline=None)
@given(
    x=st.tuples(st.integers(1, 6), st.integers(1, 140)).flatmap(
        lambda shape: st.one_of(
            arrays(np.float32, shape, elements=elements), arrays(np.float32, shape, elements=spread)
        )
    ),
    fmt=st.sampled_from([E4M3, E5M2]),
    block=st.sampled_from([ALONG_ROWS, ALONG_COLUMNS, SQUARE, (1, 3), (2, 5)]),
    power_of_two=st.booleans(),
)
def test_any_values_agree_with_the_reference(
    x: np.ndarray, fmt: NumberFormat, block: tuple[int, int], power_of_two: bool
) -> None:
    agrees(torch.from_numpy(x), fmt, block, power_of_two)


@settings(max_examples=25, deadline=None)
@given(
    x=arrays(np.float32, (3, 130), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    fmt=st.sampled_from([E4M3, E5M2]),
    block=st.sampled_from([ALONG_ROWS, ALONG_COLUMNS, SQUARE]),
)
def test_a_power_of_two_is_quantised_again_to_itself(x: np.ndarray, fmt: NumberFormat, block: tuple[int, int]) -> None:
    values = round_in_blocks(torch.from_numpy(x), fmt, block, True)
    again = quantize(values, fmt, block, True)
    assert torch.equal(bits(dequantize(again, block)), bits(values))
    thrice = quantize(dequantize(again, block), fmt, block, True)
    assert torch.equal(thrice.codes.view(torch.uint8), again.codes.view(torch.uint8))
    assert torch.equal(thrice.scales, again.scales)
    if bool((values.abs()[values != 0] > 2.0**-100).all()):
        assert torch.equal(round_to_format(values, BF16), values)  # so a bf16 copy gives the same codes


# ---- rounding onto the grid


@formats
def test_rounding_by_addition_equals_the_cast_for_fp32_values(fmt: NumberFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (500_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    values = patterns.view(torch.float32)
    within = values[(values.abs() <= fmt.largest) | values.isnan()]
    dense = torch.empty(300_000).uniform_(-fmt.largest, fmt.largest, generator=generator)
    small = torch.randn(300_000, generator=generator) * fmt.smallest_normal
    assert_rounds(torch.cat((within, dense, small)), fmt)


@formats
def test_rounding_by_addition_at_every_tie_and_beside_it(fmt: NumberFormat) -> None:
    table = torch.from_numpy(reference.positive_values(fmt.name)).float()
    ties = torch.cat(((table[:-1] + table[1:]) / 2, table))
    around = torch.cat((ties, torch.nextafter(ties, torch.zeros(())), torch.nextafter(ties, torch.full((), 1e9))))
    assert_rounds(torch.cat((around, -around)), fmt)


def assert_rounds(x: Tensor, fmt: NumberFormat) -> None:
    got = round_bounded_(x.clone(), fmt)
    for expected in (round_to_format(x, fmt), round_by_arithmetic(x, fmt)):
        assert torch.equal(got.isnan(), expected.isnan())
        finite = ~got.isnan()
        assert torch.equal(bits(got[finite]), bits(expected[finite] + 0.0))  # but for the sign of zero


# ---- what is not finite


@blocks
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")], ids=str)
def test_a_tensor_that_is_not_finite_is_named(bad: float, block: tuple[int, int]) -> None:
    x = torch.randn(140, 200)
    x[135, 190] = bad
    with pytest.raises(MantissaError) as caught:
        quantize(x, E4M3, block, name="model.layers.3.mlp.up_proj.weight")
    assert str(caught.value) == (
        f"fp8: model.layers.3.mlp.up_proj.weight holds {bad} in 1 of 28000 values: expected finite values; "
        "training diverged, or the tensor was never written"
    )


@blocks
@pytest.mark.parametrize(
    ("fmt", "power_of_two", "bad"),
    [(E4M3, False, float("inf")), (E5M2, False, float("nan")), (E4M3, True, float("nan")), (E5M2, True, -float("inf"))],
    ids=str,
)
def test_within_a_kernel_its_block_becomes_nan_and_no_other(
    bad: float, fmt: NumberFormat, block: tuple[int, int], power_of_two: bool
) -> None:
    x = torch.randn(150, 300)
    clean = round_in_blocks(x, fmt, block, power_of_two)
    x[140, 290] = bad
    got = round_in_blocks(x, fmt, block, power_of_two)
    rows = slice(128, 150) if block[0] == 128 else slice(140, 141)
    columns = slice(256, 300) if block[1] == 128 else slice(290, 291)
    expected = torch.zeros(150, 300, dtype=torch.bool)
    expected[rows, columns] = True
    assert torch.equal(got.isnan(), expected)
    assert torch.equal(got[~expected], clean[~expected])


# ---- the rest of the contract


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    x = torch.randn(37, 200)
    whole = round_in_blocks(x, E4M3)
    alone = torch.cat([round_in_blocks(row, E4M3) for row in x.split(1)])
    assert torch.equal(bits(whole), bits(alone))
    assert torch.equal(bits(round_in_blocks(x[3], E4M3)), bits(whole[3]))  # a vector is one row


def test_strides_leading_dimensions_and_halves_do_not_matter() -> None:
    x = round_to_format(torch.randn(4, 6, 130), FP16)
    expected = round_in_blocks(x, E4M3)
    assert torch.equal(round_in_blocks(x.half(), E4M3), expected)
    assert torch.equal(round_in_blocks(x.transpose(0, 1), E4M3), expected.transpose(0, 1))
    columns = round_in_blocks(x.transpose(1, 2), E4M3, ALONG_COLUMNS)
    assert torch.equal(columns, expected.transpose(1, 2))
    scaled = quantize(x, E4M3)
    assert scaled.scales.shape == (4, 6, 2)
    assert torch.equal(dequantize(scaled, dtype=torch.float16), expected.half())
    assert torch.equal(quantize(x.transpose(1, 2), E4M3, ALONG_COLUMNS).scales, scaled.scales.transpose(1, 2))


def test_nothing_given_is_changed() -> None:
    x = torch.randn(8, 130)
    before = x.clone()
    scaled = quantize(x, E4M3)
    codes = scaled.codes.view(torch.uint8).clone()
    dequantize(scaled)
    round_in_blocks(x, E5M2)
    round_cached(x, E4M3)
    assert torch.equal(x, before)
    assert torch.equal(scaled.codes.view(torch.uint8), codes)


def test_codes_that_are_nan_stay_nan() -> None:
    codes = torch.tensor([[0x7F, 0xFF, 0x38]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = dequantize(BlockScaled(codes, torch.full((1, 1), 2.0)))
    assert values.isnan().tolist() == [[True, True, False]]
    assert values[0, 2].item() == 2.0


def test_misuse_is_refused() -> None:
    with pytest.raises(TypeError, match="needs fp32 or a half, not torch"):
        quantize(torch.zeros(2, 2, dtype=torch.float64), E4M3)
    with pytest.raises(ValueError, match="blocks of 128 by 128 of a tensor of 1 dimensions"):
        quantize(torch.zeros(4), E4M3, SQUARE)
    with pytest.raises(ValueError, match=r"scales of shape \(2, 1\) for codes \(2, 200\)"):
        dequantize(BlockScaled(torch.zeros(2, 200, dtype=torch.float8_e4m3fn), torch.ones(2, 1)))


# ---- the cache


@pytest.mark.parametrize("base", [BF16, FP16], ids=str)
def test_a_cached_vector_has_its_own_scale_and_stays_on_its_grid(base: NumberFormat) -> None:
    x = round_to_format(torch.randn(2, 3, 5, 160) * torch.exp2(torch.arange(-12.0, 3.0)).view(1, 3, 5, 1), base)
    x[1, 2, 3] = 0.0
    got = round_cached(x, E4M3)
    expected = reference.values(x.reshape(-1, 160).numpy(), "e4m3", (1, 160), True)
    assert torch.equal(got.view(-1, 160), torch.from_numpy(expected))
    assert bool(is_on_grid(got, base).all())
    assert torch.equal(round_cached(x.to(base.dtype), E4M3).float(), got)  # a native rollout caches the same
    assert torch.equal(round_cached(got, E4M3), got)
    assert (got - x).abs().max() > 0


def test_fp16_subnormals_stay_fp16_values_in_the_cache() -> None:
    x = torch.randint(-300, 300, (64, 32)).float() * 2.0**-24
    assert bool(is_on_grid(round_cached(x, E4M3), FP16).all())


def test_a_cache_in_another_format_is_rounding() -> None:
    x = torch.randn(2, 4, 32)
    for fmt in (BF16, FP16, E5M2):
        assert torch.equal(round_cached(x, fmt), round_to_format(x, fmt))
