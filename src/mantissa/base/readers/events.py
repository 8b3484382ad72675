"""TensorBoard's event files without TensorBoard: the scalars of each record, bounded.

A record is its length (8 bytes), a checksum of the length (4), that many bytes of an ``Event`` and their checksum (4).
The length's checksum is held to: a file that was damaged in between ends in an error and not in numbers. Of an event
are read: step, session log, and of its summary tags with a ``simple_value`` or a tensor of one float. Everything else
(graphs, images, histograms, texts) is stepped over by its length.

A file may end within a record: its run is still writing, or was killed. What is whole before that is its content.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mantissa.base.bounds import Limits, boundary, require_size
from mantissa.base.errors import MantissaError

LIMITS = Limits(1 << 30, 8, 20_000_000)  # of a file; levels of messages; scalars
_LONGEST_RECORD = 64 << 20  # bytes: an event with images or a graph
_LONGEST_TAG = 1000  # bytes
_ADVICE = "give another event file, or export the scalars as csv"
_START = 1  # of a session log: what was logged from this step on before is void
_FLOAT, _DOUBLE = 1, 2  # TensorProto's types


class Scalar(NamedTuple):
    """A tag's value at a step."""

    tag: str
    step: int
    value: float


@dataclass(frozen=True)
class Events:
    """``starts``: steps at which a program went on. ``whole``: False where the file ends within a record."""

    scalars: list[Scalar]
    starts: list[int]
    whole: bool


def read_events(path: Path) -> Events:
    """The scalars of an event file. ``MantissaError`` for what is none, is damaged, or is beyond the limits."""
    scalars: list[Scalar] = []
    starts: list[int] = []
    with boundary(f"{path}: not an event file of TensorBoard", _ADVICE):
        size = require_size(path, LIMITS.bytes)
        with path.open("rb") as file:
            at = 0
            while at + 12 <= size:
                header = file.read(12)
                length, check = struct.unpack("<QI", header)
                if _masked(header[:8]) != check:
                    raise MantissaError(f"{path}: damaged at byte {at:,}, or no event file of TensorBoard; {_ADVICE}")
                if length > _LONGEST_RECORD:
                    raise MantissaError(
                        f"{path}: a record of {length:,} bytes at byte {at:,}; expected at most "
                        f"{_LONGEST_RECORD:,}; {_ADVICE}"
                    )
                if at + 16 + length > size:
                    break
                _event(file.read(length), scalars, starts)
                if len(scalars) > LIMITS.values:
                    raise MantissaError(f"{path}: more than {LIMITS.values:,} scalars; {_ADVICE}")
                file.read(4)
                at += 16 + length
    return Events(scalars, starts, at == size)


def _event(data: bytes, scalars: list[Scalar], starts: list[int]) -> None:
    step, summaries, started = 0, list[bytes](), False
    for field, value in _fields(data):
        if field == 2 and isinstance(value, int):
            step = value if value < 1 << 63 else value - (1 << 64)
        elif field == 5 and isinstance(value, bytes):
            summaries.append(value)
        elif field == 7 and isinstance(value, bytes):
            started = any(name == 1 and status == _START for name, status in _fields(value))
    if started:
        starts.append(step)
    for summary in summaries:
        for field, value in _fields(summary):
            if field == 1 and isinstance(value, bytes) and (found := _scalar(value)) is not None:
                scalars.append(Scalar(found[0], step, found[1]))


def _scalar(data: bytes) -> tuple[str, float] | None:
    tag, number = None, None
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes) and len(value) <= _LONGEST_TAG:
            tag = value.decode("utf-8", "replace")
        elif field == 2 and isinstance(value, bytes) and len(value) == 4:
            number = struct.unpack("<f", value)[0]
        elif field == 8 and isinstance(value, bytes):
            number = _one(value)
    return None if tag is None or number is None else (tag, number)


def _one(data: bytes) -> float | None:
    """The number of a tensor that holds one float or double."""
    kind, found = 0, None
    for field, value in _fields(data):
        if field == 1 and isinstance(value, int):
            kind = value
        elif field in (4, 5, 6) and isinstance(value, bytes):
            code = {(_FLOAT, 4): "<f", (_DOUBLE, 8): "<d"}.get((kind, len(value)))
            found = struct.unpack(code, value)[0] if code else found
    return found


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message: a varint as int, all others as their bytes."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            length, at = _varint(data, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of wire type {kind}")
        if at + length > end:
            raise ValueError("a field that is longer than its message")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        if at + place >= len(data):
            break
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("a number without an end")


def _table() -> tuple[int, ...]:
    """CRC-32C (Castagnoli), of each byte."""
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        found.append(byte)
    return tuple(found)


_TABLE = _table()


def _masked(data: bytes) -> int:
    """The checksum as records hold it: rotated by 15 bits, and a constant added."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
