"""The one place that opens SQLite files: a schema that is data alone, values of bounded size, statements that end.

A database is a program too: a view, a trigger, a virtual table or a column that is computed runs in whichever statement
names it, and may never end. So a file that has one is refused, and functions in its schema may do nothing. A statement
draws processor time and the bytes of its rows from a budget: a default of a column is in all of them and in the file
once. That is the command's where a file is read whole, and the statement's own in a database that a command works in
for days.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

from mantissa.base.bounds import Budget, Limits, boundary, budget, require_size
from mantissa.base.errors import MantissaError, on_failure

LIMITS = Limits(256 << 20, 100, 20_000_000)  # bytes of a value or row, and of a file that is read whole
_HEAP = 1 << 30  # bytes that SQLite may take in this process
_STATEMENT_S, _STATEMENT_BYTES = 60.0, 1 << 30  # of one in a database that a command works in
_STEPS = 10_000  # of SQLite's machine between two looks at the clock: a fraction of a millisecond
_FOREIGN = (
    "SELECT count(*) FROM sqlite_master AS each WHERE type NOT IN ('table', 'index') OR (type = 'table' AND "
    "(rootpage = 0 OR EXISTS (SELECT 1 FROM pragma_table_xinfo(each.name) WHERE hidden <> 0)))"
)


class Connection(sqlite3.Connection):
    """A connection on which every statement draws from ``spent``; None: from a budget of its own."""

    spent: Budget | None = None
    own = Budget()
    seen = float("inf")  # processor time of the thread at which the clock was last looked at

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        self.begin()
        return super().execute(*arguments)

    def executemany(self, *arguments: Any) -> sqlite3.Cursor:
        self.begin()
        return super().executemany(*arguments)

    def begin(self) -> None:
        """The next statement. Seconds are the processor's: waiting for a lock or a disk costs nothing."""
        self.own = self.spent or Budget(made=_STATEMENT_BYTES, seconds=_STATEMENT_S)
        self.seen = time.thread_time()

    def counted(self, _: sqlite3.Cursor, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """A row, once its bytes are drawn."""
        self.own.draw("made", sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in row), "a statement")
        return row

    def late(self) -> bool:
        """Whether the statement is to end, which SQLite then says."""
        now = time.thread_time()
        try:
            self.own.draw("seconds", max(0.0, now - self.seen), "a statement")
        except MantissaError:
            return True
        self.seen = now
        return False


def connect(path: Path | str, wait_s: float = 30.0, spent: Budget | None = None) -> Connection:
    """Open a database, which may be new, for several threads of which one at a time uses it; transactions by hand.

    ``wait_s``: how long a writer waits for another one; ``spent``: what its statements draw from. Raises
    ``sqlite3.Error`` as SQLite does, and ``MantissaError`` for one that holds views, triggers, virtual tables or
    computed columns.
    """
    connection = sqlite3.connect(
        path, timeout=wait_s, isolation_level=None, check_same_thread=False, factory=Connection
    )
    connection.spent = spent
    with on_failure(connection.close):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LIMITS.bytes)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_progress_handler(connection.late, _STEPS)
        connection.row_factory = connection.counted
        connection.execute(f"PRAGMA hard_heap_limit={_HEAP}")
        connection.execute("PRAGMA trusted_schema=OFF")
        connection.execute("PRAGMA cell_size_check=ON")
        (foreign,) = connection.execute(_FOREIGN).fetchone()
        if foreign:
            raise MantissaError(f"database {path} holds views, triggers, virtual tables or computed columns; "
                                "name one of this program")  # fmt: skip
    return connection


def read_tables(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of every table of a file, by name; ``MantissaError`` for one that is damaged or runs too long."""
    with boundary(f"database {path}", "restore it, or name another file"):
        spent = budget()
        require_size(path, LIMITS.bytes, spent)
        connection = connect(path, spent=spent)
        try:
            names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            quoted = {name: '"' + name.replace('"', '""') + '"' for name in names}
            return {name: connection.execute(f"SELECT * FROM {quoted[name]}").fetchall() for name in names}
        finally:
            connection.close()
