"""The world model: its loss against float64, what it learns in each precision and what it cannot, and its life."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa.base.errors import MantissaError
from mantissa.genesis.worldmodel import HistoryRow, SQLiteBuffer, Trajectory, WorldModel, cross_validate
from mantissa.genesis.worldmodel.model import by_task, loss_of
from mantissa.genesis.worldmodel.trajectory import encode_state, encode_text
from mantissa.guard import GuardConfig
from trajectories import BAD, GOOD, planted

SMALL: dict[str, Any] = {"state_dim": 32, "action_dim": 64, "hidden_dim": 32}
STATE = {"metrics": {"overall_score": 0.5}, "text": "task 3"}


def small(**options: Any) -> WorldModel:
    return WorldModel(**(SMALL | {"precision": "fp32", "members": 2} | options))


def test_the_encoding_keeps_metrics_numbers_and_words_apart() -> None:
    base = encode_state({"metrics": {"overall_score": 0.5, "efficiency": 0.25}}, 64)
    assert base[:3].tolist() == [0.5, 0.0, 0.25]
    assert not base[3:].any()
    counted = encode_state({"count": 1000, "flag": True}, 64)
    assert sorted(counted[3:19][counted[3:19] != 0]) == pytest.approx([1.0, 1 + np.log(1000)])
    text = encode_text("replace < by <=", 64)
    assert np.linalg.norm(text) == pytest.approx(1)
    assert text @ encode_text("replace > by <=", 64) > text @ encode_text("drop the loop", 64) + 0.3
    assert not encode_text("", 64).any()


def test_the_loss_is_its_formula() -> None:
    rows = [*planted(3), planted(4)[3].model_copy(update={"final_outcome": "unknown", "actions": ("a", "b", "c")})]
    model = small()
    data = model.encode(rows)
    with torch.no_grad():
        found = float(loss_of(model.trainer.model, data))
        out = model.trainer.model(data.states, data.actions).double().numpy()
    expected = 0.0
    for member in out:
        for b, row in enumerate(rows):
            for t in range(len(row.actions)):
                logit, gain = member[b, t]
                y = row.final_outcome == "success"
                bce = np.logaddexp(0, -logit) if y else np.logaddexp(0, logit)
                miss = abs(gain - row.improvement)
                huber = miss * miss / 2 if miss <= 1 else miss - 0.5
                expected += (bce / 3 if row.final_outcome != "unknown" else 0) / len(row.actions)
                expected += huber / 4 / len(row.actions)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_learns_a_rule_and_predicts_unseen_tasks(precision: str) -> None:
    model = small(precision=precision, lr=6e-3)
    rows = planted(240)
    learnt, unseen = [t for t in rows if t.task != "task-0"], [t for t in rows if t.task == "task-0"]
    history = model.train(4, 16, learnt)
    scores = model.evaluate(unseen)
    assert scores is not None
    assert scores.auroc is not None
    assert scores.auroc > 0.8  # the rule's own is 0.9
    assert scores.ece < 0.2
    assert [row.epoch for row in history] == [1, 2, 3, 4]
    assert history[-1].loss < history[0].loss
    good, bad = model.predict(STATE, GOOD[0]), model.predict(STATE, (BAD[0], BAD[1]))
    assert good.success_probability > 0.7 > 0.3 > bad.success_probability
    assert good.expected_improvement > 0.1 > 0 > bad.expected_improvement
    assert 0 < good.uncertainty < 0.3
    assert model.predict_many([(STATE, GOOD[0]), (STATE, (BAD[0], BAD[1]))])[0].success_probability == pytest.approx(
        good.success_probability, abs=1e-5
    )


def test_permuted_outcomes_cannot_be_predicted() -> None:
    """A state that told the outcome would be learnt all the same: 300 predictions of noise are 0.5 +- 0.03."""
    rows = planted(300)
    order = np.random.default_rng(1).permutation(len(rows))
    ends = [(rows[i].final_outcome, rows[i].final_reward) for i in order]
    mixed = [t.model_copy(update={"final_outcome": o, "final_reward": r}) for t, (o, r) in zip(rows, ends, strict=True)]
    make = lambda: small(members=1, lr=1e-2)  # noqa: E731
    found = cross_validate(mixed, make, folds=2, epochs=3, batch_size=16)
    assert found.model.auroc == pytest.approx(0.5, abs=0.1)
    real = cross_validate(rows, make, folds=2, epochs=3, batch_size=16)
    assert real.model.auroc is not None
    assert real.model.auroc > 0.8
    assert real.gain.low is not None  # the second action tells all, and counting every action sees that too
    assert real.model.trajectories == 300


def test_tasks_kept_apart_set_the_temperature() -> None:
    """Twice the same trajectories with opposite ends: whatever was learnt, the honest answer is one in two."""
    rows = [t.model_copy(update={"actions": (t.actions[-1],)}) for t in planted(200)]
    flipped = [
        t.model_copy(update={"final_outcome": "failure" if t.final_outcome == "success" else "success"})
        for t in rows
    ]  # fmt: skip
    model = small(lr=3e-3, calibration=0.0)
    model.train(3, 16, rows)
    sure = model.predict(STATE, GOOD[0]).success_probability
    assert model.temperature == 1
    model._serve(rows + flipped)
    assert model.temperature == pytest.approx(10)
    assert 0.5 < model.predict(STATE, GOOD[0]).success_probability < 0.5 + 0.5 * (sure - 0.5)


def test_a_saved_model_predicts_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    rows = planted(64)
    whole = small(precision="fp16", buffer=rows)
    whole.train(1, 16)
    path = whole.save(tmp_path / "world.pt")
    again = small(precision="fp16", buffer=rows, model_path=path)
    assert again.predict(STATE, GOOD[0]) == whole.predict(STATE, GOOD[0])
    assert (again.history, again.seen_tasks, again.temperature) == (whole.history, whole.seen_tasks, whole.temperature)
    for model in (whole, again):
        model.train(1, 16)
    assert all(torch.equal(a, b) for a, b in zip(*(m.trainer.model.parameters() for m in (whole, again)), strict=True))
    assert again.history[-1].epoch == 2


def test_files_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    model = small(buffer=planted(32))
    model.train(1)
    before = model.predict(STATE, GOOD[0])
    other = WorldModel(32, 64, 16, precision="fp32", members=2)
    with pytest.raises(MantissaError, match=r"hidden_dim': 16.*make it so"):
        model.load(other.save(tmp_path / "other.pt"))
    with pytest.raises(MantissaError, match="holds no world model"):
        model.load(model.trainer.save_checkpoint(tmp_path / "trainer.pt"))
    (tmp_path / "garbage.pt").write_bytes(b"garbage")
    for name in ("garbage.pt", "absent.pt"):
        with pytest.raises(MantissaError, match=name):
            model.load(tmp_path / name)
    assert model.predict(STATE, GOOD[0]) == before


def test_overflow_is_met_by_the_scaler_that_lives_on_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP16_LOSS_SCALE", "1e9")
    model = WorldModel(**SMALL, members=1, buffer=planted(64))
    assert model.trainer.precision.active.name == "fp16"
    first, second = model.train(2, 16)
    assert first.overflows >= 1
    assert np.isfinite(first.loss)
    found = model.trainer.scaler.scale
    assert found < 1e9
    assert second.overflows < first.overflows + 1
    model.train(1, 16)
    assert model.trainer.scaler.scale <= found  # no new scaler, which would overflow again
    assert model.history[-1].overflows == 0
    monkeypatch.setenv("ENABLE_FP16_TRAINING", "false")
    assert WorldModel(**SMALL).trainer.precision.active.name == "fp32"
    assert WorldModel(**SMALL, precision="bf16").trainer.precision.active.name == "bf16"


def test_the_guard_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP16_LOSS_SCALE", str(2.0**120))  # tens of batches are lost until it is low enough
    guard = GuardConfig(to="fp32", min_steps=4, window=8, overflow_fall_back=0.3)
    model = small(precision="fp16", members=1, buffer=planted(96), run_dir=tmp_path / "run", guard=guard)
    model.train(2, 16)
    assert model.trainer.precision.active.name == "fp32"
    assert model.trainer.updates > 0


def test_a_training_may_be_awaited_as_well_as_called() -> None:
    """As the published interface has it, which is async: ``await world_model.train(...)``."""
    called, awaited = small(buffer=planted(64)), small(buffer=planted(64))

    async def awaiting() -> list[HistoryRow]:
        return await awaited.train(epochs=2, batch_size=16)

    rows, again = called.train(epochs=2, batch_size=16), asyncio.run(awaiting())
    assert [row.loss for row in rows] == [row.loss for row in again]
    assert again == awaited.history
    assert called.predict(STATE, GOOD[0]) == awaited.predict(STATE, GOOD[0])


def test_training_in_a_thread_lets_the_loop_go_on_and_can_be_cancelled() -> None:
    model = small(buffer=planted(128))
    before = model.predict(STATE, GOOD[0])

    async def both() -> tuple[list[HistoryRow], int]:
        told, during = list[HistoryRow](), 0
        work = asyncio.create_task(model.train_async(3, 16, progress=told.append))
        while not work.done():
            during += len(told) == 0 and model.predict(STATE, GOOD[0]) == before
            with_error = None
            if model._training.locked():
                try:
                    model.train(1)
                except MantissaError as error:
                    with_error = error
                assert with_error is None or "already" in str(with_error)
            await asyncio.sleep(0.001)
        assert await work == told == model.history[: len(told)]
        return told, during

    told, during = asyncio.run(both())
    assert len(told) == 3
    assert during >= 1  # what is served does not change under a training's hands

    async def cancelled() -> float:
        work = asyncio.create_task(model.train_async(10_000, 16))
        await asyncio.sleep(0.05)
        began = time.perf_counter()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        return time.perf_counter() - began

    epochs = len(model.history)
    assert asyncio.run(cancelled()) < 100  # of the minutes that its 10,000 epochs would take
    assert len(model.history) < epochs + 10_000
    assert not model._training.locked()
    model.train(1, 16)


def test_a_training_cancelled_before_its_first_batch_learns_nothing() -> None:
    model, cancel = small(buffer=planted(16)), threading.Event()
    cancel.set()
    weights = [p.clone() for p in model.trainer.model.parameters()]
    assert model.train(2, 8, cancel=cancel) == []
    assert all(torch.equal(a, b) for a, b in zip(weights, model.trainer.model.parameters(), strict=True))


class Counted(TorchDispatchMode):
    """How many of torch's operations are called, and how many values they make."""

    calls = values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.calls += 1
        self.values += made.numel() if isinstance(made, torch.Tensor) else 0
        return made


def test_a_prediction_is_few_operations_on_few_values() -> None:
    """The same for a first and for a later one: milliseconds anywhere."""
    model = WorldModel(precision="fp32")
    with Counted() as first:
        model.predict(STATE, GOOD[0])
    with Counted() as later:
        model.predict(STATE, GOOD[0])
    assert (later.calls, later.values) <= (first.calls, first.values)
    assert later.calls < 300, later.calls
    assert later.values < 2_000_000, later.values  # half of it seen; an attention over text that grew would be more


def test_bad_arguments(tmp_path: Path) -> None:
    for options, said in (
        ({"hidden_dim": 0}, "hidden_dim=0"), ({"members": 0}, "members=0"), ({"calibration": 1.0}, "calibration=1.0"),
        ({"precision": "fp8"}, "fp8"), ({"seed": -1}, "seed=-1"),
    ):  # fmt: skip
        with pytest.raises(MantissaError, match=said):
            small(**options)
    model = small()
    with pytest.raises(MantissaError, match="give it trajectories"):
        model.train(1)
    with pytest.raises(MantissaError, match="store some first"):
        model.train(1, source=tmp_path / "empty.db")
    with pytest.raises(MantissaError, match="epochs=0"):
        model.train(0, source=planted(4))
    with pytest.raises(MantissaError, match="tells how it ended"):
        model.predict({"reward": 1}, "a")
    with pytest.raises(MantissaError, match="an action as text"):
        model.predict(STATE, [])
    with pytest.raises(MantissaError, match="name a file"):
        model.save()
    with pytest.raises(MantissaError, match=r"folds=9 over 2 tasks.*--folds 2 divides these"):
        cross_validate(planted(10, tasks=2), small, folds=9)


def test_it_reads_a_buffer_that_others_write_to(tmp_path: Path) -> None:
    with SQLiteBuffer(tmp_path / "buffer.db") as buffer:
        buffer.store(*planted(24))
        model = small(buffer=tmp_path / "buffer.db")
        assert model.train(1, 8)[0].batches in (2, 3)
        buffer.store(Trajectory(initial_state={}, actions=("a",), final_reward=0.5, task="new"))
        model.train(1, 8)
        assert "new" in model.seen_tasks


def test_one_training_at_a_time() -> None:
    """A second one is refused at once, with the first left to its end; then there may be another."""
    model, said, rows = small(), list[str](), planted(4)

    def again(row: HistoryRow) -> None:
        with pytest.raises(MantissaError) as refused:
            model.train(1, 16, rows)
        said.append(str(refused.value))

    assert len(model.train(2, 16, rows, progress=again)) == 2
    assert said == ["this world model is being trained already: wait for that, or cancel it"] * 2
    assert len(model.train(1, 16, rows)) == 1
    assert len(model.history) == 3


@pytest.mark.parametrize("batch_size", [3, 7, 500])
def test_the_loss_of_an_epoch_is_the_mean_over_trajectories_and_members(batch_size: int) -> None:
    """At a step size that leaves the weights as they were, whatever the batches."""
    model, rows = small(lr=1e-12, members=3), planted(20)
    learnt, apart = by_task(rows, model.calibration, model.seed)
    assert 7 < len(learnt) < len(rows) == len(learnt) + len(apart)
    with torch.no_grad():
        each = [float(loss_of(model.trainer.model, model.encode([row]))) for row in learnt]
    (row,) = model.train(1, batch_size, rows)
    assert row.loss == pytest.approx(np.mean(each) / 3, rel=1e-5)
