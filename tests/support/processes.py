"""Processes as the kernel lists them (Linux), for tests of who is left behind."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _read(path: Path) -> str:
    """A file of the kernel's on a process, or nothing where that has ended meanwhile."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _entries(folder: Path) -> list[Path]:
    """What a folder of the kernel's on a process holds, or nothing where that has ended meanwhile. A pattern would ask
    about each entry and fail where one ends between the list and the question (ESRCH, which ``glob`` does not
    expect)."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1] not in ([], ["Z"])


def children(pid: int) -> list[int]:
    """The living processes that ``pid`` started, oldest first."""
    of_threads = [_read(thread / "children").split() for thread in _entries(Path(f"/proc/{pid}/task"))]
    return sorted(child for each in of_threads for child in map(int, each) if alive(child))


def descendants(pid: int) -> dict[int, str]:
    """The living processes that ``pid`` started, and those that they started; by their names."""
    found: dict[int, str] = {}
    for child in children(pid):
        if name := _read(Path(f"/proc/{child}/comm")).strip():
            found |= {child: name} | descendants(child)
    return found


def until(condition: Callable[[], bool], process: subprocess.Popen[Any] | None = None, seconds: float = 900) -> None:
    """Wait for ``condition``, as long as ``process`` runs."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to pass"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def told(err: str) -> str:
    """What a command said on stderr, without what is at work, which a slow machine says after three seconds."""
    at_work = ("loading the model and proving its kernels\n", "drawing the report\n")
    return "".join(line for line in err.splitlines(keepends=True) if line not in at_work)
