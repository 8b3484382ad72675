"""Where a run's figures go while it runs, besides ``metrics.jsonl``: to a person's screen, and to trackers.

On a terminal a precision table is printed first; then the rows, one aligned row a step, scroll and stay, a progress bar
with the time left is redrawn below them, and values outside their healthy range are marked. Elsewhere (a pipe, a CI
log) each step is one plain line that makes sense alone.

``metrics.jsonl`` is the record; trackers (TensorBoard, and Weights & Biases as an extra) are copies for the eye, so
they may be missing but never disagree: after a resume the rows that were rewound are purged from TensorBoard. Weights &
Biases keeps no such promise (see its class).
"""

from __future__ import annotations

import functools
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from mantissa.base.environ import Heartbeat
from mantissa.base.errors import MantissaError, pip_install, say
from mantissa.base.files import disk_errors
from mantissa.base.screen import Screen
from mantissa.mismatch.tables import K3
from mantissa.mismatch.usual import Usual, size_sentence, usual
from mantissa.runs.directory import RunDirectory
from mantissa.runs.health import metric_of, small

_HEADER_EVERY = 25
_STEP_WIDTH = 6
_GUTTER = 2
_QUIET_SECONDS = 15.0  # on a pipe: after so long without a line, what is at work is said


@dataclass(frozen=True)
class Column:
    """One figure of a step's row. ``drop`` orders what a narrow terminal leaves out first: higher goes earlier."""

    title: str
    metric: str
    width: int
    show: Callable[[float], str]
    drop: int = 0


def power_of_two(value: float) -> str:
    """A loss scale: ``2^16`` where it is one, else the number."""
    if value > 0 and math.isfinite(value) and math.log2(value).is_integer() and value != 1:
        return f"2^{int(math.log2(value))}"
    return f"{value:g}"


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 05 s``, ``2 h 07 min``."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


def seconds_text(seconds: float) -> str:
    """A short time in three digits: ``1.5 s``, ``20 ms``, ``3 us``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size or seconds == 0:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def count(value: float) -> str:
    """Large counts shortened: ``950``, ``15.3k``, ``2.1M``."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def _rounded(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


COLUMNS = (
    Column("reward", "reward/mean", 7, _rounded(3)),
    Column("accuracy", "reward/accuracy", 8, _rounded(3)),
    Column("eval", "eval/greedy_accuracy", 6, _rounded(3), drop=3),
    Column("gap k3", "gap/k3_kl", 8, small),
    Column("|dlogp|", "gap/abs_logp_diff_mean", 8, small, drop=2),
    Column("scale", "precision/loss_scale", 6, power_of_two, drop=1),
    Column("overflow", "precision/overflows", 8, count, drop=1),
    Column("retry", "precision/retries", 5, count, drop=2),
    Column("skipped", "precision/skipped", 7, count, drop=1),
    Column("length", "length/mean", 7, _rounded(1), drop=6),
    Column("tok/s", "rate/rollout_tokens_per_s", 7, count, drop=4),
    Column("s/step", "time/step", 7, _rounded(2)),
)

GAME = (  # of two policies, beside those
    Column("attack", "waltz/attack_success", 6, _rounded(3)),
    Column("refusal", "waltz/over_refusal", 7, _rounded(3)),
    Column("labels", "waltz/label_accuracy", 6, _rounded(3)),
)


def fitting(columns: Sequence[Column], width: int) -> tuple[Column, ...]:
    """The columns that fit beside the step number in ``width`` characters, least important dropped first."""
    kept = list(columns)
    while len(kept) > 1 and _STEP_WIDTH + sum(column.width + _GUTTER for column in kept) > width:
        kept.remove(max(kept, key=lambda column: column.drop))
    return tuple(kept)


def precision_table(rows: Iterable[Mapping[str, Any]], title: str) -> Table:
    """The rows of ``ResolvedPrecision.rows()``; what fell back is yellow."""
    table = Table(box=None, pad_edge=False, header_style="dim", title=Text(title, style="bold"), title_justify="left")
    names = ("role", "requested", "active", "kernels")
    for name in names:
        table.add_column(name, no_wrap=True)
    table.add_column("reason", overflow="fold", style="dim")
    for row in rows:
        styles = {"active": "yellow" if row["fell_back"] else ""}
        table.add_row(*(Text(row[name], style=styles.get(name, "")) for name in (*names, "reason")))
    return table


class Live:
    """The screen of one run. Use as a context manager, or call ``close``; ``done`` steps were taken before a resume.
    ``still``: metrics that no step of this run can move, which are not shown. ``expected``: what is usual
    for the gap between the run's formats, asked for at the first step."""

    def __init__(
        self, total_steps: int, *, done: int = 0, still: Collection[str] = (),
        expected: Callable[[], Usual] = lambda: usual(()), console: Console | None = None,
    ) -> None:  # fmt: skip
        self._expected, self._gap_told = functools.cache(expected), False
        self._columns = tuple(column for column in COLUMNS if column.metric not in still)
        self.console = console or Screen(highlight=False)
        self.total_steps = total_steps
        self.terminal = self.console.is_terminal
        self._rows = 0
        self._seconds: list[float] = []
        self._heart, self._at = Heartbeat(self._write, every=_QUIET_SECONDS), ""  # of a pipe; the bar's time left
        self._progress: Progress | None = None
        if self.terminal:
            words = TextColumn("[bold]step"), MofNCompleteColumn(), BarColumn(None), TextColumn("{task.description}")
            self._progress = Progress(*words, console=self.console, expand=True)
            self._progress.add_task("time left unknown", total=total_steps, completed=done)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def precision(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print the precision table: the rows of ``ResolvedPrecision.rows()``."""
        if not self.terminal:
            for row in rows:
                self._plain(
                    f"precision {row['role']}: asked for {row['requested']}, active {row['active']} "
                    f"({row['kernels']} kernels); {row['reason']}"
                )
            return
        self.console.print(precision_table(rows, "Precision"))
        self.console.print()

    def note(self, text: str) -> None:
        """Print one line of plain text above the bar: a warm-start evaluation, a checkpoint, a retry."""
        if self.terminal:
            self.console.print(Text(text, style="dim"))
        else:
            self._plain(text)

    def doing(self, what: str, step: int = 0) -> None:
        """Say what is at work: in the bar, or on a pipe after 3 s, then 15, without a line; ``step`` 0: before all."""
        if self._progress is not None:
            self._progress.start()
            self._progress.update(self._progress.task_ids[0], description=", ".join(filter(None, (what, self._at))))
        else:
            self._heart.at(f"step {step}/{self.total_steps}  {what}" if step else what)

    def step(self, row: Mapping[str, Any]) -> None:
        """Show the finished step ``row['step']``."""
        step = int(row["step"])
        if isinstance(row.get("time/step"), int | float):
            self._seconds = [*self._seconds[-19:], float(row["time/step"])]
        self._show(step, row)
        self._tell_gap(step, row.get(K3))

    def _tell_gap(self, step: int, k3: Any) -> None:
        """Say once that the gap is larger than rounding makes."""
        if not self._gap_told and isinstance(k3, int | float) and not k3 <= self._expected().k3:
            self._gap_told = True
            self.note(f"warning: step {step}: {size_sentence(float(k3), self._expected())}")

    def _show(self, step: int, row: Mapping[str, Any]) -> None:
        if not self.terminal:
            self._plain(self._line(step, row))
            return
        game = GAME if any(name.startswith("waltz/") for name in row) else ()
        columns = fitting((*self._columns, *game), self.console.width)
        if self._rows % _HEADER_EVERY == 0:
            titles = "".join(f"  {column.title:>{column.width}}" for column in columns)
            self.console.print(Text(f"{'step':>{_STEP_WIDTH}}{titles}", style="bold"))
        self._rows += 1
        line = Text(f"{step:>{_STEP_WIDTH}}")
        for column in columns:
            line.append("  ")
            line.append(*_cell(column, row, self._expected()))
        self.console.print(line)
        if self._progress is not None:
            self._progress.start()  # no more than once, whatever it is called
            self._at = self.time_left(step)
            self._progress.update(self._progress.task_ids[0], completed=step, description=self._at)

    def time_left(self, step: int) -> str:
        """The remaining steps at the mean pace of the last twenty, in words."""
        if step >= self.total_steps:
            return "done"
        if not self._seconds:
            return "time left unknown"
        return "left " + duration((self.total_steps - step) * sum(self._seconds) / len(self._seconds))

    def close(self) -> None:
        """Stop redrawing, or saying what is at work, and leave the last state on the screen."""
        self._heart.at("")
        if self._progress is not None and self._progress.live.is_started:
            self._progress.stop()

    def _line(self, step: int, row: Mapping[str, Any]) -> str:
        figures = [
            f"{column.title} {column.show(float(row[column.metric]))}"
            for column in (*self._columns, *GAME)
            if isinstance(row.get(column.metric), int | float)
        ]
        return f"step {step}/{self.total_steps}  {'  '.join(figures)}  {self.time_left(step)}"

    def _plain(self, text: str) -> None:
        self._heart.heard()
        self._write(text)

    def _write(self, text: str) -> None:
        say(text.replace("\n", " "), to=self.console.file)


def _cell(column: Column, row: Mapping[str, Any], expected: Usual) -> tuple[str, str]:
    """The padded text of a cell and its style."""
    value = row.get(column.metric)
    if not isinstance(value, int | float):
        return " " * column.width, ""
    bad = not metric_of(column.metric, expected).is_healthy(float(value))
    return f"{column.show(float(value)):>{column.width}}", "bold red" if bad else ""


class Tracker(Protocol):
    """A place that metrics are copied to: the numbers of a step's row; nothing after ``close``."""

    def log(self, step: int, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files that ``tensorboard --logdir`` reads. ``resume_after``: hide what was logged after that step.

    Written here and now, not by the thread of tensorboard's own writer: a full disk is then an error of the step that
    met it, and not a traceback from elsewhere.
    """

    def __init__(self, folder: Path, resume_after: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a buffer would try to write what is left of a failed row once more when the file is closed.
            self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115 - held until close()
        self._records = RecordWriter(self._file)
        with ExitStack() as failed:
            failed.callback(self.close)
            self._write(Event(file_version="brain.Event:2"))
            if resume_after is not None:
                self._write(Event(step=resume_after + 1, session_log=SessionLog(status=SessionLog.START)))
            failed.pop_all()

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in numbers(row).items()])
        self._write(Event(step=step, summary=summary))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        with disk_errors(self._path):
            self._records.write(event.SerializeToString())

    def close(self) -> None:
        self._file.close()


class WeightsAndBiases:
    """A run on wandb.ai, or a local one under ``wandb/`` with ``WANDB_MODE=offline``, which needs no network.

    A resumed run goes on under the same id. Rows that were sent and then rewound stay: the service takes no step twice.
    """

    def __init__(self, run: RunDirectory, resume_after: int | None = None) -> None:
        try:
            import wandb
        except ImportError:
            raise MantissaError(
                f"trackers: wandb is not installed; {pip_install('wandb')}, or leave wandb out of trackers"
            ) from None
        try:
            resume = "allow" if resume_after is not None else None
            self._run = wandb.init(project="mantissa", name=run.path.name, id=run.path.resolve().name,
                                   dir=str(run.path), config=run.config, resume=resume)  # fmt: skip
        except wandb.errors.Error as error:
            raise MantissaError(
                f"trackers: wandb did not start ({' '.join(str(error).split())}); log in with `wandb login`, "
                "set WANDB_MODE=offline, or leave wandb out of trackers"
            ) from None

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        self._run.log(numbers(row), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """Several trackers as one; none is a tracker too."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(step, row)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


_KNOWN: dict[str, Callable[[RunDirectory, int | None], Tracker]] = {
    "tensorboard": lambda run, resume_after: TensorBoard(run.tensorboard_path, resume_after),
    "wandb": WeightsAndBiases,
}


def from_names(names: Sequence[str], run: RunDirectory, resume_after: int | None = None) -> Trackers:
    """The trackers a recipe names; ``resume_after`` is the step of the checkpoint a resumed run starts from.

    Raises ``MantissaError`` for one whose package is not installed.
    """
    found: list[Tracker] = []
    with ExitStack() as failed:
        for name in names:
            found.append(_KNOWN[name](run, resume_after))
            failed.callback(found[-1].close)
        failed.pop_all()
    return Trackers(found)


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numeric metrics of a row, without ``step``."""
    return {
        key: float(value)
        for key, value in row.items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
