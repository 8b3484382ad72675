"""Spread, ratios, the order of rounds, and the crossover on tables made by hand."""

from __future__ import annotations

import time

import pytest

from mantissa.bench.rows import Crossover, crossover, crossover_sentence
from mantissa.bench.runner import quartiles, speed_up, step_seconds
from mantissa.mismatch.estimates import Estimate


def table(**speeds: float | tuple[float, float, float]) -> dict[int, Estimate]:
    """``k10=1.2`` is 1.2 times fp32's speed at 10,000 parameters, give or take a hundredth."""
    return {
        int(name[1:]) * 1000: Estimate(s, s - 0.01, s + 0.01) if isinstance(s, float) else Estimate(s[1], s[0], s[2])
        for name, s in speeds.items()
    }


def test_the_spread_is_median_and_quartiles_and_ratios_are_taken_within_a_round() -> None:
    assert quartiles([5.0, 1.0, 2.0, 3.0, 9.0]) == Estimate(3.0, 2.0, 5.0)
    assert quartiles([3.0]) == Estimate(3.0, 3.0, 3.0)
    # The machine was ten times slower in the second round: the ratio of the medians would be 5.5 / 2.75 only by luck.
    assert speed_up([1.0, 10.0, 1.0], [0.5, 5.0, 0.5]) == Estimate(2.0, 2.0, 2.0)


def test_every_round_runs_all_in_an_order_that_rotates() -> None:
    called: list[str] = []

    def step(name: str) -> None:
        called.append(name)
        time.sleep(0.021)  # longer than a block, so that each call is a measurement

    times = step_seconds({n: (lambda n=n: step(n)) for n in "abc"}, "cpu", rounds=3, warm_up=1)  # type: ignore[misc]
    assert "".join(called) == "abc" + "abc" + "bca" + "cab"
    assert all(len(seconds) == 3 and min(seconds) >= 0.02 for seconds in times.values())


def test_a_short_step_is_timed_in_blocks_and_reported_for_one() -> None:
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.002)

    seconds = step_seconds({"only": step}, "cpu", rounds=2, warm_up=3)["only"]
    per_round = (calls - 3) / 2
    assert 4 <= per_round <= 10
    assert all(0.002 <= s < 0.006 for s in seconds)


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        (table(k10=0.5, k100=0.9, k1000=1.2, k10000=2.0), Crossover(1_000_000, 100_000, ())),
        (table(k10=0.5, k100=0.9, k1000=0.95), Crossover(None, None, ())),
        (table(k10=1.1, k100=1.5), Crossover(10_000, None, ())),
        (table(k10=1.1, k100=0.9, k1000=1.3), Crossover(1_000_000, 100_000, (10_000,))),
        (table(k10=0.9, k100=1.4, k1000=0.9), Crossover(None, None, (100_000,))),
        (table(k10=0.5, k100=(0.99, 1.2, 1.3), k1000=1.2), Crossover(1_000_000, 100_000, ())),  # not three in four
        (table(k1000=2.0, k10=0.5), Crossover(1_000_000, 10_000, ())),  # in any order
    ],
    ids=["in the middle", "never", "always", "after a relapse", "only once", "within the noise", "unsorted"],
)
def test_the_crossover(speeds: dict[int, Estimate], expected: Crossover) -> None:
    assert crossover(speeds) == expected


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        (table(k10=0.5, k1200=1.3, k9000=2.5), ["from 1.2M parameters on", "0.50x as fast at 10k", "2.50x as fast"]),
        (table(k10=0.5, k1200=0.7), ["no size from which on it is faster", "at best it is 0.70x as fast (at 1.2M)"]),
        (table(k10=1.5, k1200=1.7), ["at every size measured, from 10k parameters on"]),
        (table(k10=0.9, k100=1.4, k1000=0.9), ["no size from which on", "faster at 100k only"]),
        (table(k250=0.5), ["takes 2.00x fp32's time a step, at 250k parameters"]),
    ],
)
def test_the_sentence_names_the_size_and_the_numbers(speeds: dict[int, Estimate], words: list[str]) -> None:
    sentence = crossover_sentence("fp16", "simulated", speeds)
    assert sentence.startswith("fp16 (simulated)")
    assert all(part in sentence for part in words), sentence
