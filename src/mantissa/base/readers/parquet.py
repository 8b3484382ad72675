"""The one reader of parquet: rows in small batches, bounded by what they are unpacked and not by what lies on disk.

A few bytes can stand for a million rows (run lengths, dictionaries), so the metadata is looked at before anything is
unpacked, and what comes is counted since the metadata may lie. pyarrow is called in a process of its own, whose address
space is bounded and which it may end, as it does where a column's chunk lacks its metadata (``child.py``);
here come rows, as JSON.

What we write for ourselves is sealed: a digest of the whole file, its own place filled with zeros, is an entry of
its footer. Parquet's checksums are of pages alone, and a flipped bit in what says how pages are read gives other values
just as quietly.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mantissa.base.bounds import Budget, Limits, boundary, budget, require_size
from mantissa.base.errors import MantissaError
from mantissa.base.readers import child
from mantissa.base.readers.child import Child

LIMITS = Limits(4 << 30, 100, 400_000_000, rows=10_000_000)
_BATCH_ROWS, _BATCH_BYTES = 256, 32 << 20
_LARGEST = 64 << 20  # bytes of a footer
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


class Table:
    """An open file, in the process that reads it. ``columns``: their names, in order; ``kinds``: of each its type's."""

    def __init__(self, file: Any, path: Path, limits: Limits) -> None:
        self._file, self._path = file, path
        self.schema = file.schema_arrow
        self.columns, self.kinds = [*self.schema.names], [type_name(each.type) for each in self.schema]
        about = file.metadata
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        values = sum(each.column(number).num_values for each in groups for number in range(each.num_columns))
        packed = sum(each.total_byte_size for each in groups)
        self._batch = max(1, min(_BATCH_ROWS, about.num_rows * _BATCH_BYTES // max(1, packed)))
        if about.num_rows > limits.rows or values > limits.values:
            raise MantissaError(
                f"{path}: {about.num_rows:,} rows of {values:,} values; expected at most {limits.rows:,} and "
                f"{limits.values:,}; give some of them"
            )

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[list[dict[str, Any]]]:
        """The rows in order, some at a time, of these columns alone."""
        chosen, spent, left = None if columns is None else list(columns), budget(), self._file.metadata.num_rows
        for batch in self._file.iter_batches(batch_size=self._batch, columns=chosen, use_threads=False):
            if (schema := _written_out(batch.schema)) != batch.schema:
                batch = batch.cast(schema)
            spent.draw("made", batch.nbytes, self._path)
            left -= batch.num_rows
            yield batch.to_pylist()
        if left:
            raise ValueError(f"{abs(left):,} rows {'fewer' if left > 0 else 'more'} than it says that it has")

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """The rows in order, of these columns alone."""
        for batch in self.batches(columns):
            yield from batch


class _Apart:
    """The same of a file that ``child`` reads."""

    def __init__(self, child: Child, path: Path, where: str, limits: Limits, spent: Budget) -> None:
        self._child, self._path, self._where, self._limits, self._spent = child, path, where, limits, spent
        (about,) = [*self._parts(None)] or [None]
        if not isinstance(about, list) or not all(map(_named, about)):
            raise child.garbage("no columns")
        self.columns, self.kinds = [str(name) for name, _ in about], [str(kind) for _, kind in about]

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        count, chosen = 0, self.columns if columns is None else list(columns)
        names = set(chosen)
        for part in self._parts(chosen):
            rows, odd = part if isinstance(part, list) and len(part) == 2 else (None, False)
            rows = _restored(rows) if odd else rows
            if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() == names for row in rows):
                raise self._child.garbage("other rows than its columns'")
            count += len(rows)
            if count > self._limits.rows:
                raise self._child.garbage("more rows than it may have")
            yield from rows

    def _parts(self, columns: list[str] | None) -> Iterator[Any]:
        self._child.ask(f"{__name__}:answer", self._where, str(self._path), self._where, self._limits, columns)
        return self._child.parts(self._spent)


def answer(path: str, where: str, limits: Sequence[int], columns: list[str] | None) -> Iterator[Any]:
    """In the process that reads: the columns of a file, or where some are named its rows, as JSON can hold them, and
    with each list of them whether values in it stand for others (``_restored``)."""
    file, allowed = Path(path), Limits(*limits)
    require_size(file, allowed.bytes)
    with boundary(where, "write the file again"), _opened(file, allowed) as table:
        if columns is None:
            yield [*zip(table.columns, table.kinds, strict=True)]
            return
        odd = not all(_is_json(each.type) for each in table.schema if each.name in columns)
        for rows in table.batches(columns):
            yield [[_sent(row) for row in rows] if odd else rows, odd]


def _named(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(each, str) for each in pair)


# What JSON has no value for, by how its type is written, and how it is read.
_ODD: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda value: f"{value.days} {value.seconds} {value.microseconds}",
        lambda text: datetime.timedelta(*map(int, text.split())),
    ),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
}
_KIND = "\0kind"  # the one key of an object that is no object of the file's
_PLAIN = {str, int, float, bool, type(None)}
_AS_THEY_ARE = {"string", "large_string", "string_view", "bool", "null", "float", "double"}


def _is_json(kind: Any) -> bool:
    """Whether JSON has all values of a type of pyarrow's."""
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_json(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_is_json(field.type) and field.name != _KIND for field in kind)
    return str(kind) in _AS_THEY_ARE or pa.types.is_integer(kind)


def _sent(value: Any) -> Any:
    """A value as JSON can hold it; of a type that is not known its text."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        return {_KIND: ["dict", {name: _sent(each) for name, each in value.items()}]}
    if isinstance(value, tuple):  # of a map
        return {_KIND: ["tuple", [_sent(each) for each in value]]}
    if isinstance(value, list):
        return [_sent(each) for each in value]
    for name, (kind, write, _) in _ODD.items():
        if isinstance(value, kind):
            return {_KIND: [name, write(value)]}
    return value.item() if hasattr(value, "item") else str(value)  # numpy's halves


def _restored(value: Any) -> Any:
    """What ``_sent`` was given. ``ValueError`` where it was given nothing."""
    if isinstance(value, list):
        return [_restored(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind, held = value[_KIND]
    if kind == "dict":
        return {name: _restored(each) for name, each in held.items()}
    return tuple(map(_restored, held)) if kind == "tuple" else _ODD[kind][2](held)


def type_name(kind: Any) -> str:
    """pyarrow's name of a type; of a list without the name that its elements have."""
    value = getattr(kind, "value_type", None) if str(kind).startswith(("list<", "large_list<")) else None
    return str(kind) if value is None else f"{str(kind).partition('<')[0]}<{type_name(value)}>"


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
def open_parquet(path: Path, where: str, limits: Limits = LIMITS) -> Iterator[Table | _Apart]:
    """A file of rows, read in a process of its own (``child.py``), or where this is one here.

    ``MantissaError``, which ``where`` begins, for one that is damaged or beyond the limits.
    """
    with boundary(where, "write the file again"):
        spent = budget()
        require_size(path, limits.bytes, spent)
        if child.inside:
            with _opened(path, limits) as table:
                yield table
        else:
            with child.lent("pyarrow.parquet", __name__, source=str(path)) as reader:
                yield _Apart(reader, path, where, limits, spent)


@contextmanager
def _opened(path: Path, limits: Limits) -> Iterator[Table]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        if (seal := (file.metadata.metadata or {}).get(_SEAL)) is not None:
            _require_seal(path, seal)
        yield Table(file, path, limits)


def read_rows(path: Path, limits: Limits = LIMITS) -> Iterator[dict[str, Any]]:
    """All rows of a file; ``MantissaError`` for one that is damaged or beyond the limits."""
    with open_parquet(path, f"{path}: not a whole parquet file", limits) as table:
        yield from table.rows()
