"""The old interface on two real processes (gloo): DDP on a CPU, one writer, a failure that ends. That ranks decide
alike is the trainer's: tests/training/test_distributed.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import compat_worker
from launched import torchrun

TOGETHER = ("learn", "options")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left of every scenario."""
    folder = tmp_path_factory.mktemp("compat")
    done = torchrun(2, compat_worker.__file__, folder, *TOGETHER)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("precision: fp32 asked") == 1  # one rank speaks
    return folder


def left(folder: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_use_ddp_on_two_ranks_learns_what_one_process_does(folder: Path, tmp_path: Path) -> None:
    alone = compat_worker.learn(None, None, tmp_path)
    for rank, both in enumerate(left(folder, "learn")):
        assert both["answers"] == alone["answers"] == [False, True] * 4
        for name, value in both["weights"].items():
            torch.testing.assert_close(value, alone["weights"][name], rtol=0, atol=2e-6)
        assert (both["stats"]["rank"], both["stats"]["world_size"]) == (rank, 2)


def test_only_rank_0_writes(folder: Path) -> None:
    assert not (folder / "rank1.pt").exists()
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]
    content = torch.load(folder / "rank0.pt", weights_only=True)
    weights = left(folder, "learn")[0]["weights"]
    assert content["model_state_dict"].keys() == weights.keys()  # without DDP's "module."
    assert all(torch.equal(value, weights[name]) for name, value in content["model_state_dict"].items())


def test_ddp_gets_its_options_and_what_would_go_apart_is_refused(folder: Path) -> None:
    for rank, seen in enumerate(left(folder, "options")):
        assert seen["ddp"] == ("DistributedDataParallel", True, False)
        assert seen["wrapped_once"] is True
        without, mistaken = seen["errors"]
        assert "2 processes would each train a model of their own: set use_ddp=True" in without
        assert f"rank {1 - rank} of 2 was asked for, but this process is rank {rank} of 2" in mistaken


def test_a_rank_that_fails_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    done = torchrun(2, compat_worker.__file__, tmp_path, "failing")
    assert done.returncode != 0
    assert "KeyError: 'answer'" in done.stderr
    assert "torchrun: killed" not in done.stderr  # gloo itself would wait half an hour
