"""Number formats against torch.finfo and against every bit pattern that a format has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mantissa.errors import MantissaError
from mantissa.precision import BF16, E4M3, E5M2, FORMATS, FP16, FP32, NumberFormat, format_named

NARROW = [BF16, FP16, E5M2, E4M3]


def every_value(fmt: NumberFormat) -> Tensor:
    """Every bit pattern of the format, as float64."""
    if fmt.dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(fmt.dtype).double()
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(fmt.dtype).double()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_facts_agree_with_finfo(fmt: NumberFormat) -> None:
    info = torch.finfo(fmt.dtype)
    assert fmt.largest == info.max
    assert fmt.epsilon == info.eps
    assert fmt.smallest_normal == info.smallest_normal
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == info.bits


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_facts_agree_with_every_bit_pattern(fmt: NumberFormat) -> None:
    values = every_value(fmt)
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
