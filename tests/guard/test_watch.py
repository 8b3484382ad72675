"""The trainer under its guard: rows, a real divergence in fp16 caught and cured, resume, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mantissa.base.errors import MantissaError
from mantissa.base.files import JsonLines
from mantissa.dropin import PrecisionTrainer
from mantissa.guard import GuardConfig, GuardLog, replay
from mantissa.runs.catalogue import undeclared
from toys import cross_entropy, data, fragile, mlp, quiet, same, state, trainer_of

UNIT = 1e5  # targets reach 2.5 of these: more than fp16 can hold
NOISE = 0.1  # standard deviation of the targets, in units: the best loss is its square


def rows(folder: Path) -> list[dict]:
    return JsonLines(folder / "metrics.jsonl").read()


def task(count: int, size: int = 64, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    """y = UNIT * (w.x + NOISE * n), |w| = 1: known best loss NOISE^2."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.ones(8) / 8**0.5
    made = []
    for _ in range(count):
        x = torch.randn(size, 8, generator=generator)
        noise = torch.randn(size, generator=generator)
        made.append((x, UNIT * (x @ w + NOISE * noise)))
    return made


class Units(nn.Module):
    """The network's output in the units of the targets, as a layer of the network."""

    def forward(self, x: Tensor) -> Tensor:
        return x * UNIT


def regressor() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1), Units())


def error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return ((model(x).squeeze(1).float() - y) / UNIT).square().mean()


def regress(precision: str, steps: int, **options) -> tuple[PrecisionTrainer, float]:
    """Train, and give the loss on unseen data in fp32."""
    model = regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer = PrecisionTrainer(model, optimizer, precision, **({"say": quiet} | options))
    for batch in task(steps):
        trainer.step(batch, error)
    with torch.no_grad():
        return trainer, float(error(model, task(1, 4096, seed=9)[0]))


def test_a_run_that_leaves_fp16_is_caught_and_ends_as_good_as_fp32(tmp_path: Path) -> None:
    """Outputs must pass 65504 to fit: fp16 alone is lost; guarded, it goes on in bf16 from the last good checkpoint."""
    steps, best = 150, NOISE**2
    _, fp32 = regress("fp32", steps)
    alone, unguarded = regress("fp16", steps, on_nonfinite="skip")
    said: list[str] = []
    config = GuardConfig(window=20, min_steps=5, to="bf16", good_after=5)
    trainer, guarded = regress("fp16", steps, run_dir=tmp_path, guard=config, good_every=10, say=said.append)

    assert fp32 < 1.5 * best
    assert unguarded > 5 * best
    assert alone.skipped > steps / 2
    assert guarded < 1.1 * fp32
    assert trainer.precision.active.name == "bf16"
    assert trainer.skipped < 10
    assert sum("back to update" in line for line in said) == 1

    written = rows(tmp_path)
    assert [row["step"] for row in written] == list(range(1, steps + 1))
    assert all(undeclared(row) == [] for row in written)
    formats = [row["precision/format"] for row in written]
    change = formats.index("bf16")
    assert set(formats[:change]) == {"fp16"}
    assert set(formats[change:]) == {"bf16"}
    decisions = replay(written, config)
    assert [d for d in decisions if d.action == "fall back"] == [
        d for d in GuardLog(tmp_path).read() if d.action == "fall back"
    ]
    assert decisions[change - 1].action == "fall back"
    updates = [row["optim/updates"] for row in written]
    assert updates[change] < updates[change - 1] + 1  # it went back


def test_a_second_trouble_after_the_fall_back_stops_the_run(tmp_path: Path) -> None:
    config = GuardConfig(window=10, min_steps=5, to="bf16")
    model, _ = fragile()
    trainer = trainer_of(model, "fp16", run_dir=tmp_path, guard=config)
    batch = data(1)[0]

    def broken(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model, batch) * float("nan")

    for _ in range(2):
        trainer.step(batch, broken)
    assert trainer.precision.active.name == "bf16"
    assert trainer.step(batch, cross_entropy).applied
    trainer.step(batch, broken)
    with pytest.raises(MantissaError, match=r"the guard stops the run at step 5: .*not finite"):
        trainer.step(batch, broken)


def test_falling_back_restores_what_was_learnt_and_nothing_else(tmp_path: Path) -> None:
    config = GuardConfig(window=10, min_steps=5, to="fp32")
    model, _ = fragile()
    trainer = trainer_of(model, "fp16", run_dir=tmp_path, guard=config, good_every=3)
    batches = data(8)
    for batch in batches[:3]:
        trainer.step(batch, cross_entropy)
    good, momentum = state(model), [v["momentum_buffer"].clone() for v in trainer.optimizer.state.values()]
    trainer.step(batches[3], cross_entropy)
    for _ in range(2):
        trainer.step(batches[4], lambda m, b: cross_entropy(m, b) * float("inf"))
    assert same(good, state(model))
    now = [v["momentum_buffer"] for v in trainer.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(momentum, now, strict=True))
    assert (trainer.steps, trainer.updates, trainer.skipped) == (6, 3, 2)
    assert trainer.precision.active.name == "fp32"
    assert trainer.scaler.scale == 1.0


def test_a_run_that_fell_back_is_resumed_in_the_wider_format(tmp_path: Path) -> None:
    def fresh() -> PrecisionTrainer:
        config = GuardConfig(window=10, min_steps=5, to="bf16")
        return trainer_of(fragile()[0], "fp16", run_dir=tmp_path, guard=config, good_every=2)

    first, batches = fresh(), data(4)
    for batch in batches[:2]:
        first.step(batch, lambda m, b: cross_entropy(m, b) * float("nan"))
    first.step(batches[2], cross_entropy)
    second = fresh()
    second.load_checkpoint(tmp_path / "checkpoints" / "good.pt")
    assert (second.precision.active.name, second.steps, second.updates) == ("bf16", 2, 0)
    second.step(batches[2], cross_entropy)
    assert same(state(first.model), state(second.model))
    assert [row["precision/format"] for row in rows(tmp_path)] == ["fp16", "fp16", "bf16"]


def test_resumed_rows_and_decisions_are_those_of_the_run_that_went_on(tmp_path: Path) -> None:
    """A checkpoint every step; the process 'dies' after writing more rows; what it left is cut to the checkpoint."""
    config = GuardConfig(window=6, min_steps=3, overflow_warn=0.2, overflow_alert=0.3, overflow_fall_back=0.9)
    batches, killed_after = data(16), 9

    def run(folder: Path, todo: list, start: int, trainer: PrecisionTrainer, trap) -> None:
        for i, batch in enumerate(todo, start=start):
            trap.limit = 0.0 if i in (5, 7, 8) else float("inf")
            trainer.step(batch, cross_entropy)

    def fresh(folder: Path):
        torch.manual_seed(0)
        model, trap = fragile()
        return trainer_of(model, "fp16", run_dir=folder, guard=config, good_every=4, retries=0), trap

    whole, trap = fresh(tmp_path / "whole")
    run(tmp_path / "whole", batches, 0, whole, trap)

    first, trap = fresh(tmp_path / "cut")
    run(tmp_path / "cut", batches[:killed_after], 0, first, trap)
    first.save_checkpoint(tmp_path / "last.pt")
    run(tmp_path / "cut", batches[killed_after : killed_after + 3], killed_after, first, trap)
    second, trap = fresh(tmp_path / "cut")
    second.load_checkpoint(tmp_path / "last.pt")
    run(tmp_path / "cut", batches[killed_after:], killed_after, second, trap)

    def timeless(folder: Path) -> list[str]:
        return [repr({k: v for k, v in row.items() if not k.startswith("time/")}) for row in rows(folder)]

    assert timeless(tmp_path / "cut") == timeless(tmp_path / "whole")
    assert (tmp_path / "cut" / "guard.jsonl").read_text() == (tmp_path / "whole" / "guard.jsonl").read_text()
    assert "alert" in (tmp_path / "cut" / "guard.jsonl").read_text()
    assert same(state(second.model), state(whole.model))


def test_a_state_in_trouble_is_not_kept_as_good(tmp_path: Path) -> None:
    config = GuardConfig(good_after=3, overflow_warn=1, overflow_alert=1, overflow_fall_back=1)
    trainer = trainer_of(fragile()[0], "fp16", run_dir=tmp_path, guard=config, good_every=1)
    kept = []
    for factor in (1.0, float("nan"), 1.0, 1.0, 1.0, 1.0):
        trainer.step(data(1)[0], lambda m, b, factor=factor: cross_entropy(m, b) * factor)
        kept.append(torch.load(tmp_path / "checkpoints" / "good.pt", weights_only=True)["training_steps"])
    assert kept == [1, 1, 1, 1, 5, 6]


def test_another_runs_folder_is_refused(tmp_path: Path) -> None:
    first = trainer_of(mlp(), run_dir=tmp_path)
    for batch in data(3):
        first.step(batch, cross_entropy)
    with pytest.raises(MantissaError, match="holds 3 steps of an earlier run"):
        trainer_of(mlp(), run_dir=tmp_path).step(data(1)[0], cross_entropy)
    assert len(rows(tmp_path)) == 3
    with pytest.raises(MantissaError, match="needs run_dir"):
        trainer_of(mlp(), guard=GuardConfig())
    trainer_of(mlp(), run_dir=tmp_path / "guarded", guard=GuardConfig())
    with pytest.raises(MantissaError, match="is a guarded run"):
        trainer_of(mlp(), run_dir=tmp_path / "guarded")


def test_a_row_tells_what_happened(tmp_path: Path) -> None:
    model, trap = fragile()
    trainer = trainer_of(model, "fp16", run_dir=tmp_path, accumulate=2)
    batches = data(4)
    trap.limit = 2000.0
    for batch in batches:
        outcome = trainer.step(batch, cross_entropy)
    first, second = rows(tmp_path)
    assert (first["step"], second["step"], second["optim/updates"]) == (1, 2, 2)
    assert first["precision/overflows"] == first["precision/retries"] > 0
    assert first["precision/loss_scale"] == 65536.0 / 2 ** first["precision/overflows"]
    assert second["train/loss"] == pytest.approx(float(outcome.loss))
    assert second["optim/grad_norm"] == outcome.grad_norm
    assert second["optim/lr"] == 0.05
