"""Checkpoints: round trip, atomicity under a full disk, retention, and one clear error for every kind of damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mantissa.errors import MantissaError
from mantissa.training import Checkpoint, load_checkpoint, load_weights, save_checkpoint, saved_steps


def checkpoint(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    policy = {"a.weight": torch.randn(3, 4, generator=generator), "b": torch.full((2,), 2.0**-140)}
    optimizer = {"a.weight/exp_avg": torch.randn(3, 4, generator=generator), "a.weight/step": torch.tensor(7.0)}
    return Checkpoint(step, policy, optimizer, {"updates": step * 2, "nested": {"scale": 1024.0, "kept": [1, 5]}})


def test_round_trip_is_exact(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(3), keep=2)
    loaded, original = load_checkpoint(tmp_path), checkpoint(3)
    assert (loaded.step, loaded.state) == (3, original.state)
    for ours, theirs in ((loaded.policy, original.policy), (loaded.optimizer, original.optimizer)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_tensors_of_the_state_have_a_file_where_there_are_any(tmp_path: Path) -> None:
    extra = {"ahead/4/tokens": torch.tensor([3, 2**40]), "ahead/4/logp": torch.tensor([-0.1, -1e-30])}
    plain = checkpoint(4)
    save_checkpoint(tmp_path, plain, keep=2)
    path = tmp_path / "step-5"
    save_checkpoint(tmp_path, Checkpoint(5, plain.policy, plain.optimizer, {}, extra), keep=2)
    assert load_checkpoint(tmp_path, 4).extra == {}
    assert not (tmp_path / "step-4" / "extra.safetensors").exists()
    loaded = load_checkpoint(tmp_path, 5).extra
    assert loaded.keys() == extra.keys()
    assert all(torch.equal(loaded[name], extra[name]) for name in extra)
    (path / "extra.safetensors").unlink()
    with pytest.raises(MantissaError, match=r"extra\.safetensors is damaged.*delete .*step-5 to go on from step-4"):
        load_checkpoint(tmp_path)


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in (2, 10, 9, 11):
        save_checkpoint(tmp_path, checkpoint(step), keep=2)
    assert saved_steps(tmp_path) == [10, 11]
    assert load_checkpoint(tmp_path).step == 11
    assert load_checkpoint(tmp_path, 10).state["updates"] == 20


def test_a_full_disk_leaves_the_last_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, checkpoint(1), keep=2)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(MantissaError, match=r"No space left.*free some space"):
        save_checkpoint(tmp_path, checkpoint(2), keep=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    assert load_checkpoint(tmp_path).step == 1


def test_leftovers_of_a_killed_writer_are_no_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(1), keep=2)
    leftover = tmp_path / ".step-2.abcd1234.tmp"
    leftover.mkdir()
    (leftover / "policy.safetensors").write_bytes(b"half")
    assert saved_steps(tmp_path) == [1]
    save_checkpoint(tmp_path, checkpoint(3), keep=2)
    assert not leftover.exists()


def damage_truncate(path: Path) -> None:
    target = path / "policy.safetensors"
    target.write_bytes(target.read_bytes()[:-8])


def damage_header(path: Path) -> None:
    (path / "state.json").write_text("{")


def damage_missing(path: Path) -> None:
    (path / "optimizer.safetensors").unlink()


def damage_foreign(path: Path) -> None:
    (path / "state.json").write_text('{"format": "other"}')


def damage_newer(path: Path) -> None:
    header = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(header | {"version": 99}))


def damage_bytes(path: Path) -> None:
    target = path / "policy.safetensors"
    target.write_bytes(b"\xff" * target.stat().st_size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, r"damaged: expected \d+ bytes, found \d+; delete .*step-2 to go on from step-1"),
        (damage_header, "no readable state.json"),
        (damage_missing, "damaged: expected .* found None"),
        (damage_foreign, "not a checkpoint of this program"),
        (damage_newer, "version 99, this program reads version 1"),
        (damage_bytes, "damaged"),
    ],
)
def test_damage_is_one_clear_error(tmp_path: Path, damage, message: str) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, checkpoint(step), keep=2)
    damage(tmp_path / "step-2")
    with pytest.raises(MantissaError, match=message):
        load_checkpoint(tmp_path)
    assert load_checkpoint(tmp_path, 1).step == 1


def test_absence_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(MantissaError, match="no checkpoint in"):
        load_checkpoint(tmp_path)
    save_checkpoint(tmp_path, checkpoint(4), keep=1)
    with pytest.raises(MantissaError, match=r"no checkpoint step-9 .* there are 4"):
        load_checkpoint(tmp_path, 9)


def test_weights_of_another_model_are_refused() -> None:
    parameters = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(MantissaError, match="different tensors"):
        load_weights(parameters, {"a": torch.ones(2)})
    with pytest.raises(MantissaError, match=r"b has shape \(4,\), the model's \(3,\)"):
        load_weights(parameters, {"a": torch.ones(2), "b": torch.ones(4)})
    load_weights(parameters, {"a": torch.ones(2), "b": torch.ones(3)})
    assert parameters["b"].tolist() == [1, 1, 1]
