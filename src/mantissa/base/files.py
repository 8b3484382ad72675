"""What is written so that a kill at any instant loses nothing: files and folders replaced whole, and files of rows that
are only appended to.

A file or a folder is either the old version or the new one, by the usual recipe: write beside, fsync, rename over,
fsync the folder. A rename inside one file system is atomic, so a reader sees one whole version; the first fsync makes
sure that the new name never points at data the disk does not have yet, the second that the rename itself outlives a
power cut. What a kill can leave behind is a temporary beside the file, whose name starts with a dot and ends in
``.tmp``: ``remove_leftovers`` sweeps those. Rows (``JsonLines``) survive being cut off in the middle of a line.

A folder is one process's to write (``locked``), and refuses other settings than those it was begun with.

Failures of the disk are the user's to mend (space, permissions), so they surface as one-line ``MantissaError``.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import socket
import stat
import sys
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from errno import (
    EACCES,
    EAGAIN,
    EDQUOT,
    EFBIG,
    EIO,
    EISDIR,
    ELOOP,
    ENAMETOOLONG,
    ENOENT,
    ENOSPC,
    ENOTDIR,
    ENXIO,
    EPERM,
    EROFS,
    EWOULDBLOCK,
)
from pathlib import Path
from typing import Any, BinaryIO

from mantissa.base.bounds import (
    LARGEST_SIZE,
    boundary,
    describe_value,
    number,
    opened,
    regular_file,
    require_size,
    whole_text,
)
from mantissa.base.errors import MantissaError, on_failure
from mantissa.base.readers.json import ROW, parse_json

DIGESTS = "digests.json"  # in a folder: the SHA-256 of each of its other files
_ADVICE = {
    ENOSPC: "free some space or choose another folder",
    EDQUOT: "free some of your quota or choose another folder",
    EFBIG: "raise the file size limit (ulimit -f) or choose another folder",
    EACCES: "change its permissions or choose another folder",
    EPERM: "change its permissions or choose another folder",
    EROFS: "it is on a read-only file system; choose another folder",
    ENOTDIR: "a part of this path is a file; choose another folder",
    ENAMETOOLONG: "choose a shorter name",
    ENOENT: "a folder is gone; if it was renamed, give it its name back",
    EIO: "the disk reports a fault; choose another one",
    EISDIR: "a folder is in its place; move that away",
    ELOOP: "a link is in its place; move that away",
    ENXIO: "a pipe or a device is in its place; move that away",
}
Row = dict[str, Any]
_LARGEST = 4 << 30  # bytes of a file of rows
# Names with a slash that are words and no numbers.
_LABELS = ("precision/format", "precision/requested", "precision/active")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100  # fcntl.h: paths are relative to the current folder


@contextmanager
def disk_errors(path: Path | str) -> Iterator[None]:
    """Turn an ``OSError`` that the user can mend, met while writing ``path``, into a ``MantissaError``."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0)
        if advice is None:
            raise
        raise MantissaError(f"cannot write {path}: {error.strerror or error}; {advice}") from error


def own(path: Path) -> Path:
    """``path``, where it is no link; ``MantissaError`` where it is one, whatever it leads to.

    For what is opened to be written, or whose content is deleted, in a folder that someone else may have filled: a link
    there would lead out of it. The folder itself may be a link, since whoever named it chose it. A file that is
    replaced whole needs none of this: the new one takes the link's place.
    """
    if path.is_symlink():
        raise MantissaError(
            f"{path} is a link: nothing is written or deleted through one; put the file or folder itself in its place"
        )
    return path


def open_own(path: Path) -> BinaryIO:
    """A file of ours to append to and to read, made where there is none, and without a buffer: one would write what is
    left of a failed line once more when the file is closed.

    ``MantissaError`` for a link, a pipe, a folder, and for a file that has a second name, under which it may be
    someone else's.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with disk_errors(own(path)):
        file = os.fdopen(os.open(path, flags, 0o666), "rb+", buffering=0)
    found = os.fstat(file.fileno())
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return file
    file.close()
    what = "a file with two names (a hard link)" if stat.S_ISREG(found.st_mode) else "a pipe or a device"
    raise MantissaError(f"{path} is {what}: nothing is written to it; put a file of its own in its place")


def is_full(error: BaseException) -> bool:
    """Whether an error, or what it came from, says that a disk or a quota is full."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in (ENOSPC, EDQUOT)


class Reserve:
    """Room on a disk, held by a file of that size until something that must not fail needs it.

    The file has a temporary's name, so ``remove_leftovers`` gives the room back too, and takes what a kill has left.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self._path, self._what = folder / ".reserve.tmp", what

    def hold(self, size: int) -> None:
        """Hold ``size`` bytes, or what is held where that is more. ``MantissaError`` where there is no such room."""
        if self._path.is_file() and self._path.stat().st_size >= size:
            return
        with disk_errors(self._what), on_failure(self.release), open_own(self._path) as file:
            os.posix_fallocate(file.fileno(), 0, size)

    def release(self) -> bool:
        """Give the room back; whether there was any."""
        held = self._path.is_file()
        self._path.unlink(missing_ok=True)
        return held


def fsync(path: Path) -> None:
    """Make a file's content durable, or the names in a folder: new files, renames, removals."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_beside(path: Path) -> Path:
    """A fresh name in the folder of ``path``, which ``remove_leftovers`` recognises."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def remove_leftovers(folder: Path) -> list[Path]:
    """Delete the temporaries that killed writers left in ``folder`` (not below it); for the folder's one writer."""
    if not folder.is_dir():
        return []
    leftovers = sorted(folder.glob(".*.tmp"))
    for path in leftovers:
        remove(path)
    return leftovers


def remove(path: Path) -> None:
    """Delete a file, a folder with all that is in it, or a link and not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def numbered(folder: Path, suffix: str = "") -> list[int]:
    """The N of all ``step-N<suffix>`` in a folder, ascending: digits as this program writes them, no others."""
    if not folder.is_dir():
        return []
    pattern = re.compile(f"step-(0|[1-9][0-9]{{0,17}}){re.escape(suffix)}")
    return sorted(int(found[1]) for found in map(pattern.fullmatch, os.listdir(folder)) if found)


def saved_steps(folder: Path) -> list[int]:
    """The N of each folder ``step-N`` that holds anything, ascending. A checkpoint comes to its name whole, so an empty
    folder of such a name is none, and what is damaged is not empty."""
    return [step for step in numbered(folder) if (at := folder / f"step-{step}").is_dir() and any(at.iterdir())]


def digests_of(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of each file, hexadecimal, by the file's name; several files at a time."""

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    paths = list(paths)
    with ThreadPoolExecutor(4) as pool:
        return {path.name: found for path, found in zip(paths, pool.map(digest, paths), strict=True)}


def write_digests(folder: Path, known: Mapping[str, str]) -> None:
    """Write the SHA-256 of every file in ``folder`` into it; ``known``: those that were taken while writing."""
    rest = digests_of(path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in known)
    write_atomically(folder / DIGESTS, json.dumps({**known, **rest}, indent=1, sort_keys=True) + "\n")


def check_digests(folder: Path) -> None:
    """``MantissaError`` where a file of ``folder`` is not what ``write_digests`` saw. Other folders have none: nothing.
    Takes about a second for each gigabyte or two.
    """
    path = folder / DIGESTS
    if not path.is_file():
        return
    with boundary(path, "restore the file, or delete it to go without"):
        expected = {name: str(found) for name, found in parse_json(path.read_bytes()).items()}
        there = [folder / Path(name).name for name in expected]
        found = digests_of(path for path in there if path.is_file())
        odd = next((path.name for path in there if found.get(path.name) != expected[path.name]), None)
    if odd is not None:
        what = "damaged, or was changed" if odd in found else "gone"
        raise MantissaError(
            f"{folder / odd} is {what} since this folder was written; write it again, or delete {DIGESTS} there if the "
            "change was meant"
        )


@contextmanager
def atomic_file(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path to write a whole file to; when the block ends well it becomes ``path``, durably.

    When the block raises, the temporary is deleted and ``path`` is as it was. Full disks and missing permissions
    raise ``MantissaError``.
    """
    path = Path(path)
    temporary = temporary_beside(path)
    with disk_errors(path):
        with on_failure(lambda: temporary.unlink(missing_ok=True)):
            yield temporary
            fsync(temporary)
            os.replace(temporary, path)
        fsync(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """``atomic_file`` for a folder, which ``replace_directory`` puts in its place; its parents are made."""
    temporary = temporary_beside(path)
    with disk_errors(path):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            replace_directory(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # gone already where it took the place


def write_atomically(path: Path | str, data: bytes | str) -> None:
    """Write ``data`` (text as UTF-8) to ``path`` so that a kill at any instant leaves the old file or the new one."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def replace_directory(temporary: Path | str, final: Path | str) -> None:
    """Put the finished folder ``temporary`` in the place of ``final``, durably; both in one file system.

    Everything in ``temporary`` is fsynced first. Where ``final`` exists the two are exchanged in one system call and
    the old one is deleted, so ``final`` is a whole folder at every instant. Where the kernel or the file system
    cannot exchange, ``final`` is moved aside first: killed between the two renames, it is missing, and the new
    version lies complete beside it.
    """
    temporary, final = Path(temporary), Path(final)
    with disk_errors(final):
        for folder, _, names in os.walk(temporary):
            for name in names:
                fsync(Path(folder) / name)
            fsync(Path(folder))
        if not final.exists():
            os.rename(temporary, final)
            fsync(final.parent)
            return
        aside = temporary_beside(final)
        if _exchange(temporary, final):
            os.rename(temporary, aside)  # a leftover's name, in case a kill interrupts its removal
        else:
            os.rename(final, aside)
            os.rename(temporary, final)
        fsync(final.parent)
        remove(aside)


def _exchange(left: Path, right: Path) -> bool:
    """Swap two names in one system call; False where this system cannot."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE) == 0


def make_folder(folder: Path) -> None:
    """Make a folder and its parents; ``MantissaError`` where it is a file."""
    if folder.exists() and not folder.is_dir():
        raise MantissaError(f"{folder} is a file: name a folder")
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


def locked(path: Path, otherwise: str) -> BinaryIO:
    """The lock of the folder that ``path`` is in, held until it is closed or its process ends."""
    lock = open_own(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (EAGAIN, EWOULDBLOCK):
            lock.seek(0)
            holder = lock.read(200).decode(errors="replace").strip() or "another process"
            lock.close()
            raise MantissaError(
                f"{path.parent} is being written by {holder}; wait for it, stop it, or {otherwise}"
            ) from None
        warnings.warn(f"{path}: this file system has no locks ({error.strerror}); run one writer only", stacklevel=4)
    with disk_errors(path):
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return lock


def refuse_other_settings(folder: Path, what: str, there: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """``MantissaError`` where the settings ``there``, of what was begun in the folder, are not those asked for now."""
    changed = [name for name in {**asked, **there} if there.get(name) != asked.get(name)]
    if changed:
        raise MantissaError(
            f"{folder} holds a {what} with another {', '.join(changed)}: give the same to go on with it, or name "
            "another folder"
        )


class _Past:
    """The rows of a file that are in its digest: the last one's step, how many rows and bytes, and the digest."""

    def __init__(self) -> None:
        self.step, self.rows, self.bytes, self.sha256 = -1, 0, 0, hashlib.sha256()

    def add(self, step: int, size: int, text: str) -> None:
        self.sha256.update(("\n" * bool(self.rows) + text).encode())
        self.step, self.rows, self.bytes = step, self.rows + 1, self.bytes + size


class JsonLines:
    """Rows in ``path``, one a line, each with an integer ``step`` larger than the one before.

    Non-finite numbers are kept, because the step on which a run diverged is the one worth reading: JSON has no word for
    them, so they are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` and read back as floats.
    Every other float is written in its shortest form that reads back as the same double.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last_step: int | None = None
        self._past = _Past()

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row and fsync it, so that no later checkpoint can be on disk without it.

        Raises ValueError for a row without an integer step, or one that does not come after the last row; and
        ``MantissaError`` when the disk is full or the file unwritable.
        """
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            raise ValueError(f"a row needs an integer 'step', not {step!r}")
        if self._last_step is None:
            self._drop_torn_line()
            rows = self.read()
            self._last_step = rows[-1]["step"] if rows else step - 1
        if step <= self._last_step:
            raise ValueError(
                f"{self.path.name}: step {step} after step {self._last_step}; truncate before writing again"
            )
        line = (encode(row) + "\n").encode()
        with disk_errors(self.path), open_own(self.path) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except OSError:
                if self.path.is_file():
                    file.truncate(end)
                raise
        self._last_step = step

    def read(self) -> list[Row]:
        """All rows. A last line that a kill cut short is left out; damage anywhere else is a ``MantissaError``, and so
        are values that no row has (``decode``) and steps that do not rise."""
        if not self._size():
            return []
        rows: list[Row] = []
        with opened(self.path) as file:
            for place, line in enumerate(file, start=1):
                if line.endswith(b"\n"):  # else it was never finished
                    rows.append(self._row(line[:-1], place, rows[-1]["step"] if rows else -1))
        return rows

    def digest(self, step: int, lasting: Callable[[Row], Row]) -> str | None:
        """SHA-256 of what of the rows up to ``step`` is ``lasting``, each as ``encode`` writes it and lines between;
        None where there are none. What was read for an earlier step is not read again."""
        if self._past.step > step or self._size() < self._past.bytes:
            self._past = _Past()
        if not self._size():
            return None
        with self.path.open("rb") as file:
            file.seek(self._past.bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                row = self._row(line[:-1], self._past.rows + 1, self._past.step)
                if row["step"] > step:
                    break
                self._past.add(row["step"], len(line), encode(lasting(row)))
        return self._past.sha256.hexdigest() if self._past.rows else None

    def _size(self) -> int:
        """Bytes that there are to read; ``MantissaError`` for what is no file, or one too large."""
        if not self.path.exists():
            return 0
        if not regular_file(self.path):
            raise MantissaError(f"{self.path}: expected a file, found a folder; move it away")
        return require_size(self.path, _LARGEST)

    def _row(self, line: bytes, place: int, last: int) -> Row:
        """The row of a line; ``last``: the step of the row before."""
        try:
            row = decode(line)
        except UnusualValueError as error:
            raise MantissaError(f"{self.path}, line {place}: {error}; delete the line, or restore the file") from None
        except ValueError:
            raise MantissaError(
                f"{self.path}, line {place}: expected a row of JSON with a step, got {line[:60]!r}; "
                "delete the line, or restore the file"
            ) from None
        if row["step"] <= last:
            raise MantissaError(
                f"{self.path}, line {place}: expected a step after {last}, got {row['step']}; delete the line, or "
                "restore the file"
            )
        return row

    def truncate(self, step: int) -> None:
        """Keep the rows up to and including ``step``, atomically."""
        rows = [row for row in self.read() if row["step"] <= step]
        write_atomically(self.path, "".join(encode(row) + "\n" for row in rows))
        self._last_step, self._past = None, _Past()

    def _drop_torn_line(self) -> None:
        """Cut what follows the last newline, or the next row would be glued to it."""
        if not self.path.is_file():
            return
        with disk_errors(self.path), open_own(self.path) as file:
            file.seek(0)
            data = file.read()
            file.truncate(data.rfind(b"\n") + 1)


def encode(row: Mapping[str, Any]) -> str:
    """One row as one line of strict JSON. Raises TypeError for values that are not numbers, strings, bools or None."""
    for key, value in row.items():
        if not isinstance(value, bool | int | float | str | None) or (isinstance(value, str) and value in _NON_FINITE):
            raise TypeError(f"{key}: expected a plain number or string, got {type(value).__name__}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise TypeError(f"{key}: expected a plain number of at most 64 bits, got {describe_value(value)}")
    return json.dumps(in_words(row), allow_nan=False)


def decode(line: bytes) -> Row:
    """The row that ``encode`` wrote. Raises ValueError for anything else, ``UnusualValueError`` where it is a row.

    This is where values are judged, once for whoever reads rows: a name with a slash is a metric, and so a number (or
    None); whole numbers fit into 64 bits, text is whole, and nothing is a list or an object.
    """
    row = parse_json(line, ROW)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError("not a row with a step")
    if not number(row["step"], 0, LARGEST_SIZE, whole=True):
        raise UnusualValueError("step", row["step"], f"a whole number from 0 to {LARGEST_SIZE:,}")
    for key, value in row.items():
        kind = type(value)
        if kind is float or value is None or kind is bool:
            continue
        if kind is int:
            if not -(2**63) <= value < 2**63:
                raise UnusualValueError(key, value, "a number of at most 64 bits")
        elif kind is not str or ("/" in key and key not in _LABELS and value not in _NON_FINITE):
            raise UnusualValueError(key, value, "a number")
        elif value in _NON_FINITE:
            row[key] = _NON_FINITE[value]
        elif not whole_text(value):
            raise UnusualValueError(key, value, "whole text")
    return row


class UnusualValueError(ValueError):
    """A row with a value that it cannot have."""

    def __init__(self, name: str, value: Any, expected: str) -> None:
        super().__init__(f"{ascii(name)[1:-1]}: expected {expected}, got {describe_value(value)}")


def in_words(value: Any) -> Any:
    """``value`` with the words for numbers that are not finite, in dicts and lists too."""
    if isinstance(value, Mapping):
        return {key: in_words(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [in_words(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def from_words(value: Any) -> Any:
    """What ``in_words`` was given."""
    if isinstance(value, dict):
        return {key: from_words(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_words(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
