"""A trainer's run directory: its rows, the guard's decisions about them, and the last good checkpoint.

With a run directory, every optimiser step leaves one row in ``metrics.jsonl``, under the names that ``mantissa
metrics`` explains. With a guard, each row is judged, decisions go to ``guard.jsonl``, and a healthy run leaves a last
good checkpoint, ``checkpoints/good.pt``, now and then. A decision to fall back restores weights, optimiser and schedule
from it and goes on in the wider format with the next batch: training never stops, and steps go on counting, since they
are attempts. Then it is saved at once, so that a kill cannot bring the trouble back.

On several ranks a row holds what is true of all (the loss is the mean over ranks by weight), rank 0 writes and decides,
and every rank does what rank 0 decided.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mantissa.base.errors import MantissaError
from mantissa.base.jsonl import JsonLines, Row
from mantissa.base.ranks import Ranks
from mantissa.dropin.guard import Judge
from mantissa.dropin.guard_config import GuardConfig


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
