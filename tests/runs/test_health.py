from __future__ import annotations

import math

import pytest

from mantissa.runs.health import check, in_range, verdict
from mantissa.runs.metrics import BY_NAME


def rows(name: str, values: list[float]) -> list[dict]:
    return [{"step": i, name: value} for i, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("name", "value", "good"),
    [
        ("precision/skipped", 0, True),
        ("precision/skipped", 1, False),
        ("correction/ess", 0.3, True),
        ("correction/ess", 0.29, False),
        ("gap/kl", -0.11, False),
        ("gap/kl", 0.1, True),
        ("gap/kl", math.nan, False),
        ("policy/loss", 1e9, True),
        ("policy/loss", -math.inf, False),
    ],
)
def test_range_of_one_value(name: str, value: float, good: bool) -> None:
    assert in_range(BY_NAME[name], value) is good


def test_a_good_run_has_no_excursion() -> None:
    good = [{"step": 1, "gap/kl": 0.0, "policy/loss": -3.0, "precision/skipped": 0, "note": "text", "time/eval": None}]
    assert check(good) == []
    assert verdict([]) == "healthy"


def test_a_brief_excursion_is_to_watch() -> None:
    (found,) = check(rows("gap/kl", [0.0] * 10 + [0.5, -0.7] + [0.0] * 10))
    assert (found.worst, found.worst_step, found.first_step, found.steps_out, found.steps) == (-0.7, 12, 11, 2, 22)
    assert found.last == 0.0
    assert not found.serious
    assert verdict([found]) == "watch"


@pytest.mark.parametrize(
    "values",
    [
        [0.0] * 30 + [0.2],  # out at the end
        [0.2] * 4 + [0.0] * 30,  # out for more than a tenth
        [0.0] * 30 + [math.nan] + [0.0] * 30,  # not finite, once
    ],
)
def test_serious_excursions(values: list[float]) -> None:
    (found,) = check(rows("gap/kl", values))
    assert found.serious
    assert verdict([found]) == "unhealthy"


def test_what_is_not_finite_is_worst_and_serious_comes_first() -> None:
    data = rows("policy/loss", [1.0, math.inf, 2.0])
    data[0]["correction/ess"] = 0.1
    for row in data[1:]:
        row["correction/ess"] = 0.9
    data += [{"step": 4 + i, "correction/ess": 0.9} for i in range(20)]
    first, second = check(data)
    assert (first.metric.name, first.worst, first.worst_step) == ("policy/loss", math.inf, 2)
    assert (second.metric.name, second.serious) == ("correction/ess", False)
