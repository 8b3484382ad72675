"""What a trainer writes of itself, and the guard over it.

With a run directory, every optimiser step leaves one row in ``metrics.jsonl``, under the names that ``mantissa
metrics`` explains. With a guard, each row is judged, decisions go to ``guard.jsonl``, and a healthy run leaves a last
good checkpoint, ``checkpoints/good.pt``, now and then. A decision to fall back restores weights, optimiser and schedule
from it and goes on in the wider format with the next batch: training never stops, and steps go on counting, since they
are attempts. Then it is saved at once, so that a kill cannot bring the trouble back.

On several ranks a row holds what is true of all (the loss is the mean over ranks by weight), rank 0 writes and decides,
and every rank does what rank 0 decided.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mantissa.errors import MantissaError
from mantissa.jsonl import JsonLines, Row
from mantissa.training import trainer_state
from mantissa.training.guard import Decision, Guard, Judge, severity
from mantissa.training.guard_config import GuardConfig
from mantissa.training.step import StepOutcome

if TYPE_CHECKING:
    from mantissa.training.trainer import PrecisionTrainer

_FALL_BACK, _STOP = severity("fall back"), severity("stop")


class Watch:
    """One trainer's run directory. ``config`` None: rows only. ``good_every``: updates between good checkpoints."""

    def __init__(
        self, trainer: PrecisionTrainer, folder: Path | str, config: GuardConfig | None, good_every: int
    ) -> None:
        if good_every < 1:
            raise MantissaError(f"PrecisionTrainer: good_every={good_every}: expected a whole number above 0")
        self._trainer = trainer
        self.folder = Path(folder)
        self.good_path = self.folder / "checkpoints" / "good.pt"
        self._config = config
        self._good_every = good_every
        self._good_at: int | None = None  # updates at the last good checkpoint of this process
        self._checked = False
        self._began = 0.0
        self._rows = JsonLines(self.folder / "metrics.jsonl")
        self._judge: Judge | None = None
        if trainer.ranks.rank == 0:
            if config is None and (self.folder / "guard.json").exists():
                raise MantissaError(f"{self.folder} is a guarded run: give the trainer its guard, or another run_dir")
            self.folder.mkdir(parents=True, exist_ok=True)
            if config is not None:
                self._judge = Judge(self.folder, config, trainer.say)

    @property
    def guard(self) -> Guard | None:
        """Rank 0's guard; None elsewhere, and without one."""
        return None if self._judge is None else self._judge.guard

    def begin(self) -> None:
        """A window opens: note the time, and make sure that there is something to fall back to."""
        if not self._checked:
            self._check_new()
            self._checked = True
        if self._config is not None and self._good_at is None:
            self._save_good()
        self._began = time.perf_counter()

    def after(self, outcome: StepOutcome, weight: float, total: float) -> None:
        """Write the step's row, judge it, and do what was decided. ``weight``: this rank's of the step's ``total``."""
        trainer = self._trainer
        seconds = time.perf_counter() - self._began
        mean = 0.0 if outcome.loss is None or weight == 0 else float(outcome.loss) * weight / total
        loss = trainer.ranks.sum_of(mean)
        decision = self._record(self._row(outcome, loss, seconds)) if trainer.ranks.rank == 0 else None
        if self._config is None:
            return
        action = trainer.ranks.max_of(float(severity(decision.action)) if decision else 0.0)
        if action == _STOP:
            raise MantissaError(f"the guard stops the run at step {trainer.steps}: {self._why(decision)}")
        if action == _FALL_BACK:
            self._fall_back(decision)
        elif outcome.applied and trainer.updates - (self._good_at or 0) >= self._good_every and self._is_good():
            self._save_good()

    def _is_good(self) -> bool:
        """Rank 0's guard's word, on every rank."""
        return self._trainer.ranks.max_of(1.0 if self.guard is not None and self.guard.good else 0.0) > 0

    def resuming(self, state: Mapping[str, Any]) -> None:
        """A checkpoint is about to be loaded: a run that fell back goes on in the format it fell back to."""
        was = (state["precision"] or {}).get("active")
        if self._config is not None and was == self._config.to != self._trainer.precision.active.name:
            self._trainer.say(f"guard: this run fell back to {was} before: going on in {was}")
            self._trainer.use(was)

    def resumed(self) -> None:
        """A checkpoint was loaded: forget what was logged after it, and judge what is left once more.

        Decisions are a function of the rows, so the guard ends as it was when the checkpoint was written.
        """
        self._good_at = self._trainer.updates if self.good_path.exists() else None
        if self._trainer.ranks.rank != 0:
            return
        if self._rows.path.exists():
            self._rows.truncate(self._trainer.steps)
        if self._judge is not None:
            self._judge.rewind(self._trainer.steps, self._rows.read())

    def _check_new(self) -> None:
        """Refuse to mix this run's rows with another's."""
        rows = self._rows.read() if self._trainer.ranks.rank == 0 else []
        if rows and rows[-1]["step"] > self._trainer.steps:
            raise MantissaError(
                f"{self.folder} holds {rows[-1]['step']} steps of an earlier run: load its checkpoint to go on with "
                "it, or choose another run_dir"
            )

    def _row(self, outcome: StepOutcome, loss: float, seconds: float) -> Row:
        trainer = self._trainer
        row: dict[str, Any] = {
            "step": trainer.steps,
            "train/loss": loss,
            "precision/format": trainer.precision.active.name,
            "precision/loss_scale": outcome.scale,
            "precision/overflows": outcome.overflows,
            "precision/retries": outcome.retries,
            "precision/skipped": int(not outcome.applied),
            "precision/max_scaled_grad": outcome.max_scaled_grad,
            "optim/lr": outcome.lr,
            "optim/grad_norm": outcome.grad_norm,
            "optim/updates": trainer.updates,
            "time/step": seconds,
        }
        if outcome.clipped is not None:
            row["optim/clipped_fraction"] = outcome.clipped
        if trainer.flushed_fraction is not None:
            row["precision/flushed_fraction"] = trainer.flushed_fraction
        return row

    def _record(self, row: Row) -> Decision | None:
        self._rows.append(row)
        return None if self._judge is None else self._judge.judge(row)

    def _save_good(self) -> None:
        self._trainer.save_checkpoint(self.good_path)
        self._good_at = self._trainer.updates

    def _fall_back(self, decision: Decision | None) -> None:
        trainer = self._trainer
        assert self._config is not None
        state = trainer_state.read(self.good_path, or_previous=True)
        trainer_state.restore_learning(trainer, state)
        trainer.use(self._config.to)
        trainer.say(
            f"guard: step {trainer.steps}: back to update {trainer.updates}, and on in {trainer.precision.active}"
        )
        self._save_good()

    @staticmethod
    def _why(decision: Decision | None) -> str:
        return "; ".join(decision.reasons) if decision else "rank 0 says why"


def watch_for(
    trainer: PrecisionTrainer, folder: Path | str | None, config: GuardConfig | None, good_every: int
) -> Watch | None:
    """The watch over a trainer; None without a run directory, which a guard cannot do without (``MantissaError``)."""
    if folder is not None:
        return Watch(trainer, folder, config, good_every)
    if config is not None:
        raise MantissaError("PrecisionTrainer(guard=...) needs run_dir: its decisions and checkpoints live there")
    return None
