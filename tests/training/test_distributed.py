"""DDP and FSDP2 with real processes on gloo: the same gradient, one decision for all, checkpoints for any number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rank_worker
from launched import torchrun
from mantissa.base.errors import MantissaError
from mantissa.base.files import JsonLines
from mantissa.base.ranks import ALONE, grad_norm
from mantissa.training import distribute

KINDS = ("ddp", "fsdp2")
TOGETHER = ("equal", "inf_on_one_rank", "accumulate", "uneven", "broken_window", "guarded", "save")
REFUSED = ("unwrapped_is_refused", "full_disk", "clipping", "masters", "changing", "unusual", "sparse_rows")


@pytest.fixture(scope="module", params=KINDS)
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What two processes left of every scenario that does not end in a crash."""
    folder = tmp_path_factory.mktemp(request.param)
    done = torchrun(2, rank_worker.__file__, folder, request.param, *TOGETHER, *REFUSED)
    assert done.returncode == 0, done.stderr[-3000:]
    return request.param, folder


def left(two: tuple[str, Path], name: str, rank: int = 0) -> dict[str, Any]:
    kind, folder = two
    return torch.load(folder / f"{kind}-{name}-{rank}.pt", weights_only=True)


def assert_close(weights: dict, expected: dict, tolerance: float = 2e-6) -> None:
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance)


def assert_equal(weights: dict, expected: dict) -> None:
    assert weights.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())


def test_two_ranks_learn_what_one_does(two: tuple[str, Path], tmp_path: Path) -> None:
    alone = rank_worker.equal(None, tmp_path)
    for rank in (0, 1):
        both = left(two, "equal", rank)
        assert both["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert_close(both["weights"], alone["weights"])
    assert_equal(left(two, "equal", 0)["weights"], left(two, "equal", 1)["weights"])


def test_an_inf_on_one_rank_is_an_inf_for_all(two: tuple[str, Path]) -> None:
    first, second = left(two, "inf_on_one_rank", 0), left(two, "inf_on_one_rank", 1)
    assert first["kinds"] == second["kinds"]
    assert first["scales"] == second["scales"]
    assert first["kinds"][:5] == ["stepped", "skipped", "stepped", "skipped", "stepped"]
    assert first["kinds"][6] == "stepped"
    assert first["stats"]["skipped"] == 2
    assert first["scales"][1] == 2.0**10  # the last of five tries at one batch, from 2^14
    assert first["scales"][3] == 2.0**9  # a loss that is not finite is tried once
    assert_equal(first["weights"], second["weights"])
    assert all(value.isfinite().all() for value in first["weights"].values())


def test_accumulation_sends_gradients_once(two: tuple[str, Path], tmp_path: Path) -> None:
    both, alone = left(two, "accumulate"), rank_worker.accumulate(None, tmp_path)
    assert both["sent"][1] > 0
    assert both["sent"][4] == both["sent"][1]
    assert_close(both["weights"], alone["weights"])


def test_uneven_batches_count_by_their_rows(two: tuple[str, Path]) -> None:
    """Two optimiser steps: rows 6+6 of each rank (6+6 and 6+2), then the three that only rank 0 has."""
    x, y = rank_worker.batches(1, 40)[0]
    model = rank_worker.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for rows in ([*range(12), *range(20, 28)], [*range(12, 15)]):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    for rank in (0, 1):
        both = left(two, "uneven", rank)
        assert both["kinds"] == ["accumulated", "stepped", "accumulated", "stepped"]
        assert_close(both["weights"], model.state_dict(), 1e-5)
    assert left(two, "uneven", 0)["stats"]["batches_seen"] == 3


def test_a_group_added_later_is_exchanged_or_refused(two: tuple[str, Path], tmp_path: Path) -> None:
    """DDP exchanges what trained when it wrapped the model, and no more; FSDP2 whatever trains."""
    kind, _ = two
    alone = rank_worker.changing(None, tmp_path)
    for rank in (0, 1):
        both = left(two, "changing", rank)
        assert both["names"] == alone["names"]
        assert_close(both["weights"], alone["weights"])
        assert ("added or unfrozen after the model was wrapped in DDP" in both["error"]) is (kind == "ddp")
        assert [text.count("in no optimiser") for text in both["told"]] == [1] * (rank == 0)


def test_the_guard_of_rank_0_decides_for_all(two: tuple[str, Path]) -> None:
    first, second = left(two, "guarded", 0), left(two, "guarded", 1)
    assert first["kinds"] == second["kinds"]
    assert first["kinds"][3:] == [
        "stepped fp16 4",
        "skipped fp16 4",
        "skipped bf16 3",  # fell back after it
        "stepped bf16 4",
        "stepped bf16 5",
    ]
    assert_equal(first["weights"], second["weights"])
    kind, folder = two
    rows = JsonLines(folder / f"{kind}-guarded" / "metrics.jsonl").read()
    assert [row["step"] for row in rows] == list(range(1, 9))


def test_an_exception_in_an_open_window_leaves_nothing_behind(two: tuple[str, Path]) -> None:
    alone = rank_worker.make_trainer(None, accumulate=2)
    kinds = rank_worker.train(alone, rank_worker.batches(4)[2:])
    both = left(two, "broken_window")
    assert both["kinds"] == kinds == ["accumulated", "stepped"]
    assert_close(both["weights"], rank_worker.result(alone)["weights"])


@pytest.mark.parametrize("two", ["fsdp2", pytest.param("ddp", marks=pytest.mark.variants)], indirect=True)
def test_saved_on_two_resumed_on_one_and_on_three(two: tuple[str, Path]) -> None:
    kind, folder = two
    expected = left(two, "save")
    alone = rank_worker.resume(None, folder, f"{kind}.pt")
    assert_close(alone["weights"], expected["weights"], 2e-4)  # fp16 rounds sums of another order
    assert alone["stats"]["steps"] == 6
    done = torchrun(3, rank_worker.__file__, folder, kind, "resume")
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(3):
        assert_close(left(two, "resume", rank)["weights"], expected["weights"], 2e-4)
    content = torch.load(folder / f"{kind}.pt", weights_only=True)
    assert all(type(value) is torch.Tensor for value in content["model_state_dict"].values())
    assert len(content["generators"]) == 2


@pytest.mark.parametrize("two", ["ddp", pytest.param("fsdp2", marks=pytest.mark.variants)], indirect=True)
def test_a_rank_killed_in_a_step_then_resumed_bit_for_bit(two: tuple[str, Path]) -> None:
    kind, folder = two
    crashed = torchrun(2, rank_worker.__file__, folder, kind, "crash")
    assert crashed.returncode != 0
    done = torchrun(2, rank_worker.__file__, folder, kind, "resume_crashed")
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        assert_equal(left(two, "resume_crashed", rank)["weights"], left(two, "save", rank)["weights"])


def test_shards_are_clipped_as_the_whole_is(two: tuple[str, Path]) -> None:
    for rank in (0, 1):
        found = left(two, "clipping", rank)
        whole, split = found["fractions"]
        assert 0 < whole == split < 1
        for one, other in zip(found["whole"], found["split"], strict=True):
            torch.testing.assert_close(other, one, rtol=1e-6, atol=0.0)
        assert "shard on dimension 0, or clip by the global norm" in found["error"]


def test_norms_beyond_fp32_s_squares_and_a_step_without_a_gradient(two: tuple[str, Path], tmp_path: Path) -> None:
    alone = rank_worker.unusual(None, tmp_path)
    usual = rank_worker.make_model()
    rank_worker.loss_fn(usual, rank_worker.batches(1)[0]).backward()
    norm = float(torch.cat([p.grad.double().flatten() for p in usual.parameters()]).norm())
    for rank in (0, 1):
        both = left(two, "unusual", rank)
        assert both["norms"] == pytest.approx([1e25 * norm, 1e-22 * norm], rel=1e-5, abs=0.0)
        assert "no parameter of the optimiser has a gradient" in both["error"]
        assert_close(both["weights"]["1e+25"], alone["weights"]["1e+25"], 1e-4)


def test_rows_of_an_embedding_are_exchanged_or_refused(two: tuple[str, Path], tmp_path: Path) -> None:
    alone = rank_worker.sparse_rows(None, tmp_path)
    for rank in (0, 1):
        both = left(two, "sparse_rows", rank)
        if two[0] == "fsdp2":
            assert "0 has sparse=True, and FSDP2 exchanges no sparse gradients" in both["error"]
        else:
            assert both["norm"] == pytest.approx(alone["norm"], rel=1e-6)
            assert_close(both["weights"], alone["weights"])


def test_shards_of_bf16_weights_are_rounded_as_the_whole_is(two: tuple[str, Path]) -> None:
    for rank in (0, 1):
        found = left(two, "masters", rank)
        for rule in ("bf16_stochastic", "bf16_kahan"):
            whole, split, again = (found[rule][key] for key in ("whole", "split", "again"))
            assert_equal(split["w"], whole["w"])
            assert_equal(split["c"], whole["c"])
            assert_equal(again, whole["c"])
            assert bool(whole["c"]) == (rule == "bf16_kahan")
        assert "w is placed (Shard(dim=1),); expected shards of dimension 0" in found["error"]


def test_what_would_silently_go_apart_is_refused(two: tuple[str, Path]) -> None:
    for rank in (0, 1):
        assert "neither DDP nor FSDP2" in left(two, "unwrapped_is_refused", rank)["error"]
        assert "cannot write" in left(two, "full_disk", rank)["error"]  # rank 0's own words, on every rank


def test_alone_everything_is_the_identity() -> None:
    model = nn.Linear(2, 2)
    assert distribute(model, "ddp") is model
    assert distribute(model, "fsdp2") is model
    with pytest.raises(MantissaError, match=r'expected "ddp" or "fsdp2"'):
        distribute(model, "horovod")  # type: ignore[arg-type]
    value = torch.tensor(3.0)
    assert ALONE.max(value) is value
    assert (ALONE.max_of(2.5), ALONE.sum_of(2.5)) == (2.5, 2.5)
    gradients = [torch.randn(3, 2), torch.randn(5)]
    flat = torch.cat([g.flatten() for g in gradients]).double()
    assert float(grad_norm(gradients)) == pytest.approx(float(flat.norm()), rel=1e-6)
