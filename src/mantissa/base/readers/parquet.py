"""The one reader of parquet: rows in small batches, bounded by what they are unpacked and not by what lies on disk.

A few bytes can stand for a million rows (run lengths, dictionaries), so the metadata is looked at before anything is
unpacked, and what comes is counted since the metadata may lie. pyarrow is called in a process of its own, whose address
space is bounded and which it may end, as it does where a column's chunk lacks its metadata (``child.py``);
here come columns, their numbers, texts and lengths as they lie in memory, and are counted before they are values.

What we write for ourselves is sealed: a digest of the whole file, its own place filled with zeros, is an entry of
its footer. Parquet's checksums are of pages alone, and a flipped bit in what says how pages are read gives other values
just as quietly.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import mmap
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from mantissa.base.bounds import Budget, Limits, boundary, budget, number, require_size
from mantissa.base.errors import MantissaError
from mantissa.base.readers import child
from mantissa.base.readers.child import Child

LIMITS = Limits(4 << 30, 100, 400_000_000, rows=10_000_000)
_BATCH_ROWS, _BATCH_BYTES = 512, 32 << 20
_MOST_SENT, _MOST_MADE = 256 << 20, 40_000_000  # bytes, and values, of the rows that are handed on at a time
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

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """The rows in order, some at a time, of these columns alone."""
        chosen, spent, left = None if columns is None else list(columns), budget(), self._file.metadata.num_rows
        schema = None
        for batch in self._file.iter_batches(batch_size=self._batch, columns=chosen, use_threads=False):
            schema = schema or _written_out(batch.schema)
            if schema != batch.schema:
                batch = batch.cast(schema)
            spent.draw("made", batch.nbytes, self._path)
            left -= batch.num_rows
            yield batch
        if left:
            raise ValueError(f"{abs(left):,} rows {'fewer' if left > 0 else 'more'} than it says that it has")

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """The rows in order, of these columns alone."""
        for batch in self.batches(columns):
            yield from batch.to_pylist()


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
        parts = self._parts(chosen)
        for about, data in zip(parts, parts, strict=True):
            if not isinstance(data, bytearray) or not isinstance(about, list) or len(about) != 3:
                raise self._child.garbage("no columns")
            rows, names, kinds = about
            if not number(rows, 1, _MOST_MADE) or set(names) != set(chosen):
                raise self._child.garbage("other rows than its columns'")
            count += rows
            if count > self._limits.rows:
                raise self._child.garbage("more rows than it may have")
            yield from _unpacked(rows, names, kinds, data)

    def _parts(self, columns: list[str] | None) -> Iterator[Any]:
        self._child.ask(f"{__name__}:answer", self._where, str(self._path), self._where, self._limits, columns)
        return self._child.parts(self._spent)


def answer(path: str, where: str, limits: Sequence[int], columns: list[str] | None) -> Iterator[Any]:
    """In the process that reads: the columns of a file, or where some are named its rows, some at a time: what
    ``_packed`` says of them, and their bytes."""
    file, allowed = Path(path), Limits(*limits)
    require_size(file, allowed.bytes)
    with boundary(where, "write the file again"), _opened(file, allowed) as table:
        if columns is None:
            yield [*zip(table.columns, table.kinds, strict=True)]
            return
        for batch in table.batches(columns):
            *about, data = _packed(batch)
            yield about
            yield data


def _named(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(each, str) for each in pair)


# columns: their buffers on one side, values on the other

# pyarrow's name of a number, and Python's of how it lies in memory
_NUMBERS = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B", "uint16": "H", "uint32": "I",
            "uint64": "Q", "float": "f", "double": "d"}  # fmt: skip
_TEXTS = {"string": 4, "large_string": 8, "binary": 4, "large_binary": 8}  # and bytes of where one begins


def _packed(batch: Any) -> tuple[int, list[str], list[Any], bytes]:
    """Rows as JSON and bytes: how many, the columns' names, of each how it lies in the bytes, and those."""
    parts: list[Any] = []
    kinds = [_pack(column, parts) for column in batch.columns]
    return batch.num_rows, batch.schema.names, kinds, b"".join(parts)


def _pack(array: Any, parts: list[Any]) -> list[Any]:
    """Put a column's bytes to the parts; what ``_Unpacking.values`` needs to know of it: its kind, whether some of
    its values are missing (a byte for each, 1 where it is there), and what the kind asks for."""
    import numpy as np
    import pyarrow as pa

    kind, name, count, at = array.type, str(array.type), len(array), array.offset
    plain = name in _NUMBERS or name in _TEXTS or name in ("bool", "null")
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    fields = [each.name for each in kind] if pa.types.is_struct(kind) else []
    if not (plain or listed or (fields and len(set(fields)) == len(fields))):
        return ["odd", False, [_sent(value) for value in array.to_pylist()]]
    missing = array.null_count > 0
    if missing:
        parts.append(bytes(count) if name == "null" else _bits(array.buffers()[0], at, count))
    if name == "null":
        return [name, missing]
    if name in _NUMBERS:
        size = kind.bit_width // 8
        parts.append(array.buffers()[1].slice(at * size, count * size) if count else b"")
        return [_NUMBERS[name], missing]
    if name == "bool":
        parts.append(_bits(array.buffers()[1], at, count))
        return [name, missing]
    if fields:
        return ["object", missing, fields, [_pack(array.field(number), parts) for number in range(len(fields))]]
    if listed:
        ends = array.offsets.to_numpy()
        first, size = (int(ends[0]), int(ends[-1] - ends[0])) if count else (0, 0)
        parts.append(np.diff(ends).astype(np.uint64).data if count else b"")
        return ["list", missing, size, _pack(array.values.slice(first, size), parts)]
    _, where, data = array.buffers()
    ends = np.frombuffer(where, f"<i{_TEXTS[name]}")[at : at + count + 1] if count else np.zeros(1, np.int64)
    size = int(ends[-1] - ends[0])
    found = data.slice(int(ends[0]), size) if size else b""
    lengths, text = np.diff(ends), "string" in name
    if text and size:
        lengths = _letters(np.frombuffer(found, np.uint8), ends - ends[0], lengths)
    parts += [lengths.astype(np.uint64).data, found]
    return ["text" if text else "bytes", missing, size, int(lengths.sum())]


def _letters(data: Any, ends: Any, lengths: Any) -> Any:
    """Characters of each text in UTF-8 that lies in the bytes. ``ValueError`` where one begins within a character."""
    import numpy as np

    within = np.flatnonzero(data.view(np.int8) < -64)  # bytes of a character but its first
    if not len(within):
        return lengths
    before = np.searchsorted(within, ends)
    if (within[np.minimum(before, len(within) - 1)] == ends).any():
        raise ValueError("a text that is no UTF-8")
    return lengths - np.diff(before)


def _bits(buffer: Any, at: int, count: int) -> bytes:
    """A byte for each bit."""
    import numpy as np

    if not count:
        return b""
    return np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little", count=at + count)[at:].tobytes()


def _unpacked(rows: int, names: list[str], kinds: list[Any], data: bytes | bytearray) -> list[dict[str, Any]]:
    """What ``_packed`` was given. Any exception where it was given nothing."""
    unpacking = _Unpacking(data)
    found: list[dict[str, Any]] = unpacking.values(["object", False, names, kinds], rows)
    unpacking.require_end()
    return found


class _Unpacking:
    """Bytes that are taken from front to back."""

    def __init__(self, data: bytes | bytearray) -> None:
        if len(data) > _MOST_SENT:
            raise ValueError(f"{len(data):,} bytes of rows at a time, expected at most {_MOST_SENT:,}")
        self._data, self._at, self._made = memoryview(data), 0, 0

    def _take(self, size: int) -> memoryview:
        part = self._data[self._at : self._at + size]
        if len(part) != size:
            raise ValueError("columns that say more than they have")
        self._at += size
        return part

    def require_end(self) -> None:
        """``ValueError`` where something is left."""
        if self._at != len(self._data):
            raise ValueError("columns that have more than they say")

    def values(self, about: list[Any], count: int) -> list[Any]:
        """The next column: ``count`` values of which ``_pack`` says ``about``."""
        kind, missing, *more = about
        self._made += count
        if count < 0 or self._made > _MOST_MADE:
            raise ValueError(f"more than {_MOST_MADE:,} values at a time")
        there = self._take(count) if missing else None
        found = self._filled(kind, more, count)
        if len(found) != count:
            raise ValueError("a column of other values than it says")
        return found if there is None else [value if known else None for value, known in zip(found, there, strict=True)]

    def _filled(self, kind: str, more: list[Any], count: int) -> list[Any]:
        if kind in ("text", "bytes"):
            size, total = more
            cuts, data = self._cuts(count, total), bytes(self._take(size))
            whole = data.decode() if kind == "text" else data
            if len(whole) != total:
                raise ValueError("lengths that do not fit what they are of")
            return [whole[start:end] for start, end in cuts]
        if kind == "list":
            cuts = self._cuts(count, more[0])
            inner = self.values(more[1], more[0])
            return [inner[start:end] for start, end in cuts]
        if kind == "object":
            names, columns = list(map(str, more[0])), [self.values(each, count) for each in more[1]]
            if not columns:
                return [{} for _ in range(count)]
            return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        if kind == "odd":
            return [_restored(value) for value in more[0]]
        if kind == "bool":
            return [byte != 0 for byte in self._take(count)]
        if kind == "null":
            return [None] * count
        if kind not in _NUMBERS.values():
            raise ValueError("a column of no kind that is sent")
        return self._numbers(kind, count)

    def _numbers(self, kind: str, count: int) -> list[Any]:
        found = self._take(count * struct.calcsize(kind))
        return found.cast(kind).tolist() if count else []  # type: ignore[call-overload]

    def _cuts(self, count: int, total: int) -> Iterator[tuple[int, int]]:
        """Where each of ``count`` begins and ends among ``total``."""
        ends = list(accumulate(self._numbers("Q", count), initial=0))
        if ends[-1] != total:
            raise ValueError("lengths that do not fit what they are of")
        return pairwise(ends)


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
def open_parquet(
    path: Path, where: str, limits: Limits = LIMITS, source: Path | None = None
) -> Iterator[Table | _Apart]:
    """A file of rows, read in a process of its own (``child.py``), or where this is one here. ``source``: the folder
    whose files are one stranger's, and may be read by one process after another.

    ``MantissaError``, which ``where`` begins, for one that is damaged or beyond the limits.
    """
    with boundary(where, "write the file again"):
        spent = budget()
        require_size(path, limits.bytes, spent)
        if child.inside:
            with _opened(path, limits) as table:
                yield table
        else:
            with child.lent("pyarrow.parquet", __name__, source=str(source or path)) as reader:
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
