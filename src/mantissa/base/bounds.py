"""What keeps hostile or broken input from becoming a traceback, a hang or a full memory: one place for each.

``boundary`` surrounds the parsing of what others wrote (a recipe, a data file, a model's folder, a checkpoint, a chat
template): whatever it raises becomes one ``MantissaError``. ``require_memory`` compares a bill with the machine before
anything is built. ``number`` is the range of one.

What one command may read, and what its reading may make, is a budget from which every reader draws; ``Limits`` are what
one document may be, whichever its format.

A limit for each file does not bound a command: a thousand files, each just below it, are a thousand times as much. So
``Budget`` holds for all that a command reads: files, their bytes, bytes that are made of them, processor seconds where
few bytes can ask for many. What is made and how long it takes may grow with the bytes that were read, to a
ceiling for each file, so a small one that asks for gigabytes is refused whoever reads it. What a library makes at once
and nobody can count meanwhile is made in a process of its own (``readers/child.py``); a tokenizer, at work here, has
seconds (``call``).

The command line sets one for each command (``spending``); used as a library, each reading has one of its own.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

from mantissa.base.errors import MantissaError, missing

LARGEST_SIZE = 2**31 - 1  # of anything that is counted: steps, tokens, problems, layers
LARGEST_SEED = 2**63 - 1
MOST_LAYERS = 10_000  # each is some twenty objects to make before there is a bill
MOST_EXPERTS = 32_768  # of all layers together, likewise
BELOW_ONE = 1 - 2.0**-53  # the nearest number below it
SMALLEST_FLOAT, LARGEST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # what fp32 holds with all of its mantissa


@contextmanager
def boundary(where: object, advice: str) -> Iterator[None]:
    """Any exception in the block becomes ``MantissaError("<where>: <what>; <advice>")``; those that are one pass.

    Also what derives from ``BaseException`` alone, as a panic in a Rust library does; not Ctrl-C or an exit. Of
    a module that an extra brings, which extra.
    """
    try:
        yield
    except (MantissaError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # every kind: that is what it is for
        if isinstance(error, ModuleNotFoundError) and (lacking := missing(error)) is not None:
            raise lacking from None
        raise MantissaError(f"{where}: {describe_error(error)}; {advice}") from error


def describe_error(error: BaseException) -> str:
    """The first line of an exception, with its kind where the text alone says too little."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, MemoryError):
        return "it asks for more memory than it may have"
    kind, text = type(error).__name__, next(iter(str(error).strip().splitlines()), "")
    return text if isinstance(error, OSError) else f"{kind}: {text}" if text else kind


def address_space() -> int | None:
    """Bytes of address space that this process has taken; None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return None


def require_memory(needed: int, what: str, advice: str) -> None:
    """``MantissaError`` where ``needed`` bytes are more than this machine has free; says both numbers."""
    there = available_memory()
    if there is not None and needed > there:
        raise MantissaError(f"{what}: {needed:,} bytes at least, and {there:,} are available here; {advice}")


def available_memory() -> int | None:
    """Bytes that a process could still take: free, reclaimable and swap, within its control group; None: unknown."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = sum(int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        most, taken = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return min(free, most - taken + int(kept.get("inactive_file", 0)))  # of files, which the kernel gives up
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return free


def number(value: Any, low: float, high: float = LARGEST_FLOAT, *, whole: bool = False) -> bool:
    """Whether ``value`` is a number (no bool, no text) in [low, high]: finite in fp32, but for a ``high`` of inf."""
    kinds = int if whole else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high:
        return False
    return value in (low, high) or abs(value) <= LARGEST_FLOAT


def outside(value: float, low: float | None, high: float | None) -> float:
    """How far ``value`` lies outside [low, high], a metric's healthy range; None is an open end.

    0 inside, infinite for what is not finite in fp32, whatever the range.
    """
    if not abs(value) <= LARGEST_FLOAT:
        return math.inf
    return max(0.0, 0.0 if low is None else low - value, 0.0 if high is None else value - high)


def check_values(where: str, values: Mapping[str, Any], checks: Mapping[str, tuple[bool, str]]) -> None:
    """``MantissaError``, "where: name=value: expected ...", for the first of ``checks`` (good, expected) that fails."""
    for name, (good, expected) in checks.items():
        if not good:
            raise MantissaError(f"{where}: {name}={values[name]!r}: expected {expected}")


def count(value: Any, name: str) -> int:
    """``value`` where it is a whole number from 0 on; else ``MantissaError``, which ``name`` begins."""
    if not number(value, 0, LARGEST_SEED, whole=True):
        raise MantissaError(f"{name} is {value!r}, expected a whole number from 0 on; it is damaged")
    return int(value)


def representable(value: float) -> bool:
    """Whether fp32 holds a number at full precision: finite, and 0 or at least 1.2e-38 in magnitude."""
    return value == 0 or SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT


def whole_text(text: str) -> bool:
    """Whether text can be written as UTF-8: JSON may hold one half of a surrogate pair, which no file can."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def describe_value(value: Any) -> str:
    """A foreign value, or the beginning of a long one, for a message."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return f"a number of {value.bit_length()} bits"  # whose digits Python may refuse to write
    return ascii(value)[:60] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def require_plain(value: Any, where: str, depth: int = 32) -> None:
    """``MantissaError`` unless a recorded value is what records are made of: objects with whole text as keys, lists,
    whole text, numbers (whole ones of at most 64 bits) and None, at most ``depth`` deep."""
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return
    if kind is int and -(2**63) <= value < 2**64:
        return
    if kind is str and whole_text(value):
        return
    if kind in (dict, list) and depth:
        for key, item in value.items() if kind is dict else enumerate(value):
            if kind is dict and not (isinstance(key, str) and whole_text(key)):
                raise MantissaError(f"{where}: expected text as a key, got {describe_value(key)}; restore the file")
            require_plain(item, f"{where}: {ascii(key)[1:-1]}" if kind is dict and depth == 32 else where, depth - 1)
        return
    what = "deeper nesting than any record has" if not depth else describe_value(value)
    raise MantissaError(f"{where}: expected plain values, got {what}; restore the file")


def regular_file(path: Path) -> bool:
    """Whether ``path`` may be read: a file, and not a pipe or device that never ends. False where there is none."""
    if path.is_file():
        return True
    if path.exists() and not path.is_dir():
        raise MantissaError(f"{path}: expected a file, found a pipe or a device; replace it")
    return False


T = TypeVar("T")
What = Literal["files", "bytes", "made", "seconds"]
# What a byte that is read may become, in bytes: parquet keeps a mask, or a prompt that is repeated, in a hundredth.
_TIMES = 200
_MOST_MADE = 7 << 29  # bytes that a file may bring with it so, however large it is: with what is always there 4 GiB
_PACE = 2e6  # bytes of a file that a second may take: a tenth of what a slow reader does
_LEAST = 256 << 20  # bytes that the machine must have left for more to be read
_LOOK = 64 << 20  # bytes that are made between two looks at that
_LARGE = 32 << 20  # bytes: what takes a second or more to parse
_WORDS: dict[What, str] = {
    "files": "files", "bytes": "bytes of files", "made": "bytes in memory", "seconds": "seconds of the processor"
}  # fmt: skip


class Budget:
    """What is left of ``files``, ``bytes``, ``made`` (bytes) and ``seconds``. ``times``: bytes that may be made for
    each byte of a file that is read, besides."""

    def __init__(
        self, files: int = 250_000, bytes: int = 64 << 30, made: int = 512 << 20, seconds: float = 60.0,
        times: int = _TIMES,
    ) -> None:  # fmt: skip
        self._most: dict[What, float] = {"files": files, "bytes": bytes, "made": made, "seconds": seconds}
        self._left, self._times, self._unseen = dict(self._most), times, 0.0
        self._files: dict[tuple[int, int], int] = {}  # by device and number: bytes that were drawn for it

    def draw(self, what: What, count: float, where: object = "reading") -> None:
        """Take ``count`` of ``what`` for ``where``, a file; ``MantissaError`` where it is not left."""
        self._left[what] -= count
        if self._left[what] < 0:
            more = f"{where}: more than {self._most[what]:,.0f} {_WORDS[what]}"
            raise MantissaError(f"{more} for what one command reads in all; give a part of it, or fewer files")
        self._unseen += count if what == "made" else 0
        if self._unseen > _LOOK:
            self._look(where)

    def file(self, path: Path, about: os.stat_result) -> None:
        """Draw a file that is about to be read whole; of one that was read before, what has been added to it."""
        known = about.st_dev, about.st_ino
        before = self._files.get(known)
        self.draw("files", before is None, path)
        self.draw("bytes", max(0, about.st_size - (before or 0)), path)
        self._files[known] = max(before or 0, about.st_size)
        made = min(self._times * about.st_size, _MOST_MADE)
        for what, more in (("made", made), ("seconds", about.st_size / _PACE)):
            self._most[what] += more  # type: ignore[index]
            self._left[what] += more  # type: ignore[index]
        self._look(path)

    def _look(self, where: object) -> None:
        """``MantissaError`` where this machine's memory is as good as full: the system would end the process."""
        self._unseen, there = 0.0, available_memory()
        if there is not None and there < _LEAST:
            raise MantissaError(f"{where}: only {there:,} bytes of memory are left; free some, or give a part of it")


_current: Budget | None = None


@contextmanager
def spending(budget: Budget | None = None) -> Iterator[Budget]:
    """All that is read in the block draws from one ``budget``; a block within another draws from the outer one's."""
    global _current
    if _current is not None and budget is None:
        yield _current
        return
    before, _current = _current, budget or Budget()
    try:
        yield _current
    finally:
        _current = before


def budget() -> Budget:
    """The command's budget, or a new one, for one reading, where no command is."""
    return _current or Budget()


def require_size(path: Path, most: int, spent: Budget | None = None, *, weights: bool = False) -> int:
    """The bytes of a file that may be read, once they are drawn from ``spent`` (None: from the command's budget).

    ``weights``: of which each tensor is read by itself, against what the machine's memory holds; nothing is drawn, for
    models are as large as they are. ``MantissaError`` for a pipe or device, and for one too large.
    """
    regular_file(path)
    about = path.stat()
    if about.st_size > most:
        raise MantissaError(f"{path} has {about.st_size:,} bytes; expected at most {most:,}; give a part of it")
    if not weights:
        (spent or budget()).file(path, about)
    return about.st_size


def call(function: Callable[[], T], seconds: float) -> T:
    """What ``function`` gives, called in a thread of its own; ``TimeoutError`` after ``seconds``.

    The thread is then left behind, at work until its call is over, or the process is. The call must let other threads
    go on.
    """
    got: list[T] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            got.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again below; a Rust library's panic is no Exception
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"took longer than {seconds:g} s")
    if raised:
        raise raised[0]
    return got[0]


class Limits(NamedTuple):
    """Of one document, or of one row where a file has rows."""

    bytes: int  # of the file; characters, of a text
    depth: int  # levels of lists and dictionaries; of YAML the brackets, on which its scanner is slow
    values: int  # with every alias and reference written out
    digits: int = 308  # of a whole number: what a float can still hold
    rows: int = 1_000_000  # of a file of rows


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """``path`` open for reading, with a bar on stderr for as long as it takes: for a large file, on a terminal."""
    if not sys.stderr.isatty() or path.stat().st_size < _LARGE:
        with path.open("rb") as file:
            yield file
        return
    from rich.progress import open as bar

    from mantissa.base.screen import Screen

    with bar(path, "rb", description=f"reading {path.name}", transient=True, console=Screen(stderr=True)) as file:
        yield file
