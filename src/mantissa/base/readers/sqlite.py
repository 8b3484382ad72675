"""The one place that opens SQLite files: a schema that is data alone, values of bounded size, statements that end.

A database is a program too: a view, a trigger, a virtual table or a column that is computed runs in whichever statement
names it, and may never end. So a file that has one is refused, functions in its schema may do nothing, and a statement
has a budget of processor time, and of the bytes of its rows: a default of a column is in all of them and in the file
once.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

from mantissa.base.bounds import boundary
from mantissa.base.errors import MantissaError
from mantissa.base.readers.limits import Limits, require_size

LIMITS = Limits(256 << 20, 100, 20_000_000, seconds=60.0)  # bytes of a value or row, and of a file that is read whole
_MOST_BYTES = 1 << 30  # of the rows that one statement gives
_STEPS = 10_000  # of SQLite's machine between two looks at the clock: a fraction of a millisecond
_FOREIGN = (
    "SELECT count(*) FROM sqlite_master AS each WHERE type NOT IN ('table', 'index') OR (type = 'table' AND "
    "(rootpage = 0 OR EXISTS (SELECT 1 FROM pragma_table_xinfo(each.name) WHERE hidden <> 0)))"
)


class Connection(sqlite3.Connection):
    """A connection on which every statement has ``LIMITS.seconds`` of its thread's processor time."""

    ends: float = float("inf")
    left: float = _MOST_BYTES

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        self.begin()
        return super().execute(*arguments)

    def executemany(self, *arguments: Any) -> sqlite3.Cursor:
        self.begin()
        return super().executemany(*arguments)

    def begin(self) -> None:
        """The next statement's budget begins. Seconds of the processor: waiting for a lock or a disk costs nothing."""
        self.ends, self.left = time.thread_time() + LIMITS.seconds, _MOST_BYTES

    def counted(self, _: sqlite3.Cursor, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """A row, once its bytes are taken from the statement's; ``sqlite3.DataError`` where they are more."""
        self.left -= sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in row)
        if self.left < 0:
            raise sqlite3.DataError(f"a statement gives more than {_MOST_BYTES:,} bytes")
        return row

    def late(self) -> bool:
        return time.thread_time() > self.ends


def connect(path: Path | str, wait_s: float = 30.0) -> Connection:
    """Open a database, which may be new, for several threads of which one at a time uses it; transactions by hand.

    ``wait_s``: how long a writer waits for another one. Raises ``sqlite3.Error`` as SQLite does, and ``MantissaError``
    for one that holds views, triggers, virtual tables or computed columns.
    """
    connection = sqlite3.connect(
        path, timeout=wait_s, isolation_level=None, check_same_thread=False, factory=Connection
    )
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LIMITS.bytes)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_progress_handler(connection.late, _STEPS)
        connection.row_factory = connection.counted
        connection.execute("PRAGMA trusted_schema=OFF")
        connection.execute("PRAGMA cell_size_check=ON")
        (foreign,) = connection.execute(_FOREIGN).fetchone()
        if foreign:
            raise MantissaError(f"database {path} holds views, triggers, virtual tables or computed columns; "
                                "name one of this program")  # fmt: skip
    except BaseException:
        connection.close()
        raise
    return connection


def read_tables(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of every table of a file, by name; ``MantissaError`` for one that is damaged or runs too long."""
    with boundary(f"database {path}", "restore it, or name another file"):
        require_size(path, LIMITS.bytes)
        connection = connect(path)
        try:
            names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            quoted = {name: '"' + name.replace('"', '""') + '"' for name in names}
            return {name: connection.execute(f"SELECT * FROM {quoted[name]}").fetchall() for name in names}
        finally:
            connection.close()
