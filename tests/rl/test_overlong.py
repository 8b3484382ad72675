"""The penalty on length: the paper's formula, in the advantages and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mantissa.errors import MantissaError
from mantissa.rl.collect import overlong_penalty, shaped
from mantissa.rl.config import OverlongConfig, RunConfig
from mantissa.runs.directory import RunDirectory
from mantissa.tasks import Reward


@given(st.integers(2, 20480), st.data())
def test_the_formula_in_fractions(max_tokens: int, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(1, max_tokens - 1))
    length = data.draw(st.integers(1, max_tokens))
    factor = data.draw(st.floats(0.01, 100))
    expected = min(Fraction(0), Fraction(-(length - (max_tokens - buffer)), buffer) * Fraction(factor))
    found = overlong_penalty(length, max_tokens, OverlongConfig(buffer=buffer, factor=factor))
    assert found == pytest.approx(float(expected), rel=1e-14)
    assert overlong_penalty(length, max_tokens, None) == 0


def test_the_paper_s_numbers() -> None:
    """20480 tokens, the last 4096 of them penalised, factor 1."""
    config = OverlongConfig(buffer=4096)
    lengths = {1: 0.0, 16384: 0.0, 16385: -1 / 4096, 18432: -0.5, 20480: -1.0}
    assert {length: overlong_penalty(length, 20480, config) for length in lengths} == lengths


def test_the_verdict_and_the_error_stay() -> None:
    reward = Reward(1.0, True, "late")
    assert shaped(reward, -0.25) == Reward(0.75, True, "late")
    assert shaped(reward, 0.0) is reward


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.overlong.buffer=6", r"rollout: overlong\.buffer=6: expected less than max_tokens=6"),
        ("rollout.overlong.buffer=0", r"rollout\.overlong\.buffer: .*greater than or equal to 1, got 0"),
        ("rollout.overlong={buffer: 2, factor: 0}", r"rollout\.overlong\.factor: .*greater than 0, got 0"),
        ("rollout.overlong.factor=1", r"missing key 'rollout\.overlong\.buffer'"),
        ("rollout.overlong={buffer: 2, length: 3}", r"unknown key 'rollout\.overlong\.length'"),
    ],
)
def test_mistakes(configure: Callable[..., RunConfig], override: str, message: str) -> None:
    with pytest.raises(MantissaError, match=message):
        configure(override)


def test_a_run_penalises_the_reward_and_not_the_accuracy(train: Callable[..., RunDirectory]) -> None:
    quick = ("steps=2", "warm_start.steps=4", "warm_start.evaluate_every=4", "task.reward=prefix", "evaluation=null")
    plain = train(*quick).read_rollouts(1)
    run = train(*quick, "rollout.overlong={buffer: 4, factor: 3}")
    first, penalised = run.read_metrics()[0], run.read_rollouts(1)
    penalty = {1: 0.0, 2: 0.0, 3: -0.75, 4: -1.5, 5: -2.25, 6: -3.0}
    assert [row["tokens"] for row in penalised] == [row["tokens"] for row in plain]
    for row, before in zip(penalised, plain, strict=True):
        assert row["reward"] == pytest.approx(before["reward"] + penalty[row["length"]], abs=1e-12)
        assert row["correct"] == before["correct"]
    lengths = [row["length"] for row in penalised]
    assert len(set(lengths)) > 2
    assert first["reward/overlong_penalty"] == pytest.approx(sum(penalty[n] for n in lengths) / len(lengths))
    assert first["reward/overlong_fraction"] == sum(n > 2 for n in lengths) / len(lengths)
    assert first["reward/accuracy"] == sum(row["correct"] for row in plain) / len(plain)
    assert first["reward/mean"] == pytest.approx(sum(row["reward"] for row in penalised) / len(penalised), rel=1e-6)
    for start in range(0, len(penalised), 4):  # dr_grpo: the shaped reward, less the group's mean of it
        group = penalised[start : start + 4]
        mean = sum(row["reward"] for row in group) / 4
        assert [row["advantage"] for row in group] == pytest.approx([row["reward"] - mean for row in group], abs=1e-6)
