"""Trajectories: what they may hold, what tells the outcome, and how tasks are split."""

import json
from typing import Any

import pytest

from mantissa.base.errors import MantissaError
from mantissa.genesis.worldmodel import Trajectory, by_task, synthetic, trajectory
from mantissa.genesis.worldmodel.trajectory import NOISE_FLOOR
from trajectories import planted

GOOD: dict[str, Any] = {"initial_state": {"metrics": {"overall_score": 0.25}}, "actions": ["a"], "final_reward": 0.75}


def test_reads_both_names_of_the_reward_and_comes_back_from_json() -> None:
    old = {name: value for name, value in GOOD.items() if name != "final_reward"} | {"reward": 0.75}
    for values in (GOOD, old):
        read = trajectory(values)
        assert (read.final_reward, read.improvement, read.final_outcome) == (0.75, 0.5, "unknown")
        assert trajectory(read.body()) == read


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"initial_state": {"final_outcome": "success"}}, "tells how it ended"),
        ({"initial_state": {"a": [{"b": {"Reward": 1}}]}}, r"initial_state.a.b holds 'Reward'"),
        ({"initial_state": {"x": float("nan")}}, "initial_state: ValueError"),
        ({"initial_state": {"x": object()}}, "initial_state: TypeError"),
        ({"initial_state": {"x": "y" * 300_000}}, "300,009 bytes"),
        ({"initial_state": json.loads("[" * 20 + "]" * 20)}, "dictionary"),
        ({"initial_state": {"x": json.loads("[" * 20 + "]" * 20)}}, "at most 8 levels"),
        ({"actions": []}, "at least 1"),
        ({"actions": ["a"] * 257}, "at most 256"),
        ({"actions": ["a" * 300_000]}, "characters of actions"),
        ({"final_reward": 1.5}, "less than or equal to 1"),
        ({"final_reward": "1"}, "without quotes"),
        ({"final_outcome": "won"}, "'success', 'failure'"),
        ({"colour": "red"}, "unknown setting 'colour'"),
    ],
)
def test_refuses(change: dict[str, Any], said: str) -> None:
    with pytest.raises(MantissaError, match=said):
        Trajectory(**(GOOD | change))


def test_splits_whole_tasks() -> None:
    rows = planted(80)
    kept, apart = by_task(rows, 0.25, seed=3)
    assert {t.task for t in kept} & {t.task for t in apart} == set()
    assert len({t.task for t in apart}) == 2
    assert {t.id for t in kept + apart} == {t.id for t in rows}
    assert by_task(rows[::-1], 0.25, seed=3)[1][::-1] == apart
    assert by_task(rows[:1], 0.25, seed=3) == (rows[:1], [])


def test_the_generator_draws_what_it_says() -> None:
    rows = synthetic(4000, 1)
    assert rows[:9] == synthetic(9, 1)
    rewards = [t.final_reward for t in rows]
    assert -0.1 <= min(rewards) < 0 < 0.59 < max(rewards) <= 0.6
    mean = sum(rewards) / len(rewards)
    assert sum((r - mean) ** 2 for r in rewards) / len(rewards) == pytest.approx(NOISE_FLOOR, rel=0.05)
    assert sum(t.final_outcome == "success" for t in rows) / len(rows) == pytest.approx(0.7, abs=0.03)
    assert {len(t.actions) for t in rows} == {1, 2, 3, 4}
