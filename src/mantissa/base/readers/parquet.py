"""The one reader of parquet: rows in small batches, bounded by what they are unpacked and not by what lies on disk.

A few bytes can stand for a million rows (run lengths, dictionaries), so the metadata is looked at before anything is
unpacked, and what comes is counted since the metadata may lie: each batch as it is made (``memory``), and all of it
drawn from the command's budget. pyarrow ends the whole process where a column's chunk
lacks its metadata (an exception of C++ that nothing catches), so the one number that must be known before it is called
is looked up without it: ``num_values`` of each chunk, in the footer's Thrift compact protocol (Apache Parquet's
``parquet.thrift``: FileMetaData 4, RowGroup 1, ColumnChunk 3, ColumnMetaData 5).

What we write for ourselves is sealed: a digest of the whole file, its own place filled with zeros, is an entry of
its footer. Parquet's checksums are of pages alone, and a flipped bit in what says how pages are read gives other values
just as quietly.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mantissa.base.bounds import Budget, Limits, boundary, budget, memory, require_size
from mantissa.base.errors import MantissaError

LIMITS = Limits(4 << 30, 100, 400_000_000, rows=10_000_000)
_BATCH_ROWS, _BATCH_BYTES = 256, 32 << 20
_STRUCT, _LIST, _SET, _MAP, _BINARY, _DOUBLE, _BYTE = 12, 9, 10, 11, 8, 7, 3
_LARGEST = 64 << 20  # bytes of a footer
_DEPTH = 32
_SEAL, _UNSEALED = b"mantissa.sha256", b"0" * 64


def write_sealed(table: Any, path: Path) -> None:
    """Write a pyarrow table so that a reader of ours sees any change of the file."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetWriter(path, table.schema, compression="zstd") as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_SEAL.decode(): _UNSEALED.decode()})
    place = _place_of(path, _UNSEALED)
    digest = _digest(path, place)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(digest)


def _place_of(path: Path, text: bytes) -> int:
    """Where the seal ``text`` lies: behind its name, in the footer. ``ValueError`` where it does not."""
    with path.open("rb") as file:
        size = file.seek(-8, 2) + 8
        start = max(0, size - 8 - int.from_bytes(file.read(4), "little"))
        file.seek(start)
        end = file.read(_LARGEST)
    name = end.rfind(_SEAL)
    found = end.find(text, name + len(_SEAL)) if name >= 0 else -1
    if found < 0:
        raise ValueError("its seal is not where it is written")
    return start + found


def _digest(path: Path, place: int) -> bytes:
    """SHA-256, hexadecimal, of a file with zeros where its seal is."""
    found = hashlib.sha256()
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        memoryview(data) as view,
        view[:place] as before,
        view[place + len(_UNSEALED) :] as after,
    ):
        for part in (before, _UNSEALED, after):
            found.update(part)
    return found.hexdigest().encode()


def _require_seal(path: Path, seal: bytes) -> None:
    if _digest(path, _place_of(path, seal)) != seal:
        raise ValueError("it has changed since it was written: its digest is another")


def values_in(path: Path) -> int:
    """The sum of ``num_values`` over all chunks. ``ValueError`` where the footer is none, or lacks one of them."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 8))
        end = file.read(8)
        length = int.from_bytes(end[:4], "little")
        if end[4:] != b"PAR1" or not 0 < length <= min(size - 12, _LARGEST):
            raise ValueError("no parquet file: its end is missing")
        file.seek(size - 8 - length)
        footer = _Compact(file.read(length)).struct()
    total = 0
    for group in footer.get(4, ()):
        for chunk in group[1]:
            count = chunk[3][5]
            if not isinstance(count, int) or count < 0:
                raise ValueError(f"a column with {count} values")
            total += count
    return total


class _Compact:
    """Thrift's compact protocol: structs as dictionaries by field number, bounded by the bytes that there are."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        if depth > _DEPTH:
            raise ValueError("nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while kind := self._byte():
            step, kind = kind >> 4, kind & 15
            number = number + step if step else self._whole()
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_LIST, _SET):
            head = self._byte()
            count, inner = head >> 4, head & 15
            return self._many(self._varint() if count == 15 else count, (inner,), depth)
        if kind == _MAP:
            count = self._varint()
            kinds = self._byte() if count else 0
            return self._many(count, (kinds >> 4, kinds & 15), depth)
        if kind in (_BINARY, _DOUBLE):
            return self._skip(8 if kind == _DOUBLE else self._varint())
        return self._byte() if kind in (1, 2, _BYTE) else self._whole()

    def _many(self, count: int, kinds: tuple[int, ...], depth: int) -> list[Any]:
        if depth > _DEPTH or count > len(self._data) - self._at:  # each takes a byte at least
            raise ValueError("more elements than bytes")
        return [self._value(kind, depth + 1) for _ in range(count) for kind in kinds]

    def _byte(self) -> int:
        self._skip(1)
        return self._data[self._at - 1]

    def _skip(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise ValueError("the footer ends too early")

    def _varint(self) -> int:
        number = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise ValueError("a number of more than ten bytes")

    def _whole(self) -> int:
        number = self._varint()
        return (number >> 1) ^ -(number & 1)


class Table:
    """An open file. ``schema``: pyarrow's. ``columns``: their names, in order."""

    def __init__(self, file: Any, path: Path, values: int, limits: Limits, spent: Budget) -> None:
        self._file, self._path, self._spent = file, path, spent
        self.schema = file.schema_arrow
        self.columns: list[str] = self.schema.names
        about = file.metadata
        packed = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
        self._batch = max(1, min(_BATCH_ROWS, about.num_rows * _BATCH_BYTES // max(1, packed)))
        if about.num_rows > limits.rows or values > limits.values:
            raise MantissaError(
                f"{path}: {about.num_rows:,} rows of {values:,} values; expected at most {limits.rows:,} and "
                f"{limits.values:,}; give some of them"
            )

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """The rows in order, of these columns alone."""
        chosen = None if columns is None else list(columns)
        batches = self._file.iter_batches(batch_size=self._batch, columns=chosen, use_threads=False)
        while True:
            with memory():
                if (batch := next(batches, None)) is None:
                    return
                if (schema := _written_out(batch.schema)) != batch.schema:
                    batch = batch.cast(schema)
                self._spent.draw("made", batch.nbytes, self._path)
                rows = batch.to_pylist()
            yield from rows


def _written_out(schema: Any) -> Any:
    """The schema with each value by itself, where one stands for many: dictionaries, and views of shared texts."""
    import pyarrow as pa

    def plain(kind: Any) -> Any:
        if pa.types.is_dictionary(kind):
            return plain(kind.value_type)
        if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
            return pa.large_string() if pa.types.is_string_view(kind) else pa.large_binary()
        if pa.types.is_struct(kind):
            return pa.struct([each.with_type(plain(each.type)) for each in kind])
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            inner = kind.value_field.with_type(plain(kind.value_type))
            return pa.list_(inner) if pa.types.is_list(kind) else pa.large_list(inner)
        return kind

    return pa.schema([each.with_type(plain(each.type)) for each in schema], schema.metadata)


@contextmanager
def open_parquet(path: Path, where: str, limits: Limits = LIMITS) -> Iterator[Table]:
    """A file of rows. ``MantissaError``, which ``where`` begins, for one that is damaged or beyond the limits."""
    import pyarrow.parquet

    with boundary(where, "write the file again"):
        spent = budget()
        require_size(path, limits.bytes, spent)
        values = values_in(path)
        with pyarrow.parquet.ParquetFile(path) as file:
            if (seal := (file.metadata.metadata or {}).get(_SEAL)) is not None:
                _require_seal(path, seal)
            yield Table(file, path, values, limits, spent)


def read_rows(path: Path, limits: Limits = LIMITS) -> Iterator[dict[str, Any]]:
    """All rows of a file; ``MantissaError`` for one that is damaged or beyond the limits."""
    with open_parquet(path, f"{path}: not a whole parquet file", limits) as table:
        yield from table.rows()
