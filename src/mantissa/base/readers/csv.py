"""Tables of text with a header: bounded in bytes, columns, rows and cells; a cell is text and never a formula."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from mantissa.base.bounds import Limits, boundary, require_size
from mantissa.base.errors import MantissaError

_LIMITS = Limits(1 << 30, 1, 20_000_000)
_MOST_COLUMNS = 20_000
_LONGEST_CELL = 1 << 20  # characters


def read_csv(path: Path) -> Iterator[dict[str, str]]:
    """Each row by the header's names; cells beyond the header, and empty ones, are left out.

    ``MantissaError`` for what is no such table: a name that stands twice, a null byte, more than the limits.
    """
    with boundary(f"{path}: not a table (csv)", "export it again, with a header and one row a step"):
        require_size(path, _LIMITS.bytes)
        csv.field_size_limit(_LONGEST_CELL)
        with path.open("rb") as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as text:
            rows = csv.reader(text, strict=True)
            names = next(rows, [])
            if not any(names):
                raise MantissaError(f"{path} is empty; expected a header and rows")
            if len(names) > _MOST_COLUMNS:
                raise MantissaError(f"{path}: {len(names):,} columns; expected at most {_MOST_COLUMNS:,}; export fewer")
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise MantissaError(f"{path}: the header has {twice[:80]!r} twice; rename one")
            cells = 0
            for number, row in enumerate(rows, start=1):
                cells += len(row)
                if any("\0" in cell for cell in row):
                    raise ValueError(f"a null byte in row {number}")
                if number > _LIMITS.rows or cells > _LIMITS.values:
                    raise MantissaError(
                        f"{path}: more than {_LIMITS.rows:,} rows or {_LIMITS.values:,} cells; give some"
                    )
                yield {name: cell for name, cell in zip(names, row, strict=False) if cell}
