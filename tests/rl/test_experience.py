"""Batches as tensors, and dividing them among ranks: every token where a naive loop over single sequences finds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experiences import experience_of
from mantissa.base.errors import MantissaError
from mantissa.base.ranks import Ranks
from mantissa.rl.experience import Sequences, balanced
from mantissa.rollout import Completion
from mantissa.runs.directory import Onlooker, RunDirectory

CPU = torch.device("cpu")
TOKENS = st.lists(st.integers(1, 99), min_size=1, max_size=7)
PAIRS = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6)
Lengths = st.lists(st.integers(2, 40), min_size=1, max_size=30)


@settings(deadline=None)
@given(PAIRS)
def test_response_tokens_are_those_of_a_loop(pairs: list[tuple[list[int], list[int]]]) -> None:
    sequences = Sequences.build([p for p, _ in pairs], [r for _, r in pairs], CPU)
    width = sequences.tokens_BT.shape[1]
    expected = [
        (row * width + len(prompt) + j - 1, token)  # the position that predicts response token j
        for row, (prompt, response) in enumerate(pairs)
        for j, token in enumerate(response)
    ]
    position_N, token_N = sequences.response_tokens()
    assert list(zip(position_N.tolist(), token_N.tolist(), strict=True)) == expected
    for row, (prompt, response) in enumerate(pairs):
        whole = [*prompt, *response]
        assert sequences.tokens_BT[row].tolist() == whole + [0] * (width - len(whole))
        assert sequences.length_B[row] == len(whole)
        assert sequences.mask_BR[row].tolist() == [j < len(response) for j in range(sequences.mask_BR.shape[1])]


@settings(deadline=None)
@given(PAIRS, st.data())
def test_selected_rows_are_what_building_them_alone_gives(
    pairs: list[tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    rows = data.draw(st.lists(st.integers(0, len(pairs) - 1), min_size=1, max_size=6))
    sequences = Sequences.build([p for p, _ in pairs], [r for _, r in pairs], CPU)
    alone = Sequences.build([pairs[i][0] for i in rows], [pairs[i][1] for i in rows], CPU)
    selected = sequences.select(torch.tensor(rows))
    for name in ("tokens_BT", "prompt_length_B", "length_B", "mask_BR"):
        assert torch.equal(getattr(selected, name), getattr(alone, name)), name


def test_groups_are_flattened_in_order_with_their_own_log_probs() -> None:
    prompts = [[5, 6, 7], [8]]
    groups = [
        [Completion((1, 2), torch.tensor([-0.1, -0.2]), "stop", 3), Completion((9,), torch.tensor([-0.3]), "stop", 3)],
        [Completion((4, 4, 4), torch.tensor([-1.0, -2.0, -3.0]), "length", 3)],
    ]
    experience = experience_of(prompts, groups, [1.0, 0.0, 0.5])
    assert experience.version_B.tolist() == [3, 3, 3]
    assert experience.tokens_BT.tolist() == [[5, 6, 7, 1, 2], [5, 6, 7, 9, 0], [8, 4, 4, 4, 0]]
    assert experience.group_B.tolist() == [0, 0, 1]
    assert experience.reward_B.tolist() == [1.0, 0.0, 0.5]
    expected = torch.tensor([[-0.1, -0.2, 0.0], [-0.3, 0.0, 0.0], [-1.0, -2.0, -3.0]])
    assert torch.equal(experience.rollout_logp_BR, expected)
    scored = experience.with_learner(expected - 1, expected.abs())
    assert torch.equal(scored.old_logp_BR, expected - 1)
    assert scored.group_B is experience.group_B


# Ranks: the parts that need no second process


def sequences(lengths: list[int]) -> Sequences:
    return Sequences.build([[1]] * len(lengths), [[2] * (n - 1) for n in lengths], torch.device("cpu"))


def rank_of(rank: int, world: int, kind: Any = "ddp") -> Ranks:
    return Ranks(rank, world, kind=kind)


@settings(deadline=None)
@given(Lengths, st.integers(1, 5))
def test_shares_are_a_partition_and_nearly_equal(lengths: list[int], shares: int) -> None:
    parts = balanced(lengths, shares)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    sums = [sum(lengths[i] for i in part) for part in parts]
    assert max(sums) - min(sums) <= max(lengths)  # the heaviest got its last when it was the lightest
    assert parts == balanced(lengths, shares)


@settings(deadline=None)
@given(Lengths, st.integers(1, 4), st.integers(10, 80))
def test_every_row_is_computed_once_and_every_rank_has_as_many_parts(
    lengths: list[int], world: int, tokens: int
) -> None:
    batch, rows = sequences(lengths), torch.arange(len(lengths))
    parts = [batch.micro_batches(rows, tokens, rank_of(rank, world)) for rank in range(world)]
    computed = torch.cat([part for mine in parts for part in mine])
    assert torch.equal(computed.sort().values, rows)
    assert len({len(mine) for mine in parts}) == 1
    for mine in parts:
        for part in mine:
            assert len(part) <= 1 or len(part) * int(batch.length_B[part].max()) <= tokens
        in_order = [lengths[row] for part in mine for row in part.tolist()]
        assert in_order == sorted(in_order, reverse=True)
    for row in (0, len(lengths) - 1):
        found = batch.part_with(row, tokens, rank_of(0, world))
        assert any(torch.equal(found, part) for mine in parts for part in mine)
        assert row in found.tolist()


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(2, 4))
def test_shares_of_a_list_are_put_together_in_its_order(count: int, world: int) -> None:
    items = list(range(count))
    shares = [list(rank_of(rank, world).shard(items)) for rank in range(world)]

    class Gathering(Ranks):
        def gather(self, value: Any) -> list[Any]:
            assert value == shares[self.rank]
            return shares

    for rank in range(world):
        assert Gathering(rank, world).gather_shards(shares[rank]) == items


def test_rows_are_joined_to_the_last_bit() -> None:
    """Bit patterns that a sum of floats would change: -0.0, NaN's own bits, the smallest subnormal."""
    patterns = torch.tensor([-(2**31), 0x7FC00001, 1, 0x3F800000], dtype=torch.int32)
    mine, theirs = torch.zeros(2, 4), patterns.view(torch.float32).expand(2, 4).clone()
    mine[0], theirs[0] = patterns.view(torch.float32), 0.0

    class Adding(Ranks):
        def sum_(self, tensor: Tensor) -> None:
            tensor += theirs.view(torch.int32)

    Adding(0, 2).join_rows(mine)
    assert torch.equal(mine.view(torch.int32), patterns.expand(2, 4))


def test_gradients_are_added_in_buckets_and_frozen_parameters_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mantissa.base.ranks._BUCKET", 10)
    shapes = [(3, 2), (7,), (2, 2), (30,), (1,)]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    frozen = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    for i, parameter in enumerate(parameters[:-1]):
        parameter.grad = torch.full(parameter.shape, float(i + 1))
    sent: list[int] = []

    class Doubling(Ranks):
        def sum_(self, tensor: Tensor) -> None:
            sent.append(tensor.numel())
            tensor *= 2

    Doubling(0, 2).sum_gradients([*parameters, frozen])
    assert sent == [13, 34, 1]
    for i, parameter in enumerate(parameters[:-1]):
        assert torch.equal(parameter.grad, torch.full(parameter.shape, 2.0 * (i + 1)))
    assert torch.equal(parameters[-1].grad, torch.zeros(1))  # it had none, and others may
    assert frozen.grad is None


def test_ranks_that_went_apart_are_found() -> None:
    tensors = {"a": torch.randn(5), "b": torch.randn(3, 3), "c": torch.zeros(2)}

    differs = False

    class Gathering(Ranks):
        def gather(self, value: Any) -> list[Any]:
            bits = tensors["b"].view(torch.int32).long().sum().item()
            assert value[1] == bits
            return [value, value, [value[0], value[1] + differs, value[2]]]

    ranks = Gathering(0, 3)
    ranks.check_alike(tensors)
    differs = True
    with pytest.raises(MantissaError, match="hold different weights: b differs on rank 2; a device"):
        ranks.check_alike(tensors)


def test_an_onlooker_writes_nothing(tmp_path: Any) -> None:
    run = RunDirectory.create(tmp_path / "run", {"name": "x"}, {})
    run.metrics.append({"step": 1})
    onlooker = Onlooker.open(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    onlooker.metrics.append({"step": 2})
    onlooker.warm_start.append({"step": 2})
    onlooker.write_rollouts(2, [])
    onlooker.metrics.truncate(0)
    onlooker.warm_start.truncate(-1)
    onlooker.rewind(0)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    run.close()
