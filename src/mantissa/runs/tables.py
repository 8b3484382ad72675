"""A table on the terminal: the header and rows that ``page.table`` shows on a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def terminal(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table without lines, for a console that takes text as it is (``markup=False``). Nothing is cut: what is too
    long for its column goes on in the next line."""
    from rich.table import Table

    table = Table(*header, box=None, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*row)
    return table
