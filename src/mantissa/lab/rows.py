"""A lab's rows: one a cell, in one file that is kept, and the table of each figure by cell and seed.

The file begins with the registration: the question and what was expected, with the time and the commit, written before
the first cell was run and never again. A row has the cell's name, seed and digest, its status, its figures, its curves
thinned to points, the code that ran it, and where.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mantissa.base.bounds import boundary
from mantissa.base.provenance import CODE, stamp
from mantissa.lab.plan import Cell, Lab, Measure
from mantissa.runs import rows as rows_of
from mantissa.runs.compare import ENDS
from mantissa.runs.directory import RunDirectory, place
from mantissa.runs.groups import Difference, SeedTable
from mantissa.runs.metrics import binned, series
from mantissa.runs.rows import Row

DONE, FAILED = "finished", "failed"
_POINTS = 150  # of a curve


class Rows:
    """The rows of one lab, on disk after each change."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.path = lab, lab.rows_path
        self.registered: Row = {}
        self._of: dict[str, Row] = {}
        if self.path.exists():
            with boundary(self.path, "restore it, or move it away to begin the lab anew"):
                first, *rest = rows_of.read(self.path)
                self.registered = first | {"question": str(first["question"]), "expect": str(first["expect"])}
                rest = [_checked(row, f"line {place}") for place, row in enumerate(rest, start=2)]
                self._of = {f"{row['cell']}-seed{row['seed']}": row for row in rest}

    def register(self, mark: Row | None = None) -> None:
        """Before the first run: what is asked and expected, if that was not written before, and the file's commit."""
        if self.registered:
            return
        about = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **CODE.stamp}
        said = {"lab": self.lab.name, "question": self.lab.file.question, "expect": self.lab.file.expect}
        self.registered = said | about | (mark or {})
        self._write()

    def of(self, cell: Cell) -> Row | None:
        """The row of this very run: one that another recipe made is none."""
        row = self._of.get(cell.folder)
        return row if row is not None and row.get("digest") == cell.run_digest(row.get("source")) else None

    def finished(self, cell: Cell) -> Row | None:
        row = self.of(cell)
        return row if row is not None and row["status"] == DONE else None

    @property
    def all_finished(self) -> list[Row]:
        """The rows of all cells that are finished, in the cells' order."""
        return [row for cell in self.lab.cells if (row := self.finished(cell))]

    @property
    def reported(self) -> list[str]:
        """The cells that are finished for one seed or more; the page lists the others as not run."""
        finished = {cell.name for cell in self.lab.cells if self.finished(cell)}
        return [name for name in self.lab.names if name in finished]

    def put(self, cell: Cell, row: Row) -> None:
        """Add or replace a cell's row; the file is then the old one or the new one."""
        digest = cell.run_digest(row.get("source"))
        about = {"cell": cell.name, "seed": cell.seed, "values": cell.values, "digest": digest}
        self._of[cell.folder] = about | row | about
        self._write()

    def figure(self, name: str, measure: Measure) -> dict[int, float]:
        """A figure of a cell by seed, where its run is finished and logged it."""
        rows = {cell.seed: self.finished(cell) for cell in self.lab.cells if cell.name == name}
        found = {seed: row["final"].get(measure.text) for seed, row in rows.items() if row is not None}
        return {seed: value for seed, value in found.items() if value is not None}

    def table(self, measure: Measure) -> SeedTable:
        """A figure of every cell by seed."""
        return SeedTable({name: self.figure(name, measure) for name in self.lab.names}, measure.spans_decades)

    def difference(self, measure: Measure, name: str, control: str) -> Difference | None:
        """A cell's figure against its control's, over the seeds in which one code ran both."""
        apart = self.of_two_codes(name, control)
        ours = {seed: value for seed, value in self.figure(name, measure).items() if seed not in apart}
        table = SeedTable({name: ours, control: self.figure(control, measure)}, measure.spans_decades)
        return table.difference(name, control)

    def of_two_codes(self, name: str, control: str) -> set[int]:
        """The seeds in which a cell and its control were run by two sources of the package: no pairs."""
        ran: dict[str, dict[int, Row]] = {name: {}, control: {}}
        for cell in self.lab.cells:
            if cell.name in ran and (row := self.finished(cell)):
                ran[cell.name][cell.seed] = row
        pairs = ((seed, (row, ran[control][seed])) for seed, row in ran[name].items() if seed in ran[control])
        return {seed for seed, pair in pairs if len(set(rows_of.codes_of(pair))) > 1}

    def curve(self, name: str, metric: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Steps, and a row of values for each seed, at the points that all of them have; None without any."""
        rows = [row for cell in self.lab.cells if cell.name == name and (row := self.finished(cell))]
        found = [row["curves"][metric] for row in rows if metric in row.get("curves", {})]
        points = [dict(zip(curve["step"], curve["value"], strict=True)) for curve in found]
        steps = sorted(set.intersection(*map(set, points))) if points else []
        if not steps:
            return None
        return np.array(steps, dtype=float), np.array([[of[step] for step in steps] for of in points], dtype=float)

    def _write(self) -> None:
        order = [cell.folder for cell in self.lab.cells]
        kept = sorted(self._of, key=lambda name: (order.index(name) if name in order else len(order), name))
        rows_of.write(self.path, (self.registered, *(self._of[name] for name in kept)))


def _is_curves(value: Any) -> bool:
    return isinstance(value, dict) and all(
        len(curve["step"]) == len(curve["value"]) and all(map(_is_number, (*curve["step"], *curve["value"])))
        for curve in value.values()
    )


def _is_final(value: Any) -> bool:
    return isinstance(value, dict) and all(map(rows_of.maybe(_is_number), value.values()))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


# A row as ``row_of_run``, ``row_of_gap`` and a failure make it.
_ROW: dict[str, rows_of.Good] = {
    "cell": rows_of.is_text,
    "seed": lambda value: isinstance(value, int),
    "digest": rows_of.is_text,
    "status": rows_of.is_text,
    **dict.fromkeys(("lab_commit", "lab_committed", "time"), rows_of.maybe(rows_of.is_text)),
    "final": rows_of.maybe(_is_final),
    "curves": rows_of.maybe(_is_curves),
}
_BY_STATUS: dict[str, dict[str, rows_of.Good]] = {
    FAILED: {"error": rows_of.is_text},
    DONE: {"seconds": rows_of.is_duration},
}


def _checked(row: Any, where: str) -> Row:
    rows_of.require_like(row, _ROW, where, "a lab writes")
    rows_of.require_like(row, _BY_STATUS.get(row["status"], {}), where, "a lab writes")
    return dict(row)


def row_of_run(lab: Lab, run: RunDirectory) -> Row:
    """What a finished run says: its figures, its curves, and where it was run."""
    rows, about = run.metrics.read(), run.environment
    curves = {}
    for metric in lab.curves:
        steps, values = series(rows, metric)
        if steps.size:
            size = -(-steps.size // _POINTS)
            curves[metric] = {"step": binned(steps, size).tolist(), "value": binned(values, size).tolist()}
    return {
        "status": DONE,
        "steps": len(rows),
        "seconds": sum(row.get("time/step", 0.0) for row in rows),
        "final": {measure.text: reduced(rows, measure) for measure in lab.measures},
        "curves": curves,
        "versions": about.get("versions"),
        "precision": {row["role"]: f"{row['active']}, {row['kernels']}" for row in about.get("precision", ())},
        "time": about.get("created"),
    } | place(about)


def row_of_gap(lab: Lab, row: Row) -> Row:
    """What ``mantissa gap`` found of one pair."""
    figures = {measure.text: row.get(measure.metric) for measure in lab.measures}
    own = ("device", "threads", "commit", "time", "tokens", "completions", "kernels", "engine", "parameters")
    kept = (*own, *(key for key in stamp() if key in row and key not in own))
    seconds = row["sample_seconds"] + row["score_seconds"]
    return {"status": DONE, "seconds": seconds, "final": figures, "curves": {}} | {key: row[key] for key in kept}


def reduced(rows: Sequence[Row], measure: Measure) -> float | None:
    """A figure of a run's rows; None where the metric was never logged. What is not finite stays visible."""
    values = [float(row[measure.metric]) for row in rows if isinstance(row.get(measure.metric), int | float)]
    if not values:
        return None
    if measure.how == "last":
        values = values[-1:] if measure.metric.startswith("eval/") else values[-ENDS:]
    if measure.how == "first":
        return values[0]
    if measure.how in ("max", "min") and not any(map(math.isnan, values)):
        return max(values) if measure.how == "max" else min(values)
    return sum(values) / (1 if measure.how == "sum" else len(values))


def last_line(path: Path) -> str:
    """What a process that is at work has last said."""
    return (_lines(path) or ["begun"])[-1]


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(errors="replace").splitlines() if line.strip()] if path.is_file() else []


def last_words(path: Path) -> str:
    """What a failed process said at last: its error's line, an exception's, or the last one, which may be a warning."""
    lines = _lines(path)
    for of_error in (r"mantissa: error: ", r"[\w.]+(Error|Exception|Interrupt|Exit)\b", r""):
        said = next((line for line in reversed(lines) if re.match(of_error, line)), None)
        if said is not None:
            return said.removeprefix("mantissa: error: ")[:500]
    return "it said nothing"
