"""The one process for what a library reads of a stranger's and nothing here can meter: a fault in it costs one line.

Parquet, pickles, chat templates and whatever the doctor is given are read there: by name (``reader``, MODULE:NAME), a
function whose parts of an answer come back through a pipe, as JSON or as the bytes of arrays. Nothing in an answer is
executed or unpickled; it is counted before anything is made of it. The reader crashes, hangs, eats memory or writes
garbage: each is one ``MantissaError``.

The inside is a fresh interpreter, so that nothing of the command lies in its memory. Before it is asked anything it
has, in this order: no core dump, no file to write to, a limit on the address space beyond what its imports took; a
user namespace of its own, where the kernel grants it, and no capability, root's neither; Landlock, where the kernel
has it: no file made, changed or started; a system-call filter (x86_64 and aarch64) that allows what reading needs and
nothing else: files opened to read, threads, its own limits. It may read what its user may, since a dump is a folder and
libraries load parts of themselves late; what it read cannot leave but through its pipe.

``lent`` gives one that is idle, or a new one, to one thread at a time; it ends itself soon after it was last asked.

A question is a line of JSON: ``[reader, arguments]``. An answer is frames: a letter, the bytes that follow (8 bytes,
little-endian), and those. ``j``: JSON; ``a``: an array; ``e``: the text of the reader's ``MantissaError``; ``m``: it
ran out of memory; ``.``: the end, and once before the first question: it is ready.

What one file did to a reader, the next that the same child reads may feel: its values, not this process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from mantissa.base import jail
from mantissa.base.bounds import Budget, address_space, available_memory, require_memory, spending
from mantissa.base.bounds import Limits as Document
from mantissa.base.errors import MantissaError, missing
from mantissa.base.readers.json import parse_json

LONGEST_TEXT = 2000  # of an error
_ADVICE = "it is damaged, or was made to break readers; write it again, or give a part of it"
_FRAME = struct.Struct("<cQ")
_PART = Document(256 << 20, 1 << 40, 40_000_000, digits=4300)  # of JSON; its levels are what Python's own stack bears
_TICK_S = 0.5
_START_S = 120.0  # on a busy machine
_IDLE_S = 20.0  # after which one is not asked again
_CODE = "import sys; sys.path[:] = {path!r}; from mantissa.base.readers.child import main; main()"
# One thread: each takes an address space of its own, and a reader has no use for more.
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ARROW_IO_THREADS"), "1") | {
    "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """Of one answer: seconds of waiting for it, CPU seconds, address space beyond what imports took, bytes."""

    wall_s: float = 600.0
    cpu_s: int = 300
    memory_bytes: int = 3 << 29
    output_bytes: int = 4 << 30


def cause_of_death(exit_code: int) -> str:
    """How a process ended, by its exit code, minus a signal."""
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"


class Child:
    """A process that reads. ``imports``: modules that it loads while nothing is limited. ``ask``, then read ``parts``
    to their end, which whoever asks again must have done; ``close`` ends it."""

    def __init__(self, imports: Iterable[str] = (), limits: Limits = Limits()) -> None:
        free = available_memory()
        self.limits, self.busy, self.rested, self._ready = limits, False, time.monotonic(), False
        self._memory = limits.memory_bytes if free is None else min(limits.memory_bytes, free)
        inner = json.dumps({"memory_bytes": self._memory, "cpu_s": limits.cpu_s})
        code = _CODE.format(path=[place or os.getcwd() for place in sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, inner, *imports], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, bufsize=0, env=_ENVIRONMENT,
        )  # fmt: skip

    def ask(self, reader: str, where: object, *arguments: Any) -> None:
        """Have ``reader`` called with the arguments, plain values. ``where`` begins what is said of a failure."""
        self.busy, self._where = True, where
        self._patience_s = self.limits.wall_s if self._ready else _START_S
        pipe = self.process.stdin
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended: why is known when its answer is read
                question = memoryview(json.dumps([reader, arguments]).encode() + b"\n")
                while question:
                    question = question[pipe.write(question) or 0 :]

    def parts(self, spent: Budget | None = None, tick: Callable[[str], None] = lambda line: None) -> Iterator[Any]:
        """What comes, each part as it comes: JSON's values; arrays as a ``bytearray``. Their bytes are drawn from
        ``spent``. ``tick`` is told twice a second how far it is.

        ``MantissaError`` with the reader's own words, or with how its process ended.
        """
        left = self.limits.output_bytes
        if not self._ready:
            self._ready = bool(self._bytes(_FRAME.size, tick))
            self._patience_s = self.limits.wall_s
        while True:
            kind, size = _FRAME.unpack(self._bytes(_FRAME.size, tick))
            if kind not in (b"j", b"a", b"e", b"m", b".") or (kind == b"e" and size > 6 * LONGEST_TEXT + 2):
                raise self.garbage("an answer that is none")
            left -= size
            if left < 0 or (kind == b"j" and size > _PART.bytes):
                most = self.limits.output_bytes if left < 0 else _PART.bytes
                raise MantissaError(f"{self._where}: its reader gave more than {most:,} bytes; {_ADVICE}")
            require_memory(size, str(self._where), "give a part of it")
            if spent is not None:
                spent.draw("made", size, self._where)
            data = self._bytes(size, tick)
            if kind == b"a":
                yield data
                continue
            if kind == b"j":
                yield self._json(data)
                continue
            self.busy, self.rested = False, time.monotonic()
            if kind == b".":
                return
            if kind == b"m":
                raise MantissaError(
                    f"{self._where}: its reader used more than {describe_bytes(self._memory)}; {_ADVICE}"
                )
            said = self._json(data)
            raise MantissaError(said if isinstance(said, str) else self.garbage("an error without words"))

    def garbage(self, what: str) -> MantissaError:
        """What is said of an answer that is not what was asked for."""
        return MantissaError(f"{self._where}: its reader gave {what}; {_ADVICE}")

    def close(self) -> None:
        """End it. Safe to call twice."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _json(self, data: bytearray) -> Any:
        try:
            return parse_json(bytes(data), _PART)
        except ValueError:
            raise self.garbage("an answer that is no JSON") from None

    def _bytes(self, count: int, tick: Callable[[str], None]) -> bytearray:
        """So many bytes of the answer."""
        found = bytearray(count)
        view, pipe = memoryview(found), self.process.stdout
        while view and pipe is not None:
            while not self._waited(pipe):
                tick(f"reading {self._where}{self._place()}")
            got = os.readv(pipe.fileno(), [view])
            if not got:
                raise self._ended()
            view = view[got:]
        return found

    def _waited(self, pipe: IO[bytes]) -> bool:
        """Whether something has come. Seconds are those of waiting: how long this side takes for what came is its own
        affair."""
        began = time.monotonic()
        came = bool(select.select([pipe], [], [], max(0.0, min(_TICK_S, self._patience_s)))[0])
        self._patience_s -= time.monotonic() - began
        if self._patience_s <= 0:
            raise MantissaError(f"{self._where}: its reader took longer than {self.limits.wall_s:g} s; {_ADVICE}")
        return came

    def _place(self) -> str:
        """Where the process is in the file that it has open; nothing where the system does not say."""
        about = Path(f"/proc/{self.process.pid}")
        with contextlib.suppress(OSError, ValueError, IndexError):
            within = str(Path(str(self._where)).resolve())
            for each in (about / "fd").iterdir():
                file = os.readlink(each)
                if file.startswith(within):
                    at = int((about / "fdinfo" / each.name).read_text().split()[1])
                    return f": {Path(file).name}, {describe_bytes(at)} of {describe_bytes(os.stat(file).st_size)}"
        return ""

    def _ended(self) -> MantissaError:
        """Why the answer ended early."""
        try:
            code = self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            return self.garbage("half an answer")
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            spent = f"used more than {self.limits.cpu_s} s of processor time"
            said = spent if code == -signal.SIGXCPU else f"{spent}, or was killed by another, as where memory runs out"
            return MantissaError(f"{self._where}: its reader {said}; {_ADVICE}")
        if code == 0:
            return self.garbage("no whole answer")
        return MantissaError(f"{self._where}: its reader crashed ({cause_of_death(code)}); {_ADVICE}")


_idle: dict[tuple[int, tuple[str, ...], Limits], list[Child]] = {}  # by the process that they are of, and their kind
_lock = threading.Lock()
inside = False  # whether this process is such a child, which reads by itself


@contextlib.contextmanager
def lent(*imports: str, limits: Limits = Limits()) -> Iterator[Child]:
    """A child of this kind for the block: an idle one, or a new one."""
    kind = os.getpid(), imports, limits
    with _lock:
        there, now = _idle.setdefault(kind, []), time.monotonic()
        child = there.pop() if there else None
    if child is not None and (now - child.rested > _IDLE_S or child.process.poll() is not None):
        child.close()
        child = None
    child = child or Child(imports, limits)
    try:
        yield child
    finally:
        if child.busy:
            child.close()
        else:
            with _lock:
                there.append(child)


@atexit.register
def close_idle() -> None:
    """End the children that nobody has."""
    for kind in [kind for kind in _idle if kind[0] == os.getpid()]:
        for child in _idle.pop(kind):
            child.close()


def describe_bytes(count: int) -> str:
    """A count in GiB or MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count >> 20} MiB"


# the inside


def main() -> None:
    """Give up what ``confine`` does, then answer questions until there are none, or none comes for long."""
    global inside
    limits, *imports = sys.argv[1:]
    bounds = parse_json(limits)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    for name in imports:
        with contextlib.suppress(ModuleNotFoundError):  # the reader that asks for it says which extra brings it
            importlib.import_module(name)
    gc.freeze()
    gc.disable()  # rows make no circles, and looking for some takes a tenth of the time
    confine(bounds["memory_bytes"])
    inside = True
    _send(out, b".")
    out.flush()
    while select.select([0], [], [], 2 * _IDLE_S)[0] and (line := sys.stdin.buffer.readline()):
        reader, arguments = parse_json(line, _PART)
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu = int(used.ru_utime + used.ru_stime) + bounds["cpu_s"]
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        _answer(out, reader, arguments)
        gc.collect()


def _answer(out: BinaryIO, reader: str, arguments: list[Any]) -> None:
    module, _, name = reader.partition(":")
    try:
        with spending():
            for part in getattr(importlib.import_module(module), name)(*arguments):
                if hasattr(part, "dtype"):
                    _send(out, b"a", part.data)
                else:
                    _send(out, b"j", json.dumps(part, ensure_ascii=False).encode(errors="surrogatepass"))
    except MantissaError as error:
        _send(out, b"m") if _ran_out(error) else _send(out, b"e", _text(str(error)))
    except MemoryError:
        _send(out, b"m")
    except ModuleNotFoundError as error:
        if (refusal := missing(error)) is None:
            raise
        _send(out, b"e", _text(str(refusal)))
    else:
        _send(out, b".")
    out.flush()


def _send(out: BinaryIO, kind: bytes, data: Any = b"") -> None:
    out.write(_FRAME.pack(kind, memoryview(data).nbytes))
    out.write(data)


def _text(error: str) -> bytes:
    return json.dumps(error[:LONGEST_TEXT]).encode()


def confine(memory_bytes: int) -> None:
    """Limits and the layers that hold here; each that this kernel lacks is left out."""
    bounds = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_AS: (address_space() or 0) + memory_bytes,
    }
    for what, bound in bounds.items():
        hard = resource.getrlimit(what)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(what, (bound, bound))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(jail.NEWUSER)  # in a namespace of its own it may look into no process outside, of the same user either
    jail.drop_capabilities(libc)
    jail.forbid_files(libc, reading=True)
    code = jail.filter_program(os.uname().machine, reading=True)
    if code is not None:
        jail.install_filter(libc, code)


def _ran_out(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
