"""What seeds say of a figure, against sums by hand: paired differences with their interval, or why there is none."""

from __future__ import annotations

import math
from statistics import stdev

import pytest

from mantissa.runs.groups import SeedTable, over_seeds


def test_differences_are_paired_by_seed() -> None:
    values = {"x": {1: 3.0, 2: 5.0, 3: 4.0, 4: 9.0}, "control": {3: 4.0, 2: 2.0, 1: 1.0}, "alone": {9: 1.0}, "none": {}}
    table = SeedTable(values)
    found = table.difference("x", "control")
    assert found is not None
    half = 4.302653 * stdev([2, 3, 0]) / math.sqrt(3)
    assert (found.estimate.low, found.estimate.high) == pytest.approx((5 / 3 - half, 5 / 3 + half), rel=1e-6)
    assert (found.seeds, found.ratio, found.apart) == (3, False, False)
    assert table.difference("x", "alone") is None
    assert table.estimate("none") is None


def test_what_spans_decades_is_a_ratio_unless_a_value_forbids_it() -> None:
    ratio = SeedTable({"x": {1: 8.0, 2: 12.5}, "control": {1: 1.0, 2: 1.0}}, decades=True).difference("x", "control")
    assert ratio is not None
    assert (ratio.ratio, ratio.estimate.value) == (True, pytest.approx(10.0))
    zero = SeedTable({"x": {1: 8.0, 2: 0.0}, "control": {1: 1.0, 2: 1.0}}, decades=True).difference("x", "control")
    assert zero is not None
    assert (zero.ratio, zero.estimate.value) == (False, 3.0)


def test_no_interval_of_one_seed_nor_of_what_is_not_finite() -> None:
    assert over_seeds([0.5]).how == "one seed"
    assert over_seeds([0.5, math.inf]).how == "not finite"
    equal = over_seeds([0.25, 0.25])
    assert (equal.low, equal.high, equal.how) == (0.25, 0.25, "equal in all seeds")
    assert over_seeds([0.5]).low is None
    assert over_seeds([0.5, math.inf]).low is None
