"""The file: known keys, safe to load, both old layouts read (each had a defect here) and one written."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from mantissa.errors import MantissaError
from old_trainers import basic, extended, sgd
from toys import cross_entropy, data, fragile, mlp, same, state

KEYS = {
    "model_state_dict",
    "optimizer_state_dict",
    "training_steps",
    "overflow_steps",
    "fp16_active",
    "scaler_state_dict",
}


def test_the_checkpoint_has_the_known_keys_and_loads_safely(tmp_path: Path) -> None:
    model, trap = fragile()
    trainer = basic(model, growth_interval=3)
    for i, batch in enumerate(data(6)):
        trap.limit = 0.0 if i == 2 else math.inf
        trainer.backward_and_step(trainer.training_step(batch, cross_entropy))
    trainer.save_checkpoint(tmp_path / "a.pt")
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    assert content.keys() >= KEYS
    assert same(content["model_state_dict"], state(model))
    assert (content["training_steps"], content["overflow_steps"], content["fp16_active"]) == (6, 1, True)
    assert content["scaler_state_dict"]["scale"] == trainer.scaler.get_scale() == 65536.0
    other = basic(fragile(3)[0], growth_interval=3)
    other.load_checkpoint(tmp_path / "a.pt")
    assert same(state(other.model), state(model))
    assert other.get_stats() == trainer.get_stats()


def test_saving_in_an_open_window_saves_and_says_what_is_missing(tmp_path: Path) -> None:
    trainer = extended(gradient_accumulation_steps=4)
    batches = data(8)
    for batch in batches[:6]:
        trainer.backward_and_step(trainer.training_step(batch, cross_entropy))
    with pytest.warns(UserWarning, match="2 of 4 batches are accumulated") as caught:
        trainer.save_checkpoint(tmp_path / "a.pt")
    assert caught[0].filename == __file__
    assert trainer.get_stats()["accumulated_steps"] == 2  # and training goes on where it was
    other = extended(mlp(3), gradient_accumulation_steps=4)
    other.load_checkpoint(tmp_path / "a.pt")
    assert same(state(other.model), state(trainer.model))
    assert (other.update_steps, other.accumulated_steps) == (1, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches[6:]:
            trainer.backward_and_step(trainer.training_step(batch, cross_entropy))
        trainer.save_checkpoint(tmp_path / "a.pt")


def old_file(model: nn.Module, optimizer: torch.optim.Optimizer, layout: str) -> dict:
    """As the old utilities wrote it, by torch.save, with GradScaler's own state."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    scaler.scale(torch.ones(()))
    common = {
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "scaler_state_dict": scaler.state_dict() | {"_growth_tracker": 17},
        "overflow_steps": 2,
    }
    if layout == "basic":
        return common | {"training_steps": 8, "fp16_active": True}
    more = {"training_steps": 33, "update_steps": 6, "accumulated_steps": 1, "precision_active": True}
    config = {"precision_mode": "mixed_fp16", "gradient_accumulation_steps": 4, "max_grad_norm": 1.0}
    return common | more | {"precision_mode": "mixed_fp16", "config": config}


@pytest.mark.parametrize("layout", ["basic", "extended"])
def test_both_old_layouts_are_read_and_one_is_written(layout: str, tmp_path: Path) -> None:
    model = mlp(4)
    optimizer = sgd(model)
    cross_entropy(model, data(1)[0]).backward()
    optimizer.step()
    torch.save(old_file(model, optimizer, layout), tmp_path / "old.pt")
    trainer = basic(mlp(5)) if layout == "basic" else extended(mlp(5), gradient_accumulation_steps=4)
    trainer.load_checkpoint(tmp_path / "old.pt")
    assert same(state(model), state(trainer.model))
    buffers = [s["momentum_buffer"] for s in trainer.optimizer.state.values()]
    assert all(torch.equal(a, b["momentum_buffer"]) for a, b in zip(buffers, optimizer.state.values(), strict=True))
    assert trainer.scaler.get_scale() == 4096.0
    assert trainer.scaler.state_dict()["_growth_tracker"] == 17
    stats = trainer.get_stats()
    assert (stats["overflow_steps"], stats["overflow_rate"]) == (2, 2 / 8)
    assert stats["training_steps"] == (8 if layout == "basic" else 33)
    trainer.save_checkpoint(tmp_path / "new.pt")
    content = torch.load(tmp_path / "new.pt", weights_only=True)
    assert (content["format"], content["version"]) == ("mantissa-trainer", 1)
    assert content["training_steps"] == 8


@pytest.mark.parametrize("scaled", [True, False])
def test_an_old_file_in_another_precision_says_so(
    scaled: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = mlp(4)
    content = old_file(model, sgd(model), "extended")
    if not scaled:  # bf16 there had no scaler
        content |= {"precision_mode": "mixed_bf16"}
        del content["scaler_state_dict"]
    torch.save(content, tmp_path / "old.pt")
    trainer = extended(mlp(5), precision_mode="mixed_bf16" if scaled else "mixed_fp16")
    trainer.load_checkpoint(tmp_path / "old.pt")
    was, now = ("fp16", "bf16") if scaled else ("bf16", "fp16")
    assert f"written in {was}, goes on in {now}, with a fresh loss scaler" in capsys.readouterr().out


def test_loading_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"model_state_dict": Evil(), "optimizer_state_dict": {}}, tmp_path / "evil.pt")
    with pytest.raises(MantissaError, match="not safe to load"):
        basic().load_checkpoint(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()
