"""The ranks of one machine, for a launcher that is elsewhere: started as ``torchrun`` starts them, watched, and ended.

The launcher has a ``Node`` on each machine (as an actor of Ray, whose methods it calls from afar), tells it to ``run``,
and calls ``beat`` every few seconds, which brings what the ranks have printed. That is a lease in both directions: a
launcher that gets no answer knows that the machine is lost, and a node that is not asked knows that its launcher is,
and ends its ranks, for they would go on writing a run that another may already have resumed.

Imports neither torch nor Ray: a node waits, and the ranks are processes of their own.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mantissa.base.environ import LAUNCHER, STORE, threads_each
from mantissa.base.readers.json import parse_json

_LOOK_S = 0.1
_GRACE_S = 5.0  # that a rank has to end by itself when told to
_MOST = 1 << 20  # bytes of output that one beat brings
_MESSAGE = 1 << 16  # bytes of what a rank says of its end


@dataclass(frozen=True)
class Failure:
    """How a rank failed. ``exitcode``: as ``subprocess`` has it, -9 where SIGKILL ended it; ``message``: its own."""

    exitcode: int
    pid: int
    message: str = ""


@dataclass(frozen=True)
class Share:
    """What one node runs. ``first``: the rank of its first process; ``store``: whether its ranks are all there are, and
    meet through a file of this node, so that no port is opened for it; else at ``master``, an address and a port."""

    first: int
    count: int
    world: int
    master: tuple[str, int] | None
    arguments: Sequence[str]  # of the command mantissa; "{folder}" is where ``files`` lie
    files: Mapping[str, str]
    cwd: str
    threads: int | None = None  # of each rank; None: an equal share of this machine's cores
    patience_s: float = 30.0


class Node:
    """The ranks of this machine. Its methods are called from several threads, ``run`` once."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mantissa-node-"))  # mode 0700
        self._output = self._folder / "output"
        self._output.touch()
        self._shown = 0
        self._told = threading.Event()
        self._beat = time.monotonic()

    def about(self, shared: str, cwd: str) -> dict[str, Any]:
        """What must be alike on all nodes: versions; and what this one sees of the folders that all must see."""
        packages = ("mantissa-rl", "torch", "numpy")
        versions = {"python": platform.python_version()}
        for name in packages:
            with suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        found: str | None = None
        with suppress(OSError, UnicodeDecodeError):
            found = Path(shared).read_text()
        return {"versions": versions, "found": found, "cwd": Path(cwd).is_dir()}

    def free_port(self, address: str) -> int:
        """A port of this machine that nobody listens on now."""
        with socket.socket() as found:
            found.bind((address, 0))
            return int(found.getsockname()[1])

    def run(self, share: Share) -> dict[int, Failure]:
        """Start this node's ranks and wait until all have ended; returns those that failed, by rank.

        They end by themselves, because one failed, because ``stop`` was called, or because nobody called ``beat`` for
        ``patience_s``.
        """
        self._beat = time.monotonic()
        for name, text in share.files.items():
            (self._folder / name).write_text(text)
        ranks: dict[int, subprocess.Popen[bytes]] = {}
        try:
            with self._output.open("ab") as output:
                for local in range(share.count):
                    ranks[share.first + local] = self._start(share, local, output)
            while any(process.poll() is None for process in ranks.values()):
                if self._told.is_set() or any(process.poll() for process in ranks.values()):
                    break
                if time.monotonic() - self._beat > share.patience_s:
                    break
                time.sleep(_LOOK_S)
            self._let_end(ranks)
        finally:
            _end(list(ranks.values()))
        return {rank: self._failure(rank, process) for rank, process in ranks.items() if process.returncode}

    def beat(self) -> str:
        """What the ranks have printed since the last call; the caller is still there."""
        self._beat = time.monotonic()
        with self._output.open("rb") as output:
            output.seek(self._shown)
            new = output.read(_MOST)
        whole = new[: new.rfind(b"\n") + 1] if b"\n" in new else new if len(new) == _MOST else b""
        self._shown += len(whole)
        return whole.decode(errors="replace")

    def rest(self) -> str:
        """What is left of the output when the ranks have ended; then the node's folder goes."""
        text = ""
        while new := self.beat():
            text += new
        with self._output.open("rb") as output:
            output.seek(self._shown)
            text += output.read().decode(errors="replace")
        shutil.rmtree(self._folder, ignore_errors=True)
        return text

    def stop(self) -> None:
        """Have ``run`` end its ranks."""
        self._told.set()

    def _start(self, share: Share, local: int, output: Any) -> subprocess.Popen[bytes]:
        rank = share.first + local
        arguments = [each.replace("{folder}", str(self._folder)) for each in share.arguments]
        environment = {name: value for name, value in os.environ.items() if name not in (STORE, "OMP_NUM_THREADS")}
        environment |= {
            LAUNCHER: str(os.getpid()),
            "RANK": str(rank),
            "WORLD_SIZE": str(share.world),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(share.count),
            "OMP_NUM_THREADS": str(share.threads or threads_each(share.count, said="")),
            "TMPDIR": str(self._folder),  # a rank that is killed cannot delete what it has there
            "TORCHELASTIC_ERROR_FILE": str(self._said(rank)),
        }
        if share.master is None:
            environment[STORE] = str(self._folder / "store")
        else:
            environment |= {"MASTER_ADDR": share.master[0], "MASTER_PORT": str(share.master[1])}
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "mantissa", *arguments],
            env=environment,
            cwd=share.cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # what a rank starts is ended with it
        )

    def _let_end(self, ranks: Mapping[int, subprocess.Popen[bytes]]) -> None:
        """Tell the ranks that still run to end, and wait for them a little."""
        for process in ranks.values():
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + _GRACE_S
        while any(process.poll() is None for process in ranks.values()) and time.monotonic() < end:
            time.sleep(_LOOK_S)

    def _failure(self, rank: int, process: subprocess.Popen[bytes]) -> Failure:
        said: Any = None
        with suppress(OSError, ValueError):
            said = parse_json(self._said(rank).read_bytes()[:_MESSAGE])
        message = said.get("message", "") if isinstance(said, dict) else ""
        return Failure(int(process.returncode), process.pid, str(message))

    def _said(self, rank: int) -> Path:
        return self._folder / f"said-{rank}.json"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill these and what they started."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
