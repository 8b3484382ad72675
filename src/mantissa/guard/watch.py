"""The guard at work: over a trainer's run directory, and over a run of RL. Both judge every row, and can make each
decision again from ``metrics.jsonl``; they differ in what a fall back is made of.

A trainer's: with a run directory, every optimiser step leaves one row in ``metrics.jsonl``, under the names that
``mantissa metrics`` explains. With a guard, decisions go to ``guard.jsonl``, and a healthy run leaves a last good
checkpoint, ``checkpoints/good.pt``, now and then. A decision to fall back restores weights, optimiser and schedule from
it and goes on in the wider format with the next batch: training never stops, and steps go on counting, since they are
attempts. Then it is saved at once, so that a kill cannot bring the trouble back. On several ranks a row holds what is
true of all (the loss is the mean over ranks by weight), rank 0 writes and decides, and every rank does what it decided.

RL's: a checkpoint written while the guard finds the run good is its last good one, and is kept however many come after
it. To fall back after step k is to write ``step-k`` with what was learned there (weights, moments, schedule, reference,
the count of updates), at the place in the data where the run is now, with the format that it goes on in; and then to go
on from ``step-k`` as a resume would. So there is one way into the wider format, a kill finds the run on one side of a
rename or on the other, and everything after it has the bits that any resume from that checkpoint has. Steps go on
counting: those that were undone stay in the file, and what they sampled is not sampled again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mantissa.base.errors import MantissaError
from mantissa.base.files import JsonLines, Row
from mantissa.base.ranks import Ranks
from mantissa.guard.config import GuardConfig
from mantissa.guard.log import Judge
from mantissa.training import Checkpoint, load_checkpoint, save_checkpoint, saved_state, saved_steps


class Watch:
    """One run directory. ``config`` None: rows only. ``good_every``: updates between good checkpoints.

    ``good_at``: the count of updates at this process's last good checkpoint; None before the first.
    """

    def __init__(
        self, folder: Path | str, config: GuardConfig | None, good_every: int, ranks: Ranks, say: Callable[[str], None]
    ) -> None:
        self.folder = Path(folder)
        self.good_path = self.folder / "checkpoints" / "good.pt"
        self.good_at: int | None = None
        self._config = config
        self._good_every = good_every
        self._ranks = ranks
        self._checked = False
        self._rows = JsonLines(self.folder / "metrics.jsonl")
        if ranks.rank0:
            if config is None and (self.folder / "guard.json").exists():
                raise MantissaError(f"{self.folder} is a guarded run: give the trainer its guard, or another run_dir")
            self.folder.mkdir(parents=True, exist_ok=True)
        self._judge = None if config is None else Judge(self.folder, config, say, ranks)

    @property
    def to(self) -> str:
        """The format to fall back to; empty without a guard."""
        return "" if self._config is None else self._config.to

    @property
    def needs_good(self) -> bool:
        """Whether there is nothing to fall back to yet."""
        return self._judge is not None and self.good_at is None

    def good_is_due(self, updates: int) -> bool:
        """Whether to write a good checkpoint after this update: it is time for one, and the guard finds no trouble."""
        return self._judge is not None and updates - (self.good_at or 0) >= self._good_every and self._judge.good

    def check_new(self, steps: int) -> None:
        """Before the first row, of step ``steps + 1``: refuse to mix this run's rows with another's."""
        rows = self._rows.read() if self._ranks.rank0 and not self._checked else []
        if rows and rows[-1]["step"] > steps:
            raise MantissaError(
                f"{self.folder} holds {rows[-1]['step']} steps of an earlier run: load its checkpoint to go on with "
                "it, or choose another run_dir"
            )
        self._checked = True

    def record(self, row: Row) -> bool:
        """Write a step's row and judge it: whether to fall back. ``MantissaError``: the guard stops the run."""
        if self._ranks.rank0:
            self._rows.append(row)
        return self._judge is not None and self._judge.judge(row)

    def resumed(self, steps: int, updates: int) -> None:
        """A checkpoint was loaded: forget what was logged after it, and judge what is left once more.

        Decisions are a function of the rows, so the guard ends as it was when the checkpoint was written.
        """
        self.good_at = updates if self.good_path.exists() else None
        if self._ranks.rank0:
            if self._rows.path.exists():
                self._rows.truncate(steps)
            if self._judge is not None:
                self._judge.rewind(steps, self._rows.read())


class RunGuard:
    """The guard of a run of RL in ``folder``, on every rank; rank 0 judges. ``note`` takes a line for the screen.

    ``format``: what the rows call the run's format. ``good``: the step of the last good checkpoint. ``fell_back``: the
    last fall back (``step``, ``from_step``, ``was``, ``to``, ``reasons``), None before the first.
    """

    def __init__(
        self, config: GuardConfig, folder: Path, number_format: str, ranks: Ranks, note: Callable[[str], None]
    ) -> None:
        self._to, self._note = config.to, note
        self._judge = Judge(folder, config, note, ranks)
        self.format = number_format
        self.good = 0
        self.fell_back: dict[str, Any] | None = None

    def restore(self, step: int, state: dict[str, Any], rows: list[Row]) -> None:
        """Go on after ``step``: ``state`` as ``saving`` gave it (empty at a run's beginning), ``rows`` up to there."""
        self.good, self.fell_back = int(state.get("good", 0)), state.get("fell_back")
        self._judge.rewind(step, rows)

    def judge(self, row: Row) -> bool:
        """Whether to fall back after this row, the same on every rank. ``MantissaError``: the guard stops the run."""
        return self._judge.judge(row)

    def saving(self, step: int) -> dict[str, Any]:
        """What the checkpoint of ``step`` keeps of the guard; from then on it may be the last good one. Collective."""
        if self._judge.good:
            self.good = step
        return {"good": self.good, "fell_back": self.fell_back}

    def fall_back(self, folder: Path, step: int, position: int, keep: int) -> None:
        """Write ``step-<step>``, from which the run goes on in the wider format, and say so; rank 0's work."""
        to = self._to
        last = load_checkpoint(folder, self.good)
        why = "; ".join(self._judge.reasons[:-1])  # the last says where to
        fell = {"step": step, "from_step": self.good, "was": self.format, "to": to, "reasons": why}
        state = last.state | {"position": position, "ahead": [], "guard": {"good": step, "fell_back": fell}}
        more = {name: tensors for name, tensors in last.more.items() if name != "ahead"}  # sampled in the old format
        save_checkpoint(folder, Checkpoint(step, last.policy, last.optimizer, state, more), keep)
        updates = state["step"]["updates"]
        self._note(f"guard: step {step}: back to checkpoint step-{self.good} (update {updates}), and on in {to}")


def fall_back_of(folder: Path) -> dict[str, Any] | None:
    """The fall back that the newest checkpoint in ``folder`` goes on from; None where there was none yet."""
    steps = saved_steps(folder)
    found: dict[str, Any] | None = saved_state(folder, steps[-1]).get("guard", {}).get("fell_back") if steps else None
    return found
