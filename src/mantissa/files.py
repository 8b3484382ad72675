"""Files and folders that are either the old version or the new one, whatever kills the process and when.

The recipe is the usual one: write beside, fsync, rename over, fsync the folder. A rename inside one file system is
atomic, so a reader sees one whole version; the first fsync makes sure that the new name never points at data the disk
does not have yet, the second that the rename itself outlives a power cut. What a kill can leave behind is a temporary
beside the file, whose name starts with a dot and ends in ``.tmp``: ``remove_leftovers`` sweeps those.

Failures of the disk are the user's to mend (space, permissions), so they surface as one-line ``MantissaError``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, EDQUOT, EFBIG, EIO, ENAMETOOLONG, ENOSPC, ENOTDIR, EPERM, EROFS
from pathlib import Path

from mantissa.errors import MantissaError

_ADVICE = {
    ENOSPC: "free some space or choose another folder",
    EDQUOT: "free some of your quota or choose another folder",
    EFBIG: "raise the file size limit (ulimit -f) or choose another folder",
    EACCES: "change its permissions or choose another folder",
    EPERM: "change its permissions or choose another folder",
    EROFS: "it is on a read-only file system; choose another folder",
    ENOTDIR: "a part of this path is a file; choose another folder",
    ENAMETOOLONG: "choose a shorter name",
    EIO: "the disk reports a fault; choose another one",
}
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


def fsync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable: new files, renames, removals."""
    descriptor = os.open(folder, os.O_RDONLY)
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
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return leftovers


def give_usual_mode(path: Path) -> None:
    """Make ``path`` as readable as any new file is under the current umask (safetensors writes files as 0600)."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


@contextmanager
def atomic_file(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path to write a whole file to; when the block ends well it becomes ``path``, durably.

    When the block raises, the temporary is deleted and ``path`` is as it was. Full disks and missing permissions
    raise ``MantissaError``.
    """
    path = Path(path)
    temporary = temporary_beside(path)
    with disk_errors(path):
        try:
            yield temporary
            _fsync_file(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)


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
                _fsync_file(Path(folder) / name)
            fsync_folder(Path(folder))
        if not final.exists():
            os.rename(temporary, final)
            fsync_folder(final.parent)
            return
        aside = temporary_beside(final)
        if _exchange(temporary, final):
            os.rename(temporary, aside)  # a leftover's name, in case a kill interrupts its removal
        else:
            os.rename(final, aside)
            os.rename(temporary, final)
        fsync_folder(final.parent)
        shutil.rmtree(aside)


def _fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(left: Path, right: Path) -> bool:
    """Swap two names in one system call; False where this system cannot."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE) == 0
