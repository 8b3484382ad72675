"""The outside of the sandbox: runs a program on inputs and brings back what it returned, or how it ended.

What runs inside, and what it is deprived of, is in ``jail.py``. Here is the part that must not be believed blindly:
``probe`` runs a program that tries what programs must not do, against a listener and a file that only this side sees,
and ``Isolation`` states what was found, layer names included.

A verdict cannot be printed by a program: it sends back values, and the expected ones never enter the sandbox. To forge
a pass it must return the right value, which is to pass.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mantissa.errors import MantissaError

_JAIL = Path(__file__).with_name("jail.py")
_GRACE_S = 5.0  # beyond a program's own limit: the server is then no longer what it was


@dataclass(frozen=True)
class Limits:
    """Of one program: wall clock and CPU seconds, address space, bytes of what it returns."""

    wall_s: float = 2.0
    cpu_s: int = 2
    memory_bytes: int = 256 * 2**20
    output_bytes: int = 2**18


@dataclass(frozen=True)
class Outcome:
    """What came of one program.

    ``ended``: ``returned``, ``out of time``, ``too much output``, ``exit code 1``, ``SIGKILL`` (CPU), ...
    ``outputs``: for each input in order, ``{"value": ...}`` or ``{"error": type name}``; fewer where it ended early.
    """

    ended: str
    outputs: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Isolation:
    """What the probe found of the sandbox on this machine; True is what one wishes for."""

    no_network: bool
    no_processes: bool
    no_writes: bool
    no_signals: bool
    layers: tuple[str, ...]

    def describe(self) -> str:
        """One line: what programs can and cannot do here, tried and not assumed, and by what means."""
        found = {
            "reach the network": self.no_network,
            "start processes": self.no_processes,
            "write files": self.no_writes,
            "signal other processes": self.no_signals,
        }
        cannot = [what for what, kept in found.items() if kept]
        can = ["read files", *(what for what, kept in found.items() if not kept)]
        return (
            f"code sandbox: programs cannot {', '.join(cannot) or 'be kept from anything'}; can {', '.join(can)} "
            f"(tried; {', '.join(self.layers)})"
        )


class Sandbox:
    """A server process that runs programs one after another. Started on first use; ``close`` ends it.

    Where it dies or falls silent it is replaced, and the program at hand ends with ``sandbox lost``.
    """

    def __init__(self, limits: Limits = Limits()) -> None:
        self.limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._layers: tuple[str, ...] = ()
        self._owner = os.getpid()

    def run(self, source: str, function: str, inputs: Sequence[Sequence[Any]]) -> Outcome:
        """Execute ``source``, then call its ``function`` with each of ``inputs``; arguments and values are JSON's."""
        request = json.dumps({"source": source, "function": function, "inputs": inputs}).encode()
        try:
            process = self._started()
            self._send(process, request)
            deadline = time.monotonic() + self.limits.wall_s + _GRACE_S
            header = json.loads(self._receive(process, deadline))
            return Outcome(header["ended"], _parsed(self._receive(process, deadline)))
        except (BrokenPipeError, EOFError, TimeoutError):
            self.close()
            return Outcome("sandbox lost", ())
        except BaseException:
            self.close()  # interrupted half-way, its next answer would be to this question
            raise

    def probe(self) -> Isolation:
        """Try, inside, to connect to this process, to start one, to write a file and to send a signal."""
        victim = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
        with tempfile.TemporaryDirectory() as folder, socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
            os.chmod(folder, 0o777)
            tcp.bind(("127.0.0.1", 0))
            unix.bind(f"{folder}/listener")
            for listener in (tcp, unix):
                listener.listen(1)
                listener.setblocking(False)
            arguments = [tcp.getsockname()[1], f"{folder}/listener", f"{folder}/written", victim.pid]
            try:
                outcome = self.run(_PROBE, "probe", [arguments])
                if len(outcome.outputs) != 1 or not isinstance(outcome.outputs[0].get("value"), dict):
                    raise MantissaError(
                        f"the code sandbox does not work here: its probe ended with {outcome.ended} {outcome.outputs}; "
                        "it needs Linux, and room for a Python process in its memory limit"
                    )
                did: dict[str, bool] = outcome.outputs[0]["value"]
                reached = any(_accepted(listener) for listener in (tcp, unix))
                return Isolation(
                    no_network=not (reached or did["network"]),
                    no_processes=not did["process"],
                    no_writes=not (did["write"] or os.path.exists(f"{folder}/written")),
                    no_signals=not did["signal"] and victim.poll() is None,
                    layers=self._layers,
                )
            finally:
                victim.kill()
                victim.communicate()

    def close(self) -> None:
        """End the server and whatever runs in it. Safe to call twice."""
        process, self._process = self._process, None
        atexit.unregister(self.close)
        if process is None or os.getpid() != self._owner:  # a forked child inherits the object, not the process
            return
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        process.send_signal(signal.SIGKILL)  # the server dies with its outer process, and its programs with it
        process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        # What -I does but for ignoring the environment, of which one variable is given: sets have the same order in
        # every run, or a resumed run would not repeat its rewards.
        command = [sys.executable, "-P", "-s", "-S", str(_JAIL), json.dumps(asdict(self.limits))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0"},
            bufsize=0,
            start_new_session=True,
        )
        atexit.register(self.close)
        hello = json.loads(self._receive(self._process, time.monotonic() + 60))
        self._layers = (
            *([f"namespaces of {' '.join(hello['namespaces'])}"] if hello["namespaces"] else []),
            *(["system-call filter"] if hello["filter"] else []),
            *(["no capabilities"] if hello["dropped"] else []),
            "resource limits",
        )
        return self._process

    def _send(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        assert process.stdin is not None
        view = memoryview(struct.pack(">I", len(data)) + data)
        while view:
            view = view[process.stdin.write(view) :]

    def _receive(self, process: subprocess.Popen[bytes], deadline: float) -> bytes:
        (length,) = struct.unpack(">I", self._exactly(process, 4, deadline))
        return self._exactly(process, length, deadline)

    def _exactly(self, process: subprocess.Popen[bytes], count: int, deadline: float) -> bytes:
        assert process.stdout is not None
        data = bytearray()
        while len(data) < count:
            if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            part = process.stdout.read(count - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


def _parsed(data: bytes) -> tuple[dict[str, Any], ...]:
    """The lines a program wrote, up to the first that is not what the jail would have written for it."""
    outputs = []
    for line in data.split(b"\n")[:-1]:  # what follows the last newline was cut off
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(value, dict) or not ({"value"} == value.keys() or {"error"} == value.keys()):
            break
        outputs.append(value)
    return tuple(outputs)


def _accepted(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


_PROBE = """
import os, signal, socket

def succeeds(action):
    try:
        action()
    except OSError:
        return False
    return True

def probe(port, listener, path, victim):
    def tcp():
        with socket.socket() as s:
            s.settimeout(0.5)
            s.connect(("127.0.0.1", port))

    def unix():
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(listener)

    def process():
        if os.fork() == 0:
            os._exit(0)

    def write():
        with open(path, "w") as file:
            file.write("x")

    return {
        "network": succeeds(tcp) or succeeds(unix),
        "process": succeeds(process),
        "write": succeeds(write),
        "signal": succeeds(lambda: os.kill(victim, signal.SIGTERM)),
    }
"""
