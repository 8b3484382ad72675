"""What a rehearsal says that it learned: of checkpoints and tokens that are made here, without verl."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mantissa.base.errors import RankError
from mantissa.doctor.dump import Scored
from mantissa.doctor.record import ScoredBatch, write_batch
from mantissa.launch.rehearsal import _score, learned_lines, policy_of, write_policy


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy of step 0 as ``model``, and verl's checkpoints of steps 1 and 2, each moved a little."""
    folder = tmp_path_factory.mktemp("job")
    write_policy(folder / "model")
    weights = load_file(folder / "model" / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for step in (1, 2):
        shutil.copytree(folder / "model", policy_of(folder, step))
        weights = {name: value + 4e-3 * torch.randn(value.shape, generator=draw) for name, value in weights.items()}
        save_file(weights, policy_of(folder, step) / "model.safetensors", metadata={"format": "pt"})
    return folder


def looked_at(folder: Path, rollout: Path, learner: Path) -> None:
    """What the gate saw at step 2, where the sides have the weights of these folders and a little noise."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 60, (8, 20), generator=draw)
    rows: list[Any] = [Scored(row.numpy(), 5, *[row[5:].double().numpy()] * 2, row[5:].numpy() >= 0) for row in tokens]
    sides = [torch.tensor(np.stack(_score(policy, rows, 0.7))).float() for policy in (rollout, learner)]
    noisy = [side + 1e-3 * torch.randn(side.shape, generator=draw) for side in sides]
    mask = torch.ones(8, 15, dtype=torch.int64)
    settings = {"framework": "verl", "temperature": 0.7}
    batch = ScoredBatch(tokens[:, :5].tolist(), tokens[:, 5:], mask, *noisy, settings)
    write_batch(folder / "looked_at" / "step-2.jsonl", batch)


def test_weights_that_moved_and_arrived_are_said_in_numbers(made: Path) -> None:
    looked_at(made, policy_of(made, 1), policy_of(made, 1))
    moved, arrived = learned_lines(made, made / "model", 0, 2)
    assert moved.startswith("weights moved: 25 of 25 tensors, by 0.0")
    assert "checkpoint 1 scores what step 2 sampled within 0.00" in arrived


@pytest.mark.parametrize("side", ["rollout", "learner"])
def test_weights_that_did_not_arrive_are_an_error(side: str, made: Path) -> None:
    given = {"rollout": policy_of(made, 1), "learner": policy_of(made, 1)} | {side: made / "model"}
    looked_at(made, **given)
    with pytest.raises(RankError, match=f"the {side} of step 2 did not have the weights of checkpoint 1"):
        learned_lines(made, made / "model", 0, 2)


def test_a_job_that_moved_nothing_is_an_error(made: Path) -> None:
    with pytest.raises(RankError, match=r"learned nothing: .* Say a higher optimizer\.lr"):
        learned_lines(made, policy_of(made, 2), 0, 2)


def test_what_is_not_there_to_be_compared_is_said(made: Path, tmp_path: Path) -> None:
    assert learned_lines(made, tmp_path, 0, 2) == (f"what it learned is not known: no safetensors in {tmp_path}",)
    assert "not known" in learned_lines(made, made / "model", 0, 1)[1]
