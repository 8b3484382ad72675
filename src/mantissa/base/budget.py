"""What one command may read, and what its reading may make: a budget from which every reader draws.

A limit for each file does not bound a command: a thousand files, each just below it, are a thousand times as much. So
``Budget`` holds for all that a command reads: files, their bytes, bytes that are made of them, processor seconds where
few bytes can ask for many. What is made and how long it takes may grow with the bytes that were read, to a
ceiling for each file, so a small one that asks for gigabytes is refused whoever reads it. What a library makes at once
and nobody can count meanwhile is made in a process of its own (``readers/child.py``); a tokenizer, at work here, has
seconds (``call``).

The command line sets one for each command (``spending``); used as a library, each reading has one of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

from mantissa.base.bounds import available_memory, regular_file
from mantissa.base.errors import MantissaError

T = TypeVar("T")
What = Literal["files", "bytes", "made", "seconds"]
# What a byte that is read may become, in bytes: parquet keeps a mask, or a prompt that is repeated, in a hundredth.
_TIMES = 200
_MOST_MADE = 7 << 29  # bytes that a file may bring with it so, however large it is: with what is always there 4 GiB
_PACE = 2e6  # bytes of a file that a second may take: a tenth of what a slow reader does
_LEAST = 256 << 20  # bytes that the machine must have left for more to be read
_LOOK = 64 << 20  # bytes that are made between two looks at that
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
