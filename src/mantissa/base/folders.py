"""A folder that one process writes, and that refuses other settings than those it was begun with."""

from __future__ import annotations

import fcntl
import os
import socket
import warnings
from collections.abc import Mapping
from errno import EAGAIN, EWOULDBLOCK
from pathlib import Path
from typing import Any, BinaryIO

from mantissa.base.errors import MantissaError
from mantissa.base.files import disk_errors, open_own


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
