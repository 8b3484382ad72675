"""The container format GGUF (llama.cpp's): metadata and tensors of one file, checked before anything is believed.

Layout, little-endian: ``GGUF``, version, counts of tensors and of metadata; the metadata (key, type, value); for each
tensor its name, dimensions (fastest first), type and offset; then the tensors, aligned. Source: ggml's docs/gguf.md.

A file is data from a stranger. Every count and length is compared with the bytes that are left before it is followed,
and the tensors must lie inside the file side by side, so that what a file costs is bounded by its size. The ``gguf``
package, which would loop over any count, is asked for the types' block sizes and for dequantisation alone.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mantissa.errors import MantissaError

_MOST_HEADER = 1 << 27  # bytes; 30 times the metadata of a vocabulary of 256,000 words
_PLAIN = ("F32", "F16", "BF16")  # stored as they are, not on a grid of blocks
_STRING, _ARRAY = 8, 9
_SCALARS = {
    kind: struct.Struct(f"<{code}")
    for kind, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_U32, _U64, _COUNTS = _SCALARS[4], _SCALARS[10], struct.Struct("<IQQ")
# The fewest bytes that one entry takes: a key, its type and a byte; a name, one dimension, type and offset.
_LEAST_ENTRY, _LEAST_TENSOR = 13, 32


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies. ``shape``: slowest dimension first, as torch counts; ``rows``: the same in bytes."""

    kind: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    offset: int


class GgufFile:
    """Metadata and tensors of a GGUF file. ``MantissaError``: anything but a whole and plausible one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = _library(path)
        try:
            with path.open("rb") as file:
                self._data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise MantissaError(f"{path}: cannot be read as a GGUF file ({error}); fetch it again") from error
        reader = _Reader(self._data, path)
        tensors = reader.counts()
        self.metadata = reader.metadata()
        self._tensors = self._table(reader, tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, by its name in the file."""
        return {name: stored.shape for name, stored in self._tensors.items()}

    def array(self, name: str) -> np.ndarray:
        """A tensor as fp32, dequantised; a copy. What is not finite stays so."""
        stored = self._tensors[name]
        data = np.frombuffer(self._data, np.uint8, math.prod(stored.rows), stored.offset).reshape(stored.rows)
        with np.errstate(all="ignore"):  # an infinite scale times 0: whoever takes the values looks at them
            try:
                values = self._gguf.dequantize(data, stored.kind)
            except NotImplementedError as error:
                raise MantissaError(
                    f"{self.path}: tensor {name} is in {stored.kind.name}, which the gguf package cannot dequantise; "
                    "use a file in Q4_K, Q6_K, Q8_0 or F16"
                ) from error
        return np.require(values.reshape(stored.shape), np.float32, ["C", "W"])

    def note(self) -> str:
        """Which grids the weights come from and how many percent of them lie on each; '' where on none.

        Such as ``dequantised from GGUF: Q4_1 (a 4-bit grid) 79%, Q8_0 (8-bit) 21%``.
        """
        weights: Counter[str] = Counter()
        for stored in self._tensors.values():
            weights[stored.kind.name] += math.prod(stored.shape)
        named: list[str] = []
        for kind, count in weights.most_common():
            if kind not in _PLAIN:
                bits = next(iter(re.findall(r"\d+", kind)), "?")
                grid = f"{bits}-bit" if named else f"a {bits}-bit grid"
                named.append(f"{kind} ({grid}) {100 * count / weights.total():.0f}%")
        return f"dequantised from GGUF: {', '.join(named)}" if named else ""

    def _table(self, reader: _Reader, count: int) -> dict[str, _Stored]:
        entries = reader.tensors(count)
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise reader.error(f"general.alignment is {alignment!r}: expected a power of two")
        start = -(-reader.at // alignment) * alignment
        room = total = max(0, reader.size - start)
        tensors: dict[str, _Stored] = {}
        for name, dimensions, number, offset in entries:
            if name in tensors:
                raise reader.error(f"tensor {name} is listed twice")
            tensors[name] = stored = self._place(reader, name, dimensions, number, start + offset)
            size = math.prod(stored.rows)
            room -= size
            if offset + size > total:
                raise reader.error(
                    f"tensor {name} of {size:,} bytes would end {offset + size - total:,} bytes after the file: it is "
                    "truncated or damaged"
                )
            if room < 0:
                raise reader.error(f"tensors overlap: up to {name} they take more than the file's {total:,} bytes")
        return tensors

    def _place(self, reader: _Reader, name: str, dimensions: tuple[int, ...], number: int, offset: int) -> _Stored:
        try:
            kind = self._gguf.GGMLQuantizationType(number)
        except ValueError:
            raise reader.error(f"tensor {name} has the unknown type {number}; is the gguf package too old?") from None
        if not 1 <= len(dimensions) <= 4 or 0 in dimensions:
            raise reader.error(f"tensor {name} has the dimensions {list(dimensions)}: expected 1 to 4, none of them 0")
        block, size = self._gguf.GGML_QUANT_SIZES[kind]
        if dimensions[0] % block:
            raise reader.error(f"tensor {name}: rows of {dimensions[0]} are no multiple of {kind.name}'s {block}")
        shape = tuple(reversed(dimensions))
        return _Stored(kind, shape, (*shape[:-1], shape[-1] // block * size), offset)


class _Reader:
    """Reads a header from its beginning; whatever would pass its end, or is implausible, is an error."""

    def __init__(self, data: Any, path: Path) -> None:
        self.data, self.path, self.size, self.at = data, path, len(data), 0
        self.end = min(self.size, _MOST_HEADER)

    def error(self, message: str) -> MantissaError:
        return MantissaError(f"{self.path}: {message}; fetch the file again")

    def counts(self) -> int:
        """Magic, version and counts; returns the number of tensors."""
        if self.data[:4] != b"GGUF":
            raise self.error(f"not a GGUF file: it begins with {bytes(self.data[:4])!r}")
        self.at = 4
        version, tensors, self._entries = self._take(_COUNTS)
        if version not in (2, 3):
            big = " (is it big-endian?)" if version and version % 65536 == 0 else ""
            raise self.error(f"GGUF version {version}{big}: expected 2 or 3")
        self._require(self._entries, _LEAST_ENTRY, "entries of metadata")
        self._require(tensors, _LEAST_TENSOR, "tensors")
        return tensors

    def metadata(self) -> dict[str, Any]:
        """Plain values by key; an array of numbers is numpy's, an array of strings is a list."""
        found: dict[str, Any] = {}
        for _ in range(self._entries):
            key = self._string()
            if key in found:
                raise self.error(f"{key} is there twice")
            found[key] = self._value(*self._take(_U32))
        return found

    def tensors(self, count: int) -> list[tuple[str, tuple[int, ...], int, int]]:
        """Name, dimensions (fastest first), type and offset of each."""
        found = []
        for _ in range(count):
            name, (dimensions,) = self._string(), self._take(_U32)
            if dimensions > 4:
                raise self.error(f"tensor {name[:80]} has {dimensions} dimensions: expected 1 to 4")
            shape = self._take(struct.Struct(f"<{dimensions}Q"))
            found.append((name, shape, *self._take(struct.Struct("<IQ"))))
        return found

    def _take(self, layout: struct.Struct) -> tuple[Any, ...]:
        begin, self.at = self.at, self.at + layout.size
        if self.at > self.end:
            raise self._cut()
        return layout.unpack_from(self.data, begin)

    def _cut(self) -> MantissaError:
        if self.end < self.size:
            return self.error(f"its header is longer than {_MOST_HEADER:,} bytes, which no model's is")
        return self.error("ends inside its header: it is truncated or damaged")

    def _require(self, count: int, least: int, what: str) -> None:
        """That ``count`` things of ``least`` bytes each can still follow."""
        if count * least > self.end - self.at:
            raise self.error(
                f"claims {count:,} {what}, which is more than its {self.size:,} bytes hold: it is truncated or damaged"
            )

    def _string(self) -> str:
        (length,) = self._take(_U64)
        self._require(length, 1, "bytes of a string")
        begin, self.at = self.at, self.at + length
        try:
            return self.data[begin : self.at].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"a string in its header is not UTF-8 ({error.reason})") from None

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._take(self._layout(kind))[0]

    def _layout(self, kind: int) -> struct.Struct:
        if kind not in _SCALARS:
            raise self.error(f"its metadata has a value of the unknown type {kind}")
        return _SCALARS[kind]

    def _array(self) -> list[str] | np.ndarray:
        (kind,), (count,) = self._take(_U32), self._take(_U64)
        if kind == _ARRAY:
            raise self.error("its metadata has an array of arrays, which no model's has")
        if kind == _STRING:
            self._require(count, _U64.size, "strings")
            return [self._string() for _ in range(count)]
        layout = self._layout(kind)
        self._require(count, layout.size, "numbers")
        begin, self.at = self.at, self.at + count * layout.size
        return np.frombuffer(self.data, np.dtype(layout.format), count, begin)


def _library(path: Path) -> Any:
    try:
        import gguf
    except ImportError:
        raise MantissaError(
            f"{path}: reading GGUF needs the gguf package, which is not installed: pip install 'mantissa[gguf]'"
        ) from None
    return gguf
