"""The one reader of JSON: bounded in bytes, levels, values and digits, and without text that cannot be written again.

A key given twice has its last value, and NaN and Infinity are numbers, as in Python's own ``json``; whoever wants them
finite checks the numbers, since 1e400 is infinite as well. What is refused beyond bad JSON would end, later, in an
``OverflowError`` (10^400 as a float), a ``RecursionError`` (to write deep lists again takes a stack too) or a
``UnicodeEncodeError`` (half of a surrogate pair).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mantissa.base.bounds import Limits, boundary, opened, require_size
from mantissa.base.errors import MantissaError

DOCUMENT = Limits(256 << 20, 100, 10_000_000)  # state, settings, an index, an answer from a server
ROW = Limits(64 << 20, 100, 10_000_000)
# What a program printed or a test expects: whole numbers as long as Python itself reads them.
_PYTHON = 4300
VALUE = Limits(64 << 20, 100, 10_000_000, digits=_PYTHON)
_LARGEST_FILE = 4 << 30  # of rows
_AS_ZEROS = bytes(ord("0") if byte in b"0123456789" else ord(" ") for byte in range(256))
_TEXT = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.S)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes, limits: Limits = DOCUMENT) -> Any:
    """What a text in JSON says; bytes are UTF-8. ``ValueError`` for what is no JSON or beyond the limits."""
    if len(text) > limits.bytes:
        raise ValueError(f"{len(text):,} bytes, expected at most {limits.bytes:,}")
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    if not text.isascii():
        text.encode()  # which half of a surrogate pair fails
    brackets = text.count("[") + text.count("{")
    if brackets + text.count(",") >= limits.values and _marks(_TEXT.sub("", text)) >= limits.values:
        raise ValueError(f"more than {limits.values:,} values")  # before they are made: each takes a hundred bytes
    # Maybe within a text, hence not refused here; longer ones Python itself refuses.
    long = limits.digits < _PYTHON and _has_run(text, limits.digits + 1)
    hook = _short(limits.digits) if long else None
    try:
        value = json.loads(text, parse_int=hook)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if brackets > limits.depth or _HALF.search(text):
        require_few(value, limits)
    return value


def _marks(text: str) -> int:
    """What begins a value or comes between two: of a whole document at most one less than its values."""
    return sum(map(text.count, "[{,"))


def _has_run(text: str, digits: int) -> bool:
    """Whether so many digits stand in a row. A quarter of the text is looked at first, and mostly alone."""
    if b"0" * (digits // 4) not in text[::4].encode(errors="replace").translate(_AS_ZEROS):
        return False
    return re.search(rf"[0-9]{{{digits}}}", text) is not None


def as_json(value: Any) -> Any:
    """Our own ``value`` as it comes back from JSON: tuples are lists, keys are texts."""
    return json.loads(json.dumps(value))


def read_json(path: Path, advice: str = "restore it, or write it again", limits: Limits = DOCUMENT) -> Any:
    """What a file in JSON says. ``MantissaError``, which ends with the advice, for one that is missing or is none."""
    with boundary(f"{path}: not valid JSON", advice):
        require_size(path, limits.bytes)
        with path.open("rb") as file:
            return parse_json(file.read(limits.bytes + 1), limits)


def read_rows(path: Path, limits: Limits = ROW) -> Iterator[Any]:
    """What each line of a file says, empty ones left out. ``MantissaError`` that names the line."""
    for number, line in read_lines(path, limits):
        with boundary(f"{path}, line {number}: not JSON", "delete the line, or write the file again"):
            row = parse_json(line, limits)
        yield row


def read_lines(path: Path, limits: Limits = ROW) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line that is not empty, for who parses them one by one. ``limits`` are of a line."""
    with boundary(path, "expected a file of rows"):
        require_size(path, _LARGEST_FILE)
        reading = opened(path)
    with reading as file:
        number = 0
        while line := file.readline(limits.bytes + 1):
            number += 1
            if len(line) > limits.bytes:
                raise MantissaError(f"{path}, line {number}: longer than {limits.bytes:,} bytes; shorten it")
            if number > limits.rows:
                raise MantissaError(f"{path}: more than {limits.rows:,} lines; give some of them")
            if line.strip():
                yield number, line


def _short(digits: int) -> Any:
    def whole(text: str) -> int:
        if len(text.lstrip("-")) > digits:
            raise ValueError(f"a whole number of more than {digits} digits")
        return int(text)

    return whole


def require_few(value: Any, limits: Limits) -> None:
    """Raise for too many levels or values, and for half of a surrogate pair; level by level, without a stack."""
    layer, values, levels = [value], 1, 0
    while layer:
        inner: list[Any] = []
        for each in layer:
            if isinstance(each, dict):
                inner += [*each, *each.values()]
                values += len(each)
            elif isinstance(each, list):
                inner += each
                values += len(each)
            elif isinstance(each, str) and not each.isascii():
                each.encode()
        levels += any(isinstance(each, (list, dict)) for each in layer)
        if levels > limits.depth:
            raise ValueError(f"nested more than {limits.depth} levels deep")
        if values > limits.values:
            raise ValueError(f"more than {limits.values:,} values")
        layer = inner
