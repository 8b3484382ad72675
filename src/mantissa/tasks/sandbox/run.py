"""The outside of the sandbox: runs a program on inputs and brings back what it returned, or how it ended.

What runs inside, and what it is deprived of, is in ``mantissa.base.jail``. Here is the part that must not be believed
blindly: ``probe`` runs a program that tries what programs must not do, against a listener, a file, a terminal and a
process that this side watches, and ``Isolation`` states what was found.

A verdict cannot be printed by a program: it sends back values, and the expected ones never enter the sandbox. An input
enters it once the value for the one before has come. To forge a pass it must return the right values, which is to pass.
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
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

from mantissa.base import jail
from mantissa.base.errors import MantissaError
from mantissa.base.readers.child import Limits, cause_of_death
from mantissa.base.readers.json import VALUE, parse_json

_LONGEST_NAME = 200  # characters of an exception's
_DEEPEST = 300  # lists within lists in a value; Python's own stack ends at a thousand
_JAIL = Path(jail.__file__)
_GRACE_S = 5.0  # for an answer of the server, which has nothing to wait for: it is then no longer what it was
_START_S = 60.0


PROGRAM = Limits(wall_s=2.0, cpu_s=2, memory_bytes=256 * 2**20, output_bytes=2**18)


def limits_of(seconds: float, mib: int) -> Limits:
    """What one program may take, in seconds of the clock and mebibytes; of the processor a second more."""
    return replace(PROGRAM, wall_s=seconds, cpu_s=int(seconds) + 1, memory_bytes=mib * 2**20)


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
    """What the probe found: what programs cannot do on this machine, what they can, and by what means."""

    cannot: tuple[str, ...]
    can: tuple[str, ...]
    layers: tuple[str, ...]

    def describe(self) -> str:
        """One line, of what was tried and not assumed."""
        can = f"; can {', '.join(self.can)}" if self.can else ""
        return (
            f"code sandbox: programs cannot {', '.join(self.cannot) or 'be kept from anything'}{can} "
            f"(tried; {', '.join(self.layers)})"
        )


class Sandbox:
    """A server process that runs programs one after another. Started on first use; ``close`` ends it.

    Where it dies or falls silent it is replaced, and the program at hand ends with ``sandbox lost``.
    """

    def __init__(self, limits: Limits = PROGRAM) -> None:
        self.limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None  # to the process
        self._layers: tuple[str, ...] = ()
        self._owner = os.getpid()

    def run(self, source: str, function: str, inputs: Sequence[Sequence[Any]]) -> Outcome:
        """Execute ``source``, then call its ``function`` with each of ``inputs``; arguments and values are JSON's."""
        try:
            control = self._started()
            (theirs_in, mine_in), (mine_out, theirs_out) = os.pipe(), os.pipe()
            with open(mine_in, "wb", buffering=0) as into, open(mine_out, "rb", buffering=0) as out:
                try:
                    socket.send_fds(control, [b"r"], [theirs_in, theirs_out])
                finally:
                    os.close(theirs_in)
                    os.close(theirs_out)
                ended, values = _talk(into, out, self.limits, {"source": source, "function": function}, inputs)
            control.send(b"c" if ended == "closed" else b"k")
            (status,) = struct.unpack("=i", control.recv(4))
        except (ConnectionError, struct.error, TimeoutError):  # struct: it said nothing more
            self.close()
            return Outcome("sandbox lost", ())
        except BaseException:  # interrupted half-way, its next answer would be to this question
            self.close()
            raise
        if ended == "closed":
            ended = "returned" if status == 0 else cause_of_death(status)
        return Outcome(ended, tuple(values))

    def probe(self) -> Isolation:
        """Try, inside, what programs must not do (``_PROBE``), on things of this process that it can watch."""
        idle = [sys.executable, "-I", "-S", "-c", "input()"]
        victim = subprocess.Popen(idle, stdin=subprocess.PIPE, env={"SECRET": "told"})
        with tempfile.TemporaryDirectory() as folder, socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
            os.chmod(folder, 0o777)
            Path(folder, "secret").write_text("told")
            tcp.bind(("127.0.0.1", 0))
            unix.bind(f"{folder}/listener")
            for listener in (tcp, unix):
                listener.listen(1)
                listener.setblocking(False)
            terminal = _terminal()
            argument = {"port": tcp.getsockname()[1], "folder": folder, "victim": victim.pid}
            argument["terminal"] = os.ttyname(terminal[1]) if terminal else "/dev/tty"
            try:
                outcome = self.run(_PROBE, "probe", [[argument]] * 2)
                values = [output.get("value") for output in outcome.outputs]
                if len(values) != 2 or not isinstance(values[0], dict):
                    raise MantissaError(
                        f"the code sandbox does not work here: its probe ended with {outcome.ended} {outcome.outputs}; "
                        "it needs Linux, and room for a Python process in its memory limit"
                    )
                did: dict[str, bool] = values[0]
                did["reach the network"] |= _accepted(tcp) or _accepted(unix)
                did["write files"] |= sorted(os.listdir(folder)) != ["listener", "secret"]
                with suppress(subprocess.TimeoutExpired):
                    victim.wait(0.05)
                    did["signal other processes"] = True
                can = tuple(what for what, done in did.items() if done)
                return Isolation(tuple(what for what in did if what not in can), can, self._layers)
            finally:
                for end in terminal:
                    os.close(end)
                victim.kill()
                victim.communicate()

    def close(self) -> None:
        """End the server and whatever runs in it. Safe to call twice."""
        process, self._process = self._process, None
        atexit.unregister(self.close)
        if process is None or os.getpid() != self._owner:  # a forked child inherits the object, not the process
            return
        if self._control is not None:
            self._control.close()
        process.send_signal(signal.SIGKILL)  # the server dies with its outer process, and its programs with it
        process.wait()

    def _started(self) -> socket.socket:
        if self._process is not None and self._control is not None and self._process.poll() is None:
            return self._control
        self.close()
        # What -I does but for ignoring the environment, of which one variable is given: sets have the same order in
        # every run, or a resumed run would not repeat its rewards.
        command = [sys.executable, "-P", "-s", "-S", str(_JAIL), json.dumps(asdict(self.limits))]
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._control = control
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
        atexit.register(self.close)
        control.settimeout(_START_S)
        hello = parse_json(control.recv(4096) or "{}")
        control.settimeout(_GRACE_S)
        if not hello:
            raise BrokenPipeError
        layers = {
            f"namespaces of {' '.join(hello['namespaces'])}": hello["namespaces"],
            "Landlock": hello["landlock"],
            "system-call filter": hello["filter"],
            "no capabilities": hello["dropped"],
            "resource limits": True,
        }
        self._layers = tuple(name for name, held in layers.items() if held)
        return control


def _talk(
    into: FileIO, out: FileIO, limits: Limits, program: dict[str, str], inputs: Sequence[Sequence[Any]]
) -> tuple[str, list[dict[str, Any]]]:
    """Send a program and its first input, and each other once the value for the one before has come, as lines of JSON.

    How it ended, and its values; ``closed`` where the program closed its pipe, as by ending.
    """
    os.set_blocking(into.fileno(), False)
    lines, values = [f"{json.dumps(each)}\n".encode() for each in (program, *inputs)], list[dict[str, Any]]()
    unsent, unread, most = memoryview(b"".join(lines[:2])), bytearray(), limits.output_bytes
    deadline = time.monotonic() + limits.wall_s
    while (left := deadline - time.monotonic()) > 0:
        if not unsent and len(values) == len(inputs):
            into.close()  # there is nothing more to do
        readable, writable, _ = select.select([out], [into] if unsent else [], [], left)
        if writable:
            try:
                unsent = unsent[into.write(unsent) or 0 :]
            except BrokenPipeError:
                unsent = memoryview(b"")  # it reads no more; what it wrote before may still come
        if readable:
            data = out.read(65536)
            if not data:
                return "closed", values
            most -= len(data)
            if most < 0:
                return "too much output", values
            unread += data
            while b"\n" in unread:
                line, _, unread = unread.partition(b"\n")
                value = _parsed(bytes(line))
                if unsent or value is None or len(values) == len(inputs):
                    return "spoke out of turn", values
                values.append(value)
                unsent = memoryview(b"".join(lines[len(values) + 1 :][:1]))
    return "out of time", values


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A line that a program wrote; None where it is not what the jail would have written for it."""
    try:
        value = parse_json(line, VALUE)
    except ValueError:
        return None
    if not isinstance(value, dict) or value.keys() not in ({"value"}, {"error"}):
        return None
    if "error" in value:  # an exception's name; what wrote another text here is not the jail
        name = value["error"]
        return value if isinstance(name, str) and len(name) <= _LONGEST_NAME and name.isprintable() else None
    return value if _shallow(value, _DEEPEST) else None


def _shallow(value: Any, levels: int) -> bool:
    """Whether lists and dictionaries lie at most so many levels deep: who writes ``value`` again needs a stack too."""
    layer = [value]
    while layer and levels:
        inner = [part for each in layer for part in (each.values() if isinstance(each, dict) else each)]
        layer, levels = [part for part in inner if isinstance(part, (list, dict))], levels - 1
    return not layer


def _terminal() -> tuple[int, ...]:
    """Both ends of a new terminal; nothing where none can be had."""
    try:
        return os.openpty()
    except OSError:
        return ()


def _accepted(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


_PROBE = """
import ctypes, os, signal, socket

def succeeds(*actions):
    for action in actions:
        try:
            if action() is not False:
                return True
        except (OSError, ImportError):
            pass
    return False

def reads(path):
    with open(path, "rb") as file:
        return file.read(1)

def probe(a):
    folder, victim = a["folder"], a["victim"]
    libc = ctypes.CDLL(None)

    def connect(family, address, kind=socket.SOCK_STREAM):
        with socket.socket(family, kind) as s:
            s.settimeout(0.5)
            s.connect(address)

    def process():
        if os.fork() == 0:
            os._exit(0)

    def write():
        with open(folder + "/written", "w") as file:
            file.write("x")

    def on_input(fd):  # a signal to the victim whenever something comes through the pipe
        import fcntl
        fcntl.fcntl(fd, 8, victim), fcntl.fcntl(fd, 10, signal.SIGTERM)  # F_SETOWN, F_SETSIG
        fcntl.fcntl(fd, 4, 0o20000 | fcntl.fcntl(fd, 3))  # F_SETFL, O_ASYNC
        return False  # whether it comes is for the other side to see

    return {
        "read files": succeeds(
            lambda: reads(folder + "/secret"),
            lambda: reads("/etc/passwd"),
            lambda: reads(os.__file__),
            lambda: reads("/proc/self/environ"),
            lambda: bool(os.listdir(folder)),
            lambda: bool(os.listdir("/")),
            lambda: __import__("mantissa"),
        ),
        "write files": succeeds(write, lambda: os.mkdir(folder + "/made"), lambda: os.unlink(folder + "/secret")),
        "reach the network": succeeds(
            lambda: connect(socket.AF_INET, ("127.0.0.1", a["port"])),
            lambda: connect(socket.AF_INET, ("127.0.0.1", 9), socket.SOCK_DGRAM),
            lambda: connect(socket.AF_UNIX, folder + "/listener"),
        ),
        "start processes": succeeds(process),
        "signal other processes": succeeds(
            lambda: os.kill(victim, signal.SIGTERM),
            lambda: on_input(3),
            lambda: on_input(4),
        ),
        "look into other processes": succeeds(
            lambda: reads(f"/proc/{victim}/environ"),
            lambda: reads(f"/proc/{victim}/mem"),
            lambda: libc.ptrace(16, victim, 0, 0) == 0,  # PTRACE_ATTACH
        ),
        "use a terminal": succeeds(
            lambda: os.close(os.open(a["terminal"], os.O_RDWR | os.O_NOCTTY)),
            lambda: os.close(os.open("/dev/tty", os.O_RDWR)),
            lambda: libc.ioctl(0, 0x540A, 1) == 0,  # TCXONC
        ),
    }
"""
