"""Rows of measurements, one JSON object a line: written, read back and held to what writes them, and what ran them.

A number that is not finite is a string in the file, and a float here. A row counts by what ran: its ``source``, a hash
of the package's files; a difference of two rows is of one code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mantissa.base.bounds import number, require_plain
from mantissa.base.errors import MantissaError
from mantissa.base.files import disk_errors, from_words, in_words, write_atomically
from mantissa.base.readers.json import read_rows

Row = dict[str, Any]
Good = Callable[[Any], bool]


def lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows as they stand in a file."""
    return "".join(json.dumps(in_words(row), allow_nan=False) + "\n" for row in rows)


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """All rows of a file, whose folder is made; it is then the old one or the new one."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lines(rows))


def read(path: Path) -> list[Any]:
    """The rows of a file, whatever they are."""
    return [from_words(row) for row in read_rows(path)]


def require_like(row: Any, expected: Mapping[str, Good], where: str, writer: str) -> None:
    """``MantissaError`` unless a row is plain and every field as ``expected``, which is what ``writer`` writes."""
    require_plain(row, where)
    wrong = "the row"
    if isinstance(row, dict):
        wrong = next((name for name, good in expected.items() if not good(row.get(name))), "")
    if wrong:
        raise MantissaError(f"{where}: {wrong} is not what {writer}")


def is_text(value: Any) -> bool:
    """A string."""
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    """A whole number from 0 that 63 bits hold."""
    return number(value, 0, 2**63, whole=True)


def is_duration(value: Any) -> bool:
    """A finite number from 0."""
    return number(value, 0)


def is_figure(value: Any) -> bool:
    """Any number; one that is not finite as a float, which ``read`` makes of its word."""
    return number(value, -math.inf, math.inf) or (isinstance(value, float) and not math.isfinite(value))


def maybe(good: Good) -> Good:
    """Where a field may be missing, or None."""
    return lambda value: value is None or good(value)


def every(good: Good) -> Good:
    """A list of such values."""
    return lambda value: isinstance(value, list) and all(map(good, value))


def commit_of(row: Row) -> str | None:
    """The commit of a row without the mark of uncommitted edits, which older rows have behind it."""
    commit = row.get("commit")
    return re.split("[-+]", commit)[0] if commit else None


def codes_of(pair: Sequence[Row], older: Mapping[str, str] | None = None) -> list[str | None]:
    """What ran two rows; of ``older`` ones, from before rows had a source, what is known of their commits."""
    return [row.get("source") or (older or {}).get(commit_of(row) or "") for row in pair]
