"""The overlong rule against the paper's three cases written out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mantissa.errors import MantissaError
from mantissa.tasks import overlong_penalty


def by_cases(length: int, max_length: int, buffer: int) -> float:
    """Equation 13 of arXiv 2503.14476, up to its longest completion."""
    if length <= max_length - buffer:
        return 0.0
    return ((max_length - buffer) - length) / buffer


@given(max_length=st.integers(1, 30_000), data=st.data(), factor=st.floats(0, 4))
def test_the_papers_cases(max_length: int, data: st.DataObject, factor: float) -> None:
    buffer = data.draw(st.integers(1, max_length))
    length = data.draw(st.integers(0, max_length))
    want = factor * by_cases(length, max_length, buffer)
    assert overlong_penalty(length, max_length, buffer, factor) == pytest.approx(want, abs=1e-12)


def test_the_papers_numbers() -> None:
    assert [overlong_penalty(n, 20480, 4096) for n in (0, 16384, 18432, 20480)] == [0, 0, -0.5, -1]


@pytest.mark.parametrize(("buffer", "factor"), [(0, 1.0), (101, 1.0), (10, -1.0), (10, float("nan"))])
def test_settings_that_make_no_sense(buffer: int, factor: float) -> None:
    with pytest.raises(MantissaError, match="overlong"):
        overlong_penalty(50, 100, buffer, factor)
