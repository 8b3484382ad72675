"""The one process for what a library reads of a stranger's and nothing here can meter: a fault in it costs one line.

Parquet, pickles, chat templates and whatever the doctor is given are read there: by name (``reader``, MODULE:NAME), a
function whose parts of an answer come back through a pipe, as JSON or as the bytes of arrays. Nothing in an answer is
executed or unpickled; it is counted before anything is made of it. The reader crashes, hangs, eats memory or writes
garbage: each is one ``MantissaError``.

A fresh interpreter, in which nothing of the command lies, imports libraries and reads nothing; for each ``source`` (a
file, or all completions of a run) it forks a process that does, and that ends before another source's begins: whatever
a file did to its reader, the next one is read
by none of it. Before it is asked anything that fork has, in this order: no core dump, no file to write to, a limit on
the address space beyond what imports took; a user namespace of its own, where the kernel grants it, and no capability,
root's neither; Landlock, where the kernel has it: no file made, changed or started; a system-call filter (x86_64 and
aarch64) that allows what reading needs and nothing else: files opened to read, threads, its own limits. It may read
what its user may, since a dump is a folder and libraries load parts of themselves late; what it read cannot leave but
through its pipe.

``lent`` gives one that is idle, or a new one, to one thread at a time; it ends itself soon after it was last asked.

A question is a line of JSON: ``[reader, arguments]``. An answer is frames: a letter, the bytes that follow (8 bytes,
little-endian), and those. ``j``: JSON; ``a``: an array; ``e``: the text of the reader's ``MantissaError``; ``m``: it
ran out of memory; ``.``: the end, and once before the first question: it is ready.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from mantissa.base import jail
from mantissa.base.bounds import Budget, address_space, available_memory, require_memory, spending
from mantissa.base.bounds import Limits as Document
from mantissa.base.errors import MantissaError, missing
from mantissa.base.readers.json import parse_json

LONGEST_TEXT = 2000  # of an error
_ADVICE = "it is damaged, or was made to break readers; write it again, or give a part of it"
_FRAME = struct.Struct("<cQ")
_PART = Document(256 << 20, 1 << 40, 40_000_000, digits=4300)  # of JSON; its levels are what Python's own stack bears
_LOOK = 16 << 20  # bytes that come between two looks at the machine's memory
_TICK_S = 0.5
_START_S = 120.0  # on a busy machine
_END_S = 5.0
_PIPE = 1 << 20  # bytes on their way
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
    """A process that reads one file, and the one it is forked from. ``imports``: modules that those load while nothing
    is limited. ``ask``, then read ``parts`` to their end, which whoever asks again must have done; ``close`` ends both.
    """

    def __init__(self, imports: Iterable[str] = (), limits: Limits = Limits(), source: str = "") -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = _CODE.format(path=[place or os.getcwd() for place in sys.path])
        nothing = subprocess.DEVNULL
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code, str(theirs.fileno())], stdin=nothing, stdout=nothing,
                stderr=nothing, env=_ENVIRONMENT, pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        self._fork(imports, limits, source)

    def _fork(self, imports: Iterable[str], limits: Limits, source: str) -> None:
        free = available_memory()
        self.kind, self.limits, self.busy, self._ready = (source, tuple(imports), limits), limits, False, False
        self.rested, self.pid = time.monotonic(), 0
        self._code: int | None = None
        self._memory = limits.memory_bytes if free is None else min(limits.memory_bytes, free)
        asked, self._questions = os.pipe()
        self._answers, answered = os.pipe()
        with contextlib.suppress(OSError):  # a user may have only so much
            fcntl.fcntl(answered, fcntl.F_SETPIPE_SZ, _PIPE)
        order = [self._memory, limits.cpu_s, *imports]
        with contextlib.suppress(BrokenPipeError):  # why is known when an answer is read
            socket.send_fds(self._control, [json.dumps(order).encode()], [asked, answered])
        os.close(asked)
        os.close(answered)

    def renew(self, imports: Iterable[str], limits: Limits, source: str) -> bool:
        """End the process that reads, and have another one forked; False where it does not end."""
        self._close_pipes()
        self._listen(_END_S)
        if self._code is None or self.process.poll() is not None:
            return False
        self._fork(imports, limits, source)
        return True

    def ask(self, reader: str, where: object, *arguments: Any) -> None:
        """Have ``reader`` called with the arguments, plain values. ``where`` begins what is said of a failure."""
        self.busy, self._where = True, where
        self._patience_s = self.limits.wall_s if self._ready else _START_S
        with contextlib.suppress(BrokenPipeError):  # it has ended: why is known when its answer is read
            question = memoryview(json.dumps([reader, arguments]).encode() + b"\n")
            while question:
                question = question[os.write(self._questions, question) :]

    def parts(self, spent: Budget | None = None, tick: Callable[[str], None] = lambda line: None) -> Iterator[Any]:
        """What comes, each part as it comes: JSON's values; arrays as a ``bytearray``. Their bytes are drawn from
        ``spent``. ``tick`` is told twice a second how far it is.

        ``MantissaError`` with the reader's own words, or with how its process ended.
        """
        left, unseen = self.limits.output_bytes, 0
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
            unseen += size
            if unseen > _LOOK:  # to ask what there is takes as long as a small part
                require_memory(size, str(self._where), "give a part of it")
                unseen = 0
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
        """End both. Safe to call twice."""
        self.process.kill()
        self.process.wait()
        self._control.close()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._questions, self._answers):
            if pipe >= 0:
                os.close(pipe)
        self._questions = self._answers = -1

    def _listen(self, seconds: float) -> None:
        """Take what comes within so long of the process that reads: ``pid``, then ``_code``, with which it ended."""
        while self._code is None and select.select([self._control], [], [], seconds)[0]:
            said = self._control.recv(64)
            if not self.pid and said:
                self.pid = int(said)
            else:
                self._code = int(said) if said else self.process.wait()

    def _json(self, data: bytearray) -> Any:
        try:
            return parse_json(bytes(data), _PART)
        except ValueError:
            raise self.garbage("an answer that is no JSON") from None

    def _bytes(self, count: int, tick: Callable[[str], None]) -> bytearray:
        """So many bytes of the answer."""
        found = bytearray(count)
        view = memoryview(found)
        while view:
            while not self._waited():
                tick(f"reading {self._where}{self._place()}")
            got = os.readv(self._answers, [view])
            if not got:
                raise self._ended()
            view = view[got:]
        return found

    def _waited(self) -> bool:
        """Whether something has come. Seconds are those of waiting: how long this side takes for what came is its own
        affair."""
        began = time.monotonic()
        came = bool(select.select([self._answers], [], [], max(0.0, min(_TICK_S, self._patience_s)))[0])
        self._patience_s -= time.monotonic() - began
        if self._patience_s <= 0:
            raise MantissaError(f"{self._where}: its reader took longer than {self.limits.wall_s:g} s; {_ADVICE}")
        return came

    def _place(self) -> str:
        """Where the process is in the file that it has open; nothing where the system does not say."""
        self._listen(0.0)
        about = Path(f"/proc/{self.pid}")
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
        self._listen(_END_S)
        if (code := self._code) is None:
            return self.garbage("half an answer")
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            spent = f"used more than {self.limits.cpu_s} s of processor time"
            said = spent if code == -signal.SIGXCPU else f"{spent}, or was killed by another, as where memory runs out"
            return MantissaError(f"{self._where}: its reader {said}; {_ADVICE}")
        if code == 0:
            return self.garbage("no whole answer")
        return MantissaError(f"{self._where}: its reader crashed ({cause_of_death(code)}); {_ADVICE}")


_idle: dict[int, list[Child]] = {}  # by the process that they are of
_lock = threading.Lock()
inside = False  # whether this process is such a child, which reads by itself


@contextlib.contextmanager
def lent(*imports: str, source: str, limits: Limits = Limits()) -> Iterator[Child]:
    """A child for the block, which reads ``source`` and has read nothing else: an idle one, or a new one."""
    kind = source, imports, limits
    with _lock:
        there, now = _idle.setdefault(os.getpid(), []), time.monotonic()
        place = next((place for place, each in enumerate(there) if each.kind == kind), -1)
        child = there.pop(place) if there else None
    if child is not None and (
        now - child.rested > _IDLE_S
        or child.process.poll() is not None
        or not (child.kind == kind or child.renew(imports, limits, source))
    ):
        child.close()
        child = None
    child = child or Child(imports, limits, source)
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
    for child in _idle.pop(os.getpid(), []):
        child.close()


def describe_bytes(count: int) -> str:
    """A count in GiB or MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count >> 20} MiB"


# the inside


def main() -> None:
    """Import what is asked for and fork a process that reads, one after the other, until there is nobody to ask or none
    asks for long; say its number, and with what it ended."""
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # rows make no circles, and looking for some takes a tenth of the time
    while select.select([control], [], [], 2 * _IDLE_S)[0]:
        order, pipes, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not order:
            return
        memory_bytes, cpu_s, *imports = parse_json(order)
        for name in imports:
            with contextlib.suppress(ModuleNotFoundError):  # the reader that asks for it says which extra brings it
                importlib.import_module(name)
        gc.freeze()
        ours = os.getpid()
        pid = os.fork()
        if not pid:
            control.close()
            asked, answered = pipes
            _read(asked, answered, ours, memory_bytes, cpu_s)
        for pipe in pipes:
            os.close(pipe)
        control.send(b"%d" % pid)
        control.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _read(asked: int, answered: int, parent: int, memory_bytes: int, cpu_s: int) -> NoReturn:
    """In the fork: give up what ``confine`` does, then answer questions until none comes for long."""
    global inside
    code = 1
    try:
        confine(memory_bytes, parent)
        inside = True
        with os.fdopen(answered, "wb") as out, os.fdopen(asked, "rb") as questions:
            _send(out, b".")
            out.flush()
            while select.select([questions], [], [], 2 * _IDLE_S)[0] and (line := questions.readline()):
                reader, arguments = parse_json(line, _PART)
                used = resource.getrusage(resource.RUSAGE_SELF)
                cpu = int(used.ru_utime + used.ru_stime) + cpu_s
                resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.getrlimit(resource.RLIMIT_CPU)[1]))
                _answer(out, reader, arguments)
                gc.collect()
            code = 0
    finally:
        os._exit(code)


def _answer(out: BinaryIO, reader: str, arguments: list[Any]) -> None:
    module, _, name = reader.partition(":")
    try:
        with spending():
            for part in getattr(importlib.import_module(module), name)(*arguments):
                if isinstance(part, bytes) or hasattr(part, "dtype"):
                    _send(out, b"a", part)
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


def confine(memory_bytes: int, parent: int) -> None:
    """Limits and the layers that hold here; each that this kernel lacks is left out. It ends with its ``parent``."""
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
    libc.prctl(jail.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # which the two before would undo
    if os.getppid() != parent:
        os._exit(1)
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
