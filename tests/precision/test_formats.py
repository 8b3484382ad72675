"""Number formats against torch.finfo and every bit pattern; rounding, bit for bit, against a table of every value and
exact fractions.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa.base.errors import MantissaError
from mantissa.precision import (
    BF16,
    DIAL,
    E4M3,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    NumberFormat,
    format_named,
    is_on_grid,
    round_by_arithmetic,
    round_to_format,
    round_to_format_,
)

DIALLED = [DIAL[name] for name in ("e8m2", "e8m5", "e8m10", "e5m3", "e5m9")]
NARROW = [BF16, FP16, E5M2, E4M3, *DIALLED]
narrow = pytest.mark.parametrize("fmt", NARROW, ids=str)


def patterns(dtype: torch.dtype) -> Tensor:
    """Every bit pattern of a dtype of one byte or two."""
    width = torch.uint8 if dtype.itemsize == 1 else torch.int16
    return torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32).to(width).view(dtype)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_facts_agree_with_finfo(fmt: NumberFormat) -> None:
    info = torch.finfo(fmt.dtype)
    assert fmt.largest == info.max
    assert fmt.epsilon == info.eps
    assert fmt.smallest_normal == info.smallest_normal
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == info.bits


@pytest.mark.parametrize("fmt", [BF16, FP16, E5M2, E4M3], ids=str)
def test_facts_agree_with_every_bit_pattern(fmt: NumberFormat) -> None:
    values = patterns(fmt.dtype).double()
    positive = values[values.isfinite() & (values > 0)].sort().values
    assert positive[-1].item() == fmt.largest
    assert positive[0].item() == fmt.smallest_subnormal
    assert positive[positive > 1][0].item() == 1 + fmt.epsilon
    # Below the smallest normal the spacing is constant; it doubles for the first time one binade above it.
    gaps = positive.diff()
    assert gaps[positive[1:] <= 2 * fmt.smallest_normal].unique().tolist() == [fmt.smallest_subnormal]
    assert gaps[positive[:-1] >= 2 * fmt.smallest_normal].min().item() == 2 * fmt.smallest_subnormal
    assert values.isinf().any().item() == (fmt.overflow == "inf")


def test_only_formats_with_few_exponent_bits_need_loss_scaling() -> None:
    assert {f.name for f in FORMATS.values() if f.needs_loss_scaling} == {"fp16", "e5m2", "e4m3"}
    typical_gradient = 1e-9
    for fmt in FORMATS.values():
        assert fmt.needs_loss_scaling == (fmt.smallest_subnormal > typical_gradient)


@pytest.mark.parametrize(
    ("name", "fmt"),
    [("fp16", FP16), ("float16", FP16), ("half", FP16), ("bfloat16", BF16), ("float32", FP32), ("e4m3fn", E4M3)],
)
def test_formats_are_found_by_either_name(name: str, fmt: NumberFormat) -> None:
    assert format_named(name) is fmt
    assert str(fmt) == fmt.name


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(
        MantissaError, match=r"'bf61': expected one of fp32, bf16, fp16, e5m2, e4m3; did you mean 'bf16'"
    ):
        format_named("bf61")
    with pytest.raises(MantissaError, match=r"'zebra': expected one of fp32, bf16, fp16, e5m2, e4m3$"):
        format_named("zebra")


@cache
def positive_values(fmt: NumberFormat) -> np.ndarray:
    """Zero and every positive finite value in ascending order; index parity is the parity of the last mantissa bit."""
    if not fmt.has_dtype:  # by the definition of a format: exponent field and mantissa field, one number
        exponent, mantissa = np.divmod(np.arange((2**fmt.exponent_bits - 1) << fmt.mantissa_bits), 2**fmt.mantissa_bits)
        significand = (exponent > 0) + mantissa / 2**fmt.mantissa_bits
        return significand * 2.0 ** (np.maximum(exponent, 1) - fmt.bias)
    values = patterns(fmt.dtype)[: 2 ** (8 * fmt.dtype.itemsize - 1)].double()
    return values[values.isfinite()].numpy()


def table_oracle(x: Tensor, fmt: NumberFormat) -> Tensor:
    """Nearest value by search in the table of all values, ties to the even pattern; float64 throughout."""
    table = positive_values(fmt)
    beyond = table[-1] + (table[-1] - table[-2])  # where the next value would be, had the format one more binade
    table = np.append(table, beyond)
    wide = x.double().numpy()
    magnitude = np.minimum(np.nan_to_num(np.abs(wide), nan=0.0, posinf=beyond), beyond)
    high = np.searchsorted(table, magnitude).clip(1)
    low = high - 1
    to_low, to_high = magnitude - table[low], table[high] - magnitude
    index = np.where(to_low < to_high, low, np.where(to_high < to_low, high, np.where(low % 2 == 0, low, high)))
    over = np.inf if fmt.overflow == "inf" else fmt.largest
    result = np.where(index == len(table) - 1, over, table[index])
    result = np.where(np.isnan(wide), np.nan, np.copysign(result, wide))
    return torch.from_numpy(result).to(x.dtype)


def fraction_oracle(value: float, fmt: NumberFormat) -> float:
    """Nearest value of ``fmt`` to a float64, in exact fractions."""
    if math.isnan(value):
        return value
    over = math.inf if fmt.overflow == "inf" else fmt.largest
    if math.isinf(value):
        return math.copysign(over, value)
    exact = abs(Fraction(value))
    exponent = 1 - fmt.bias
    while Fraction(2) ** (exponent + 1) <= exact:
        exponent += 1
    spacing = Fraction(2) ** (exponent - fmt.mantissa_bits)
    rounded = round(exact / spacing) * spacing  # Python rounds a Fraction half to even
    return math.copysign(over if rounded > Fraction(fmt.largest) else float(rounded), value)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal including the sign of zero; any NaN equals any NaN."""
    bits = {torch.float64: torch.int64, torch.float32: torch.int32}.get(a.dtype, torch.int16)
    return a.dtype == b.dtype and bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


def midpoints_and_neighbours(fmt: NumberFormat) -> Tensor:
    """fp32: every midpoint between neighbours of the format, the values on both sides of it, and the values; signed."""
    table = positive_values(fmt)
    beyond = table[-1] + (table[-1] - table[-2])
    table = np.append(table, beyond) if beyond <= FP32.largest else table
    middle = (table[1:] + table[:-1]) / 2
    if beyond > FP32.largest:  # 8 exponent bits: the midpoint is an fp32 number, the value after it is not
        middle = np.append(middle, (table[-1] + beyond) / 2)
    exact = torch.from_numpy(middle).float()
    assert torch.equal(exact.double(), torch.from_numpy(middle))
    inf = torch.full_like(exact, math.inf)
    points = torch.cat(
        (exact, exact.nextafter(inf), exact.nextafter(-inf), torch.from_numpy(positive_values(fmt)).float())
    )
    return torch.cat((points, -points))


SPECIAL = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.4e38, -3.4e38, 1e-30, 464.0, 465.0])
# NaNs whose digits a carry would turn into another number; CUDA writes the first.
ODD_NANS = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
SPECIAL = torch.cat((SPECIAL, ODD_NANS))


@narrow
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_pattern_rounds_as_the_table_says_in_its_own_dtype_too(
    fmt: NumberFormat, source: torch.dtype
) -> None:
    for x in (patterns(source).float(), patterns(source)):
        expected = table_oracle(x.float(), fmt).to(x.dtype)  # exact, but for bf16's 65536, which fp16 turns into inf
        for rounded in (round_to_format(x, fmt), round_by_arithmetic(x, fmt), round_to_format_(x.clone(), fmt)):
            assert same_bits(rounded, expected)


@narrow
def test_every_midpoint_goes_to_the_even_neighbour_and_its_own_neighbours_do_not(fmt: NumberFormat) -> None:
    x = torch.cat((midpoints_and_neighbours(fmt), SPECIAL))
    expected = table_oracle(x, fmt)
    for rounded in (round_to_format(x, fmt), round_by_arithmetic(x, fmt), round_to_format_(x.clone(), fmt)):
        assert same_bits(rounded, expected)


class _RecordCasts(TorchDispatchMode):
    """The largest magnitude that was given to a cast to e4m3."""

    largest = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::_to_copy" and (kwargs or {}).get("dtype") == torch.float8_e4m3fn:
            self.largest = max(self.largest, args[0].abs().max().item())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rounding", [round_to_format, round_to_format_])
def test_e4m3_saturation_does_not_rest_on_the_torch_version(rounding: Any) -> None:
    with _RecordCasts() as casts:
        out = rounding(torch.tensor([1.0, 447.0, 1e9, -math.inf]), E4M3)
    assert out.tolist() == [1.0, 448.0, 448.0, -448.0]
    assert casts.largest == 448.0


# ---- float64 input: one rounding, not two


def test_float64_is_not_rounded_twice() -> None:
    x = torch.tensor([1 + 2.0**-11 + 2.0**-40], dtype=torch.float64)
    assert x.to(torch.float16).double().item() == 1.0  # what the cast does
    assert round_to_format(x, FP16).item() == 1 + 2.0**-10
    assert round_to_format_(x.clone(), FP16).item() == 1 + 2.0**-10
    below = torch.tensor([1 - 2.0**-12 - 2.0**-50], dtype=torch.float64)  # passes through the tie downwards
    assert round_to_format(below, FP16).item() == 1 - 2.0**-11


@narrow
def test_float64_just_beside_every_midpoint(fmt: NumberFormat) -> None:
    table = positive_values(fmt)
    middle = torch.from_numpy((table[1:] + table[:-1]) / 2)
    inf = torch.full_like(middle, math.inf)
    high, low = torch.from_numpy(table[1:].copy()), torch.from_numpy(table[:-1].copy())
    assert torch.equal(round_to_format(middle.nextafter(inf), fmt), high)
    assert torch.equal(round_to_format(middle.nextafter(-inf), fmt), low)


@settings(max_examples=200, deadline=None)
@given(value=st.floats(), fmt=st.sampled_from([*NARROW, FP32]))
def test_float64_against_exact_fractions(value: float, fmt: NumberFormat) -> None:
    x = torch.tensor([value], dtype=torch.float64)
    expected = torch.tensor([fraction_oracle(value, fmt)], dtype=torch.float64)
    assert same_bits(round_to_format(x, fmt), expected)
    assert same_bits(round_to_format_(x.clone(), fmt), expected)


def test_float64_keeps_what_fp32_cannot_hold_out_of_an_fp32_grid() -> None:
    x = torch.tensor([1 + 2.0**-24 + 2.0**-50, 1e300, -1e-60, math.nan], dtype=torch.float64)
    got = round_to_format(x, FP32)
    assert got[:3].tolist() == [1 + 2.0**-23, math.inf, 0.0]
    assert got[3].isnan()
    assert math.copysign(1, got[2].item()) == -1


# ---- the dial


def test_the_dial_has_the_bits_of_the_formats_that_hardware_has() -> None:
    x = torch.cat((torch.randn(100_000) * torch.logspace(-44, 38, 100_000), SPECIAL))  # more than one part
    for name, fmt in (("e8m7", BF16), ("e5m10", FP16)):
        dialled = DIAL[name]
        assert not dialled.has_dtype
        assert (dialled.largest, dialled.smallest_subnormal) == (fmt.largest, fmt.smallest_subnormal)
        assert same_bits(round_to_format(x, dialled), round_to_format(x, fmt))
    assert DIAL["e5m2"] is E5M2
    assert len(DIAL) == 18
    with pytest.raises(MantissaError, match="unknown number format 'e8m4'"):
        format_named("e8m4")  # which names what can be stored


@pytest.mark.parametrize("name", ["e8m4", "e5m4"])
def test_a_gradient_is_rounded_to_a_format_of_the_dial_too(name: str) -> None:
    fmt, x, grad = DIAL[name], torch.randn(50, requires_grad=True), torch.randn(50)
    out = round_to_format(x, fmt)
    out.backward(grad)
    assert x.grad is not None
    assert same_bits(x.grad, round_by_arithmetic(grad, fmt))
    assert same_bits(round_to_format_(x * 1, fmt), out)  # in place too where a gradient is wanted


# ---- other dtypes, identity, properties


def test_rounding_to_fp32_is_the_identity_and_makes_no_copy() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(5).to(dtype)
        assert round_to_format(x, FP32) is x
        assert round_to_format_(x, FP32) is x


@narrow
def test_in_place_changes_the_tensor_itself_also_a_strided_view(fmt: NumberFormat) -> None:
    base = torch.randn(6, 8) * 100
    expected = base.clone()
    expected[:, ::2] = round_to_format(base[:, ::2], fmt)
    view = base[:, ::2]
    assert round_to_format_(view, fmt) is view
    assert torch.equal(base, expected)
    large = torch.randn((1 << 19) + 77).mul_(300)  # cast part by part
    expected = round_to_format(large, fmt)
    assert round_to_format_(large, fmt) is large
    assert same_bits(large, expected)
    fresh = torch.randn(16)
    kept = fresh.clone()
    assert round_to_format(fresh, fmt).data_ptr() != fresh.data_ptr()
    assert torch.equal(fresh, kept)


@narrow
def test_the_grid_is_exactly_the_formats_values(fmt: NumberFormat) -> None:
    values = torch.from_numpy(positive_values(fmt)).float()
    assert bool(is_on_grid(torch.cat((values, -values)), fmt).all())
    off = values[1:].nextafter(torch.full_like(values[1:], math.inf))
    assert not bool(is_on_grid(off, fmt).any())
    assert is_on_grid(torch.tensor([math.nan, math.inf]), fmt).tolist() == [True, fmt.overflow == "inf"]
