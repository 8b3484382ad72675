"""Advantages against a plain Python loop over the groups, in any order and size."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mantissa.algorithms import ADVANTAGES, AdvantageKind, advantage
from mantissa.precision import values

# Multiples of 1/8 are exact in every format, so that "all equal" means the same to the oracle.
REWARDS = st.integers(-16, 16).map(lambda n: n / 8)
BATCHES = st.lists(st.tuples(REWARDS, st.integers(-3, 3)), min_size=1, max_size=24)


def oracle(kind: str, rewards: list[float], groups: list[int]) -> list[float]:
    """One response at a time, with the statistics module."""
    result = []
    if kind == "reinforce_pp":
        if len(set(rewards)) == 1:
            return [0.0] * len(rewards)
        return [(r - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6) for r in rewards]
    if kind in ("reinforce_pp_baseline", "gdpo"):
        centred = oracle("dr_grpo" if kind == "reinforce_pp_baseline" else "grpo", rewards, groups)
        spread = statistics.stdev(centred) if len(centred) > 1 else 0.0
        return [r / (spread + 1e-6) for r in centred]
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        if len(set(members)) == 1:
            result.append(0.0)
        elif kind == "grpo":
            result.append((reward - statistics.mean(members)) / (statistics.stdev(members) + 1e-6))
        elif kind == "dr_grpo":
            result.append(reward - statistics.mean(members))
        else:
            result.append(reward - statistics.mean(others))
    return result


@pytest.mark.parametrize("kind", ADVANTAGES)
@settings(deadline=None, max_examples=40)
@given(batch=BATCHES)
def test_equals_a_loop_over_groups(kind: str, batch: list[tuple[float, int]]) -> None:
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    result, metrics = advantage(torch.tensor(rewards), torch.tensor(groups), kind)
    expected = torch.tensor(oracle(kind, rewards, groups))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(result == 0, expected == 0)  # degenerate groups are zero exactly
    distinct = set(groups)
    degenerate = sum(len({r for r, g in batch if g == group}) == 1 for group in distinct)
    measured = values(metrics)
    assert measured["advantage/degenerate_group_fraction"].item() == pytest.approx(degenerate / len(distinct))
    assert measured["advantage/abs_max"].item() == result.abs().max().item()
    assert measured["reward/mean"].item() == pytest.approx(statistics.mean(rewards))
    assert (measured["reward/min"].item(), measured["reward/max"].item()) == (min(rewards), max(rewards))


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_equal_rewards_whose_mean_rounds_give_exact_zero(kind: str) -> None:
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    assert (rewards.sum() / 3).item() != 0.1  # the trap: r - mean is 1.4e-17, and 1.4e-17 / 1e-6 is no zero
    assert advantage(rewards, torch.zeros(3, dtype=torch.int64), kind)[0].tolist() == [0.0, 0.0, 0.0]


def test_tiny_differences_beside_a_large_offset_survive() -> None:
    """fp32 sums of 1e6 + k/16 would lose the k/16."""
    rewards = 1e6 + torch.arange(64.0) / 16
    expected = (torch.arange(64, dtype=torch.float64) / 16 - 63 / 32).float()
    assert torch.equal(advantage(rewards, torch.zeros(64, dtype=torch.int64), "dr_grpo")[0], expected)


@pytest.mark.parametrize("kind", ADVANTAGES)
@settings(deadline=None, max_examples=25)
@given(batch=BATCHES, bad=st.sampled_from([float("inf"), -float("inf"), float("nan")]), size=st.integers(1, 3))
def test_a_group_of_equal_infinities_is_unknown_and_not_zero(
    kind: str, batch: list[tuple[float, int]], bad: float, size: int
) -> None:
    """Its own rewards differ by nothing that can be known; the other groups are as they were without it."""
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    result, metrics = advantage(torch.tensor([*rewards, *[bad] * size]), torch.tensor([*groups, *[99] * size]), kind)
    assert not result[len(rewards) :].isfinite().any()
    if ADVANTAGES[kind].of_batch or ADVANTAGES[kind].over_batch:
        assert not result.isfinite().any()
        return
    torch.testing.assert_close(result[: len(rewards)], advantage(torch.tensor(rewards), torch.tensor(groups), kind)[0])
    alike = sum(len({r for r, g in batch if g == group}) == 1 for group in set(groups))
    fraction = values(metrics)["advantage/degenerate_group_fraction"].item()
    assert fraction == pytest.approx(alike / (len(set(groups)) + 1))


def test_no_responses() -> None:
    result, metrics = advantage(torch.empty(0), torch.empty(0, dtype=torch.int64), "rloo")
    assert result.shape == (0,)
    assert all(value.item() == 0 for value in values(metrics).values())


def test_wrong_inputs_are_programmers_errors() -> None:
    with pytest.raises(TypeError, match="int64"):
        advantage(torch.zeros(2), torch.zeros(2), "grpo")
    with pytest.raises(ValueError, match="one reward and one group"):
        advantage(torch.zeros(2), torch.zeros(3, dtype=torch.int64), "grpo")


TERMS = st.lists(st.tuples(REWARDS, REWARDS, st.integers(-2, 2)), min_size=2, max_size=20)


@settings(deadline=None, max_examples=40)
@given(batch=TERMS, weights=st.tuples(st.integers(-3, 3), st.integers(1, 3)))
def test_gdpo_equals_a_loop_over_rewards_and_groups(
    batch: list[tuple[float, float, int]], weights: tuple[int, int]
) -> None:
    groups = [group for *_, group in batch]
    terms = [[row[k] for row in batch] for k in (0, 1)]
    each = [oracle("grpo", term, groups) for term in terms]
    total = [weights[0] * one + weights[1] * other for one, other in zip(*each, strict=True)]
    expected = [value / (statistics.stdev(total) + 1e-6) for value in total]
    rewards = torch.tensor([weights[0] * one + weights[1] * other for one, other, _ in batch])
    given_weights = torch.tensor([weights] * len(batch))
    result, metrics = advantage(rewards, torch.tensor(groups), "gdpo", torch.tensor(terms).T, given_weights)
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    same = [len({(a, b) for a, b, g in batch if g == group}) == 1 for group in set(groups)]
    degenerate = values(metrics)["advantage/degenerate_group_fraction"].item()
    assert degenerate == pytest.approx(sum(same) / len(same))


def test_gdpo_tells_apart_what_sums_to_the_same_and_scales_of_rewards_do_not_show() -> None:
    terms = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    groups, weights = torch.tensor([0, 0, 1, 1]), torch.ones(4, 2)
    sums = terms.sum(1)
    assert advantage(sums, groups, "grpo")[0].tolist()[:2] == [0.0, 0.0]
    uneven = advantage(sums, groups, "gdpo", terms, weights * torch.tensor([2.0, 1.0]))[0]
    assert uneven[0] > 0 > uneven[1]
    scaled = advantage(sums, groups, "gdpo", terms * torch.tensor([1.0, 1000.0]), weights * torch.tensor([2.0, 1.0]))[0]
    torch.testing.assert_close(scaled, uneven, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(batch=st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 2)), min_size=2, max_size=12))
@pytest.mark.parametrize("kind", ADVANTAGES)
def test_normalises_says_to_which_a_common_factor_is_nothing(kind: AdvantageKind, batch: list[tuple[int, int]]) -> None:
    rewards = torch.tensor([float(value) for value, _ in batch], dtype=torch.float64)
    groups = torch.tensor([group for _, group in batch])
    one, eight = (advantage(factor * rewards, groups, kind)[0] for factor in (1.0, 8.0))
    expected = one if ADVANTAGES[kind].normalises else 8 * one
    torch.testing.assert_close(eight, expected, rtol=1e-4, atol=1e-4)
