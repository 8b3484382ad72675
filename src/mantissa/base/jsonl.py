"""A file of JSON rows that is only ever appended to, and survives being cut off in the middle of a line.

Non-finite numbers are kept, because the step on which a run diverged is the one worth reading: JSON has no word for
them, so they are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` and read back as floats. Every
other float is written in its shortest form that reads back as the same double.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mantissa.base.bounds import LARGEST_SIZE, describe_value, number, regular_file, whole_text
from mantissa.base.errors import MantissaError
from mantissa.base.files import disk_errors, open_own, write_atomically
from mantissa.base.progress import opened
from mantissa.base.readers.json import ROW, parse_json
from mantissa.base.readers.limits import require_size

Row = dict[str, Any]
_LARGEST = 4 << 30  # bytes of a file
# Names with a slash that are words and no numbers.
_LABELS = ("precision/format", "precision/requested", "precision/active")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonLines:
    """Rows in ``path``, one a line, each with an integer ``step`` larger than the one before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last_step: int | None = None

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row and fsync it, so that no later checkpoint can be on disk without it.

        Raises ValueError for a row without an integer step, or one that does not come after the last row; and
        ``MantissaError`` when the disk is full or the file unwritable.
        """
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            raise ValueError(f"a row needs an integer 'step', not {step!r}")
        if self._last_step is None:
            self._drop_torn_line()
            rows = self.read()
            self._last_step = rows[-1]["step"] if rows else step - 1
        if step <= self._last_step:
            raise ValueError(
                f"{self.path.name}: step {step} after step {self._last_step}; truncate before writing again"
            )
        line = (encode(row) + "\n").encode()
        with disk_errors(self.path), open_own(self.path) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except OSError:
                if self.path.is_file():
                    file.truncate(end)
                raise
        self._last_step = step

    def read(self) -> list[Row]:
        """All rows. A last line that a kill cut short is left out; damage anywhere else is a ``MantissaError``, and so
        are values that no row has (``decode``) and steps that do not rise."""
        if not self.path.exists():
            return []
        if not regular_file(self.path):
            raise MantissaError(f"{self.path}: expected a file, found a folder; move it away")
        require_size(self.path, _LARGEST)
        rows: list[Row] = []
        with opened(self.path) as file:
            for place, line in enumerate(file, start=1):
                if line.endswith(b"\n"):  # else it was never finished
                    rows.append(self._row(line[:-1], place, rows[-1]["step"] if rows else -1))
        return rows

    def _row(self, line: bytes, place: int, last: int) -> Row:
        """The row of a line; ``last``: the step of the row before."""
        try:
            row = decode(line)
        except UnusualValueError as error:
            raise MantissaError(f"{self.path}, line {place}: {error}; delete the line, or restore the file") from None
        except ValueError:
            raise MantissaError(
                f"{self.path}, line {place}: expected a row of JSON with a step, got {line[:60]!r}; "
                "delete the line, or restore the file"
            ) from None
        if row["step"] <= last:
            raise MantissaError(
                f"{self.path}, line {place}: expected a step after {last}, got {row['step']}; delete the line, or "
                "restore the file"
            )
        return row

    def truncate(self, step: int) -> None:
        """Keep the rows up to and including ``step``, atomically."""
        rows = [row for row in self.read() if row["step"] <= step]
        write_atomically(self.path, "".join(encode(row) + "\n" for row in rows))
        self._last_step = None

    def _drop_torn_line(self) -> None:
        """Cut what follows the last newline, or the next row would be glued to it."""
        if not self.path.is_file():
            return
        with disk_errors(self.path), open_own(self.path) as file:
            file.seek(0)
            data = file.read()
            file.truncate(data.rfind(b"\n") + 1)


def encode(row: Mapping[str, Any]) -> str:
    """One row as one line of strict JSON. Raises TypeError for values that are not numbers, strings, bools or None."""
    for key, value in row.items():
        if not isinstance(value, bool | int | float | str | None) or (isinstance(value, str) and value in _NON_FINITE):
            raise TypeError(f"{key}: expected a plain number or string, got {type(value).__name__}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise TypeError(f"{key}: expected a plain number of at most 64 bits, got {describe_value(value)}")
    return json.dumps(in_words(row), allow_nan=False)


def decode(line: bytes) -> Row:
    """The row that ``encode`` wrote. Raises ValueError for anything else, ``UnusualValueError`` where it is a row.

    This is where values are judged, once for whoever reads rows: a name with a slash is a metric, and so a number (or
    None); whole numbers fit into 64 bits, text is whole, and nothing is a list or an object.
    """
    row = parse_json(line, ROW)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError("not a row with a step")
    if not number(row["step"], 0, LARGEST_SIZE, whole=True):
        raise UnusualValueError("step", row["step"], f"a whole number from 0 to {LARGEST_SIZE:,}")
    for key, value in row.items():
        kind = type(value)
        if kind is float or value is None or kind is bool:
            continue
        if kind is int:
            if not -(2**63) <= value < 2**63:
                raise UnusualValueError(key, value, "a number of at most 64 bits")
        elif kind is not str or ("/" in key and key not in _LABELS and value not in _NON_FINITE):
            raise UnusualValueError(key, value, "a number")
        elif value in _NON_FINITE:
            row[key] = _NON_FINITE[value]
        elif not whole_text(value):
            raise UnusualValueError(key, value, "whole text")
    return row


class UnusualValueError(ValueError):
    """A row with a value that it cannot have."""

    def __init__(self, name: str, value: Any, expected: str) -> None:
        super().__init__(f"{ascii(name)[1:-1]}: expected {expected}, got {describe_value(value)}")


def in_words(value: Any) -> Any:
    """``value`` with the words for numbers that are not finite, in dicts and lists too."""
    if isinstance(value, Mapping):
        return {key: in_words(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [in_words(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def from_words(value: Any) -> Any:
    """What ``in_words`` was given."""
    if isinstance(value, dict):
        return {key: from_words(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_words(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
