"""Readers that a file has got the better of, for the process that they run in."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from mantissa.doctor.dump import Dump, Scored


def segfault(path: Path, framework: str | None) -> Dump:
    ctypes.string_at(0)
    raise AssertionError


def eat(path: Path, framework: str | None) -> Dump:
    held = []
    while True:
        held.append(bytearray(64 << 20))


def eat_and_wrap(path: Path, framework: str | None) -> Dump:
    from mantissa.base.bounds import boundary

    with boundary(path, "write it again"):
        return eat(path, framework)


def spin(path: Path, framework: str | None) -> Dump:
    while True:
        pass


def sleep(path: Path, framework: str | None) -> Dump:
    time.sleep(600)
    raise AssertionError


def dribble(path: Path, framework: str | None) -> Dump:
    """A byte now and then of an answer that could go on for years."""
    (pipe,) = (number for number in range(3, 16) if _writable(number))
    os.write(pipe, b"a" + (1 << 30).to_bytes(8, "little"))
    while True:
        os.write(pipe, b"x")
        time.sleep(0.05)


def _writable(number: int) -> bool:
    try:
        return os.write(number, b"") == 0
    except OSError:
        return False


def answer(path: Path, framework: str | None) -> Dump:
    """What the file holds, in place of an answer."""
    for pipe in range(3, 16):  # the one that stdout was
        try:
            os.write(pipe, path.read_bytes())
        except OSError:
            continue
    os._exit(0)


def stray(path: Path, framework: str | None) -> Dump:
    """Do what reading does not need, and say what succeeded as the notes of a dump."""

    def write() -> None:
        (path.parent / "written").write_text("x")

    def connect() -> None:
        socket.create_connection(("127.0.0.1", 9), 0.5)

    def fork() -> None:
        if os.fork() == 0:
            os._exit(0)

    def thread() -> None:
        import threading

        threading.Thread(target=int).start()

    def shared_memory() -> None:
        raised = ctypes.CDLL(None, use_errno=True).shmget(0, 4096, 0o1600)
        if raised < 0:
            raise OSError(ctypes.get_errno(), "shmget")

    parent = os.getppid()
    tried: dict[str, Any] = {
        "read": lambda: path.read_bytes(),
        "thread": thread,
        "write": write,
        "connect": connect,
        "fork": fork,
        "start": lambda: subprocess.run(["/bin/true"], check=True),
        "environ": lambda: Path(f"/proc/{parent}/environ").read_bytes(),
        "maps": lambda: Path(f"/proc/{parent}/maps").read_bytes(),
        "limit": lambda: resource.prlimit(parent, resource.RLIMIT_CORE),
        "pace": lambda: os.setpriority(os.PRIO_PROCESS, parent, 5),
        "own pace": lambda: os.nice(1),
        "pin": lambda: os.sched_setaffinity(parent, {0}),
        "shared memory": shared_memory,
        "pipe": os.pipe,
        "truncate": lambda: os.close(os.open(path, os.O_RDONLY | os.O_TRUNC)),
        "signal": lambda: os.kill(os.getppid(), signal.SIGCONT),
    }
    did = []
    for name, action in tried.items():
        try:
            action()
        except ConnectionRefusedError:
            did.append(name)
        except OSError:
            continue
        else:
            did.append(name)
    one = Scored(np.arange(2), 1, np.zeros(1), np.zeros(1), np.ones(1, dtype=bool))
    return Dump("plain", path, [one], notes=tuple(did))
