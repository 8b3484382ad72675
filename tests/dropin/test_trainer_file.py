"""The trainer's checkpoint: bit-for-bit resumption, atomic, safe, old layouts, damage of every kind."""

from __future__ import annotations

import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from mantissa.base.errors import MantissaError
from mantissa.dropin import PrecisionTrainer
from mantissa.training.checkpoint import previous, read_file, write_file
from toys import cross_entropy, data, fragile, mlp, quiet, same, state, trainer_of


def adam_trainer(seed: int = 0, precision: str = "fp16", **options) -> PrecisionTrainer:
    model = mlp(seed, dropout=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return PrecisionTrainer(model, optimizer, precision, scheduler=schedule, **({"say": quiet} | options))


def counters(trainer: PrecisionTrainer) -> dict:
    return {k: v for k, v in trainer.stats().items() if k not in ("reason", "grad_norm", "max_scaled_grad")}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resumed_is_the_same_to_the_last_bit(precision: str, tmp_path: Path) -> None:
    """Dropout, batch norm, Adam, schedule, a moving scale: after loading, six steps are the uninterrupted run's."""
    batches = data(12)
    whole = adam_trainer(precision=precision, scale=128.0 if precision == "fp32" else "dynamic")
    for batch in batches[:6]:
        whole.step(batch, cross_entropy)
    path = whole.save_checkpoint(tmp_path / "run.pt", {"epoch": 3, "seen": torch.arange(4)})
    went_on = [whole.step(batch, cross_entropy).loss for batch in batches[6:]]

    torch.manual_seed(77)
    resumed = adam_trainer(seed=1, precision=precision, scale=128.0 if precision == "fp32" else "dynamic")
    extra = resumed.load_checkpoint(path)
    assert extra["epoch"] == 3
    assert torch.equal(extra["seen"], torch.arange(4))
    again = [resumed.step(batch, cross_entropy).loss for batch in batches[6:]]
    assert all(torch.equal(a, b) for a, b in zip(went_on, again, strict=True))
    assert same(state(whole.model), state(resumed.model))
    assert counters(whole) == counters(resumed)


def test_the_scaler_goes_on_where_it_was(tmp_path: Path) -> None:
    model, trap = fragile()
    trainer = trainer_of(model, "fp16", retries=0)
    trap.limit = 0.0
    trainer.step(data(1)[0], cross_entropy)
    trap.limit = float("inf")
    for batch in data(5):
        trainer.step(batch, cross_entropy)
    path = trainer.save_checkpoint(tmp_path / "a.pt")
    other = trainer_of(fragile(3)[0], "fp16", retries=0)
    other.load_checkpoint(path)
    assert other.scaler.state_dict() == trainer.scaler.state_dict()
    assert other.scaler.state_dict()["scale"] == 2.0**15
    assert (other.steps, other.updates, other.skipped) == (6, 5, 1)


def test_saving_in_an_open_window_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(mlp(), accumulate=2)
    trainer.step(data(1)[0], cross_entropy)
    with pytest.raises(MantissaError, match="1 of 2 micro-batches"):
        trainer.save_checkpoint(tmp_path / "a.pt")
    assert not list(tmp_path.iterdir())


def test_unsafe_values_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MantissaError, match=r"checkpoint\['extra'\]\['path'\] is a pathlib"):
        trainer_of(mlp()).save_checkpoint(tmp_path / "a.pt", {"path": tmp_path})
    assert not list(tmp_path.iterdir())


def old_file(model: nn.Module, optimizer: torch.optim.Optimizer, layout: str, prefix: str = "") -> dict:
    """As the old utilities wrote it, by torch.save, with GradScaler's own state."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    scaler.scale(torch.ones(()))
    content = {
        "model_state_dict": {prefix + name: value for name, value in model.state_dict().items()},
        "optimizer_state_dict": optimizer.state_dict(),
        "scaler_state_dict": scaler.state_dict() | {"_growth_tracker": 17},
        "overflow_steps": 2,
    }
    if layout == "basic":
        return content | {"training_steps": 8, "fp16_active": True}
    more = {"training_steps": 33, "update_steps": 6, "accumulated_steps": 1, "precision_active": True}
    config = {"precision_mode": "mixed_fp16", "gradient_accumulation_steps": 4, "max_grad_norm": 1.0}
    return content | more | {"precision_mode": "mixed_fp16", "config": config}


@pytest.mark.parametrize(("layout", "batches_seen", "prefix"), [("basic", 8, "module."), ("extended", 33, "")])
def test_both_old_layouts_are_read_and_one_is_written(
    layout: str, batches_seen: int, prefix: str, tmp_path: Path
) -> None:
    model = mlp(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    cross_entropy(model, data(1)[0]).backward()
    optimizer.step()
    path = tmp_path / "old.pt"
    torch.save(old_file(model, optimizer, layout, prefix), path)
    trainer = trainer_of(mlp(5), "fp16")
    assert trainer.load_checkpoint(path) == {}
    assert same(state(model), state(trainer.model))
    assert (trainer.steps, trainer.updates, trainer.skipped, trainer.batches_seen) == (8, 6, 2, batches_seen)
    assert trainer.scaler.state_dict() == {"scale": 4096.0, "clean_steps": 17}
    pairs = zip(optimizer.state.values(), trainer.optimizer.state.values(), strict=True)
    assert all(torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in pairs)
    content = torch.load(trainer.save_checkpoint(tmp_path / "new.pt"), weights_only=True)
    assert (content["format"], content["version"], content["training_steps"]) == ("mantissa-trainer", 1, 8)


@pytest.mark.parametrize(("source", "now"), [("new", "bf16"), ("fp16", "bf16"), ("bf16", "fp16")])
def test_another_precision_starts_a_fresh_scaler_and_says_so(source: str, now: str, tmp_path: Path) -> None:
    """``source``: a file of ours, or of the old utility in that format; in bf16 it had no scaler."""
    path, model = tmp_path / "a.pt", mlp(4)
    if source == "new":
        trainer_of(model, "fp16").save_checkpoint(path)
    else:
        content = old_file(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), "extended")
        if source == "bf16":
            del content["scaler_state_dict"]
        torch.save(content, path)
    said: list[str] = []
    trainer = trainer_of(mlp(1), now, say=said.append)
    trainer.load_checkpoint(path)
    assert trainer.scaler.scale == (65536.0 if now == "fp16" else 1.0)
    was = "bf16" if source == "bf16" else "fp16"
    told = [line for line in said if line.startswith("checkpoint: ")]
    assert told == [f"checkpoint: written in {was}, goes on in {now}, with a fresh loss scaler"]


class Evil:
    def __reduce__(self):
        return (print, ("ran code",))


def damaged(kind: str, path: Path) -> None:
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-200])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("loss=0.3\n")
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Evil(), protocol=2))
    elif kind == "code":
        torch.save({"model_state_dict": Evil(), "optimizer_state_dict": {}}, path)
    elif kind == "weights":
        torch.save(mlp().state_dict(), path)
    elif kind == "foreign":
        torch.save({"epoch": 3, "net": {}}, path)
    elif kind == "newer":
        torch.save(torch.load(path, weights_only=True) | {"version": 2}, path)
    elif kind == "other program":
        torch.save(torch.load(path, weights_only=True) | {"format": "other"}, path)
    else:
        path.unlink()


DAMAGE = {
    "truncated": "is damaged",
    "empty": "is damaged",
    "text": "damaged|not safe",
    "pickle": "not safe to load",
    "code": "not safe to load",
    "weights": "a model's state dict alone",
    "foreign": "expected a dictionary with model_state_dict",
    "newer": "version 2, this program reads version 1",
    "other program": "not a checkpoint of this program",
    "missing": "expected a file, found nothing",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_clear_error_and_the_previous_file_is_used_if_asked(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.pt"
    first = trainer_of(mlp(1))
    first.save_checkpoint(path)
    good = state(first.model)
    first.step(data(1)[0], cross_entropy)
    first.save_checkpoint(path)
    damaged(kind, path)

    said: list[str] = []
    trainer = trainer_of(mlp(2), say=said.append)
    before = state(trainer.model)
    with pytest.raises(MantissaError, match=DAMAGE[kind]) as caught:
        trainer.load_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert same(before, state(trainer.model))
    if kind != "newer":
        assert "or_previous=True reads" in str(caught.value)
    trainer.load_checkpoint(path, or_previous=True)
    assert same(good, state(trainer.model))
    assert trainer.steps == 0
    assert any(f"going on from {path}.previous" in line for line in said)
    assert "ran code" not in capsys.readouterr().out


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    path = trainer_of(nn.Linear(6, 3)).save_checkpoint(tmp_path / "a.pt")
    trainer = trainer_of(mlp())
    before = state(trainer.model)
    with pytest.raises(MantissaError, match=r"do not fit: it lacks .*; the model lacks bias, weight"):
        trainer.load_checkpoint(path)
    with pytest.raises(MantissaError, match=r"weight has shape \(3, 6\) there and \(4, 6\) here"):
        trainer_of(nn.Linear(6, 4)).load_checkpoint(path)
    assert same(before, state(trainer.model))
    model = nn.Linear(6, 3)
    two_groups = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    with pytest.raises(MantissaError, match=r"groups have \[2\] parameters, these have \[1, 1\]"):
        PrecisionTrainer(model, two_groups, "fp32", say=quiet).load_checkpoint(path)


WRITER = """
import sys, torch
from mantissa.training import checkpoint
path, start, size = sys.argv[1], int(sys.argv[2]), 300_000
for i in range(start, 10**9):
    value = torch.full((size,), float(i))
    checkpoint.write_file(path, {"model_state_dict": {"w": value}, "optimizer_state_dict": {"i": i}})
    print(i, flush=True)
"""


def test_weights_of_another_width_are_taken(tmp_path: Path) -> None:
    saved, ours, path = nn.Linear(6, 3), nn.Linear(6, 3), tmp_path / "file.pt"
    trainer_of(saved).save_checkpoint(path)
    content = read_file(path)
    content["model_state_dict"] = {n: v.to(torch.bfloat16) for n, v in content["model_state_dict"].items()}
    write_file(path, content)
    trainer_of(ours).load_checkpoint(path)
    assert same(state(ours), {name: value.to(torch.bfloat16).float() for name, value in state(saved).items()})


def test_killed_at_any_instant_there_is_a_whole_file(tmp_path: Path) -> None:
    """kill -9 at random moments while files are being written: what is there loads, and is the newest or the last."""
    path, start = tmp_path / "run.pt", 0
    torch.manual_seed(int(time.time()))
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, str(path), str(start)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            printed = [int(writer.stdout.readline())]
            time.sleep(float(torch.rand(())) * 0.3)
            writer.send_signal(signal.SIGKILL)
            printed += [int(line) for line in writer.stdout.read().split()]
        content = read_file(path)
        number = content["optimizer_state_dict"]["i"]
        assert number in (printed[-1], printed[-1] + 1)
        assert torch.equal(content["model_state_dict"]["w"], torch.full((300_000,), float(number)))
        if number > 0:
            kept = read_file(previous(path))["optimizer_state_dict"]["i"]
            assert kept in (number, number - 1)
        start = number + 1


def test_a_full_disk_is_one_error_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    trainer = trainer_of(mlp())
    trainer.save_checkpoint(path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # Python ignores the signal, and a write says EFBIG
    try:
        with pytest.raises(MantissaError, match="cannot write"):
            write_file(path, {"model_state_dict": {"w": torch.zeros(100_000)}, "optimizer_state_dict": {}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


class Remembering(nn.Linear):
    """A module with state of its own beside tensors, as torch lets one have."""

    note = "new"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, value: dict[str, str]) -> None:
        self.note = value["note"]


def test_a_modules_own_state_is_kept(tmp_path: Path) -> None:
    model = Remembering(6, 3)
    model.note = "seen"
    path = trainer_of(model).save_checkpoint(tmp_path / "a.pt")
    other = Remembering(6, 3)
    trainer_of(other).load_checkpoint(path)
    assert other.note == "seen"
    assert torch.equal(other.weight, model.weight)
