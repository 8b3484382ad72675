"""Checkpoints: round trip, atomicity under a full disk, retention, and one clear error for every kind of damage."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mantissa.base.errors import MantissaError
from mantissa.training import Checkpoint, load_checkpoint, load_weights, save_checkpoint, saved_steps


def checkpoint(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    policy = {"a.weight": torch.randn(3, 4, generator=generator), "b": torch.full((2,), 2.0**-140)}
    optimizer = {"a.weight/exp_avg": torch.randn(3, 4, generator=generator), "a.weight/step": torch.tensor(7.0)}
    return Checkpoint(step, policy, optimizer, {"updates": step * 2, "nested": {"scale": 1024.0, "kept": [1, 5]}})


def test_round_trip_is_exact_and_further_files_are_part_of_it(tmp_path: Path) -> None:
    more = {"reference": {"a.weight": torch.arange(6.0).to(torch.bfloat16)}, "partition": {"b": torch.tensor([0.1])}}
    original = dataclasses.replace(checkpoint(3), more=more)
    path = save_checkpoint(tmp_path, original, keep=2)
    loaded = load_checkpoint(tmp_path)
    assert (loaded.step, loaded.state, loaded.checked) == (3, original.state, True)
    assert loaded.more.keys() == more.keys()
    pairs = [(loaded.policy, original.policy), (loaded.optimizer, original.optimizer)]
    for ours, theirs in [*pairs, *((loaded.more[name], more[name]) for name in more)]:
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert all(ours[name].dtype == theirs[name].dtype for name in theirs)
    (path / "reference.safetensors").write_bytes(b"short")
    with pytest.raises(MantissaError, match=r"reference\.safetensors is damaged: expected \d+ bytes, found 5"):
        load_checkpoint(tmp_path)


def test_version_1_is_read_as_one_without_further_files(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(1), keep=1)
    header = json.loads((path / "state.json").read_text())
    assert header["version"] == 3
    assert list(header["files"]) == ["policy.safetensors", "optimizer.safetensors"]  # what version 1 had
    rewrite(path, version=1)
    assert load_checkpoint(tmp_path).more == {}
    with pytest.raises(MantissaError, match="checkpoint step-1 holds no reference: the run that wrote it had none"):
        load_checkpoint(tmp_path).part("reference")
    assert torch.equal(load_checkpoint(tmp_path).policy["b"], checkpoint(1).policy["b"])


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

    monkeypatch.setattr("mantissa.training.checkpoint.write_tensors", full)
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


def rewrite(path: Path, **fields: object) -> None:
    header = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(header | fields))


def overwrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(change((path / name).read_bytes()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (overwrite("policy.safetensors", lambda old: old[:-8]),
         r"damaged: expected \d+ bytes, found \d+; delete .*step-2 to go on from step-1"),
        (overwrite("state.json", lambda old: b"{"), "no readable state.json"),
        (lambda path: (path / "optimizer.safetensors").unlink(), "damaged: expected .* found None"),
        (overwrite("state.json", lambda old: b'{"format": "other"}'), "not a checkpoint of this program"),
        (lambda path: rewrite(path, version=99), "version 99, this program reads versions 1 to 3"),
        (overwrite("policy.safetensors", lambda old: b"\xff" * len(old)), "its SHA-256 is another"),
    ],
)  # fmt: skip
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
