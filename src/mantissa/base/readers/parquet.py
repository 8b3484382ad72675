"""The one reader of parquet: rows in small batches, bounded by what they are unpacked and not by what lies on disk.

A few bytes can stand for a million rows (run lengths, dictionaries), so the metadata is looked at before anything is
unpacked, and what comes is counted since the metadata may lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mantissa.base.bounds import boundary
from mantissa.base.errors import MantissaError
from mantissa.base.readers.limits import Limits, require_size
from mantissa.base.readers.parquet_footer import values_in

LIMITS = Limits(4 << 30, 100, 400_000_000, rows=10_000_000)  # bytes: of the file, and of what is unpacked
_BATCH_ROWS = 256


class Table:
    """An open file. ``schema``: pyarrow's. ``columns``: their names, in order."""

    def __init__(self, file: Any, path: Path, values: int, limits: Limits) -> None:
        self._file, self._path, self._limits = file, path, limits
        self.schema = file.schema_arrow
        self.columns: list[str] = self.schema.names
        about = file.metadata
        if about.num_rows > limits.rows or values > limits.values:
            raise MantissaError(
                f"{path}: {about.num_rows:,} rows of {values:,} values; expected at most {limits.rows:,} and "
                f"{limits.values:,}; give some of them"
            )

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """The rows in order, of these columns alone."""
        left = self._limits.bytes
        chosen = None if columns is None else list(columns)
        for batch in self._file.iter_batches(batch_size=_BATCH_ROWS, columns=chosen, use_threads=False):
            left -= batch.nbytes
            if left < 0:
                raise MantissaError(f"{self._path}: more than {self._limits.bytes:,} bytes when unpacked; give a part")
            yield from batch.to_pylist()


@contextmanager
def open_parquet(path: Path, where: str, limits: Limits = LIMITS) -> Iterator[Table]:
    """A file of rows. ``MantissaError``, which ``where`` begins, for one that is damaged or beyond the limits."""
    import pyarrow.parquet

    with boundary(where, "write the file again"):
        require_size(path, limits.bytes)
        values = values_in(path)
        with pyarrow.parquet.ParquetFile(path) as file:
            yield Table(file, path, values, limits)


def read_rows(path: Path, limits: Limits = LIMITS) -> Iterator[dict[str, Any]]:
    """All rows of a file; ``MantissaError`` for one that is damaged or beyond the limits."""
    with open_parquet(path, f"{path}: not a whole parquet file", limits) as table:
        yield from table.rows()
