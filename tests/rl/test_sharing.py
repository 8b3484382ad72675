"""Dividing work among ranks, and joining it: the parts that need no second process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mantissa.errors import MantissaError
from mantissa.ranks import ALONE, Ranks
from mantissa.rl import resumed_config
from mantissa.rl.collect import _packed, _unpacked
from mantissa.rl.config import RunConfig
from mantissa.rl.experience import Sequences, balanced
from mantissa.rl.recipe import load_recipe
from mantissa.rl.session import joined
from mantissa.rollout import Completion
from mantissa.runs.directory import Onlooker, RunDirectory

Lengths = st.lists(st.integers(2, 40), min_size=1, max_size=30)


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
@given(Lengths, st.integers(2, 4), st.integers(10, 80))
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
    for row in (0, len(lengths) - 1):
        found = batch.part_with(row, rows, tokens, rank_of(0, world))
        assert any(torch.equal(found, part) for mine in parts for part in mine)
        assert row in found.tolist()


def test_a_row_that_nobody_computes_is_not_found() -> None:
    with pytest.raises(ValueError, match="row 3 is not among"):
        sequences([3, 4, 5, 6]).part_with(3, torch.arange(3), 100, ALONE)


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


def test_alone_everything_is_what_it_was() -> None:
    items = [1, 2, 3]
    assert ALONE.shard(items) is items
    assert (ALONE.broadcast(7), ALONE.first_of("x"), ALONE.first_of(None)) == (7, "x", None)
    parameter = torch.nn.Parameter(torch.ones(2))
    ALONE.sum_gradients([parameter])
    assert parameter.grad is None
    values = torch.tensor([1.0, float("nan")])
    ALONE.join_rows(values)
    assert ALONE.whole({"x": values})["x"] is values
    assert (ALONE.alone, ALONE.rank0, ALONE.sharded, rank_of(1, 2, "fsdp2").sharded) == (True, True, False, True)


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
    monkeypatch.setattr("mantissa.ranks._BUCKET", 10)
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


@pytest.mark.parametrize("differs", [False, True])
def test_ranks_that_went_apart_are_found(differs: bool) -> None:
    tensors = {"a": torch.randn(5), "b": torch.randn(3, 3), "c": torch.zeros(2)}

    class Gathering(Ranks):
        def gather(self, value: Any) -> list[Any]:
            bits = tensors["b"].view(torch.int32).long().sum().item()
            assert value[1] == bits
            return [value, value, [value[0], value[1] + differs, value[2]]]

    ranks = Gathering(0, 3)
    if not differs:
        ranks.check_alike(tensors)
        return
    with pytest.raises(MantissaError, match="hold different weights: b differs on rank 2; a device"):
        ranks.check_alike(tensors)


def test_completions_survive_the_way() -> None:
    group = [
        Completion((5, 6, 7), torch.tensor([-0.5, -0.0, float("nan")]), "stop", 3),
        Completion((9,), torch.tensor([-2.0]), "length", 3),
    ]
    for before, after in zip(group, _unpacked(_packed(group)), strict=True):
        assert (after.tokens, after.finish_reason, after.policy_version) == (
            before.tokens,
            before.finish_reason,
            before.policy_version,
        )
        assert torch.equal(after.logp_T.view(torch.int32), before.logp_T.view(torch.int32))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel=fsdp2"], "parallel=fsdp2 does nothing with nproc=1"),
        (["nproc=9"], "nproc=9, but rollout.prompts=8"),
        (["nproc=2", "rollout.max_policy_lag=4"], "rollout.max_policy_lag=4 with nproc=2"),
        (["nproc=2", "parallel=fsdp2", "model.lora={rank: 2, alpha: 4}"], "parallel=fsdp2 with model.lora"),
        (["nproc=2", "parallel=fsdp2", "optimizer.moments=8bit"], "parallel=fsdp2 with optimizer.moments=8bit"),
        (["nproc=0"], "nproc: input should be greater than or equal to 1, got 0"),
        (["nproc=2", "parallel=horovod"], "parallel: input should be 'ddp' or 'fsdp2', got 'horovod'"),
    ],
)
def test_what_does_not_go_together_is_refused(
    configure: Callable[..., RunConfig], overrides: list[str], message: str
) -> None:
    with pytest.raises(MantissaError, match=message):
        configure(*overrides)


def test_nproc_is_the_number_of_processes_or_an_error(
    configure: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(MantissaError, match="nproc=2, but this is one of 1 processes: start them with mantissa train"):
        joined(configure("nproc=2"), cpu).__enter__()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(MantissaError, match="nproc=2, but this is one of 3 processes"):
        joined(configure("nproc=2"), cpu).__enter__()


def test_torchruns_number_stands_where_the_recipe_does_not_say(small: dict[str, Any], tmp_path: Any) -> None:
    import yaml

    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(small))
    assert load_recipe(path).nproc == 1
    assert load_recipe(path, nproc=3).nproc == 3
    assert load_recipe(path, ["nproc=2"], nproc=3).nproc == 2  # which ``joined`` then refuses


def test_a_resumed_run_may_have_another_number(configure: Callable[..., RunConfig], tmp_path: Any) -> None:
    plain = configure("nproc=2", "parallel=fsdp2").model_dump(mode="json", exclude={"run_dir"})
    RunDirectory.create(tmp_path / "run", plain, {}).close()

    def found(*overrides: str, world: int | None = None) -> tuple[int, str | None]:
        config = resumed_config(tmp_path / "run", overrides, world)
        return config.nproc, config.parallel

    assert found() == (2, "fsdp2")
    assert found("nproc=3") == found(world=3) == found("nproc=3", world=4) == (3, "fsdp2")
    assert found("nproc=3", "parallel=ddp") == (3, "ddp")
    assert found("nproc=1") == (1, None)
    with pytest.raises(MantissaError, match="parallel=ddp does nothing"):
        found("nproc=1", "parallel=ddp")


def test_a_resumed_run_may_have_another_server_and_nothing_else(
    configure: Callable[..., RunConfig], tmp_path: Any
) -> None:
    old, new = "rollout.vllm.server=http://a:1", "rollout.vllm.server=http://b:2"
    plain = configure("rollout.engine=vllm", old).model_dump(mode="json", exclude={"run_dir"})
    RunDirectory.create(tmp_path / "run", plain, {}).close()
    found = resumed_config(tmp_path / "run", [new])
    assert found.rollout.vllm.server == "http://b:2"
    assert found.model_dump(exclude={"rollout"}) == resumed_config(tmp_path / "run").model_dump(exclude={"rollout"})
    assert found.rollout.samples == resumed_config(tmp_path / "run").rollout.samples
    with pytest.raises(MantissaError, match=r"\(but for nproc, parallel, rollout\.vllm\.server\): leave steps out"):
        resumed_config(tmp_path / "run", ["steps=9"])


def test_an_onlooker_writes_nothing(tmp_path: Any) -> None:
    run = RunDirectory.create(tmp_path / "run", {"name": "x"}, {})
    run.append_metrics({"step": 1})
    onlooker = Onlooker.open(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    onlooker.append_metrics({"step": 2})
    onlooker.append_warm_start({"step": 2})
    onlooker.write_rollouts(2, [])
    onlooker.truncate_metrics(0)
    onlooker.truncate_warm_start(-1)
    onlooker.rewind(0)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    run.close()
