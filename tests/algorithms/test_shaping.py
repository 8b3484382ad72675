"""Overlong shaping against the published line, in exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mantissa.algorithms import overlong_penalty
from mantissa.errors import MantissaError


def test_the_published_setting() -> None:
    length = torch.tensor([0, 1, 16384, 16385, 18432, 20480])
    assert overlong_penalty(length, 20480, 4096).tolist() == [0.0, 0.0, 0.0, -1 / 4096, -0.5, -1.0]
    assert overlong_penalty(length, 20480, 4096, factor=3.0)[-1].item() == -3.0


@given(data=st.data(), longest=st.integers(1, 40_000))
def test_is_zero_then_a_line(data: st.DataObject, longest: int) -> None:
    buffer = data.draw(st.integers(1, longest))
    lengths = data.draw(st.lists(st.integers(0, longest), min_size=1, max_size=5))
    got = overlong_penalty(torch.tensor(lengths), longest, buffer, 0.5)
    expected = [min(-Fraction(n - (longest - buffer), buffer) / 2, Fraction(0)) for n in lengths]
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([float(x) for x in expected], rel=1.2e-7, abs=0)
    assert ((got <= 0) & (got >= -0.5)).all()


@pytest.mark.parametrize(("buffer", "factor", "message"), [(0, 1.0, "buffer"), (11, 1.0, "buffer"), (5, 0.0, "factor"),
                                                          (5, float("nan"), "factor")])  # fmt: skip
def test_settings_that_make_no_sense(buffer: int, factor: float, message: str) -> None:
    with pytest.raises(MantissaError, match=f"overlong {message}"):
        overlong_penalty(torch.tensor([1]), 10, buffer, factor)


def test_a_response_longer_than_the_longest_is_a_programmers_error() -> None:
    with pytest.raises(ValueError, match="11 tokens, of 10 allowed"):
        overlong_penalty(torch.tensor([3, 11]), 10, 5)
