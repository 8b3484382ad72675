"""A stranger's file read in a process of its own, so that a fault in a reader costs one line and not the command.

The process gives up what it could do harm with (``confine``). The other side does not believe it: its answer is a
line of JSON and the bytes of arrays whose kinds are known beforehand, counted and checked before anything is made of
them; nothing in it is executed or unpickled. It crashes, hangs, eats memory or writes garbage: each is one
``MantissaError``.

The process reads while this one imports what it needs next; ``Reading.dump`` waits for it.

The reader is a fresh interpreter, so that nothing of the command lies in its memory. Before it opens
what it was given it has, in this order: no core dump, no file to write to, limits on CPU seconds and on the address
space beyond what its imports took; a user namespace of its own, where the kernel grants it, and no capability, root's
neither; Landlock, where the kernel has it: no file made, changed or started; a system-call filter (x86_64 and aarch64)
that allows what reading needs and nothing else: files opened to read, threads, its own limits. It may read what its
user may, since a dump is a folder and libraries load parts of themselves late; what it read cannot leave but through
its pipe.

On stdout, one message: a line of JSON, then the arrays of ``ARRAYS`` as raw bytes; of a log, each curve's steps and
values (float64). ``{"error": TEXT}`` where the reader raised ``MantissaError``, ``{"memory": true}`` where it ran out
of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mantissa.base.bounds import address_space, available_memory, boundary, number, require_memory, spending
from mantissa.base.errors import MantissaError, missing
from mantissa.base.readers.json import parse_json
from mantissa.tasks.sandbox import jail
from mantissa.tasks.sandbox.run import Limits, cause_of_death

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from mantissa.doctor.dump import Dump, Scored
    from mantissa.doctor.logs import Log


# A pickle of the largest size that is read takes 6 GB on the way; four million tokens of jsonl take minutes on a slow
# machine, and a file over a network longer than its CPU seconds.
LIMITS = Limits(wall_s=600.0, cpu_s=300, memory_bytes=8 << 30, output_bytes=4 << 30)
_ADVICE = "it is damaged, or was made to break readers; write it again, or give a part of it"
_LONGEST_HEADER = 1 << 16
_TICK_S = 0.5
_LARGEST_TOKEN = 2**31 - 1
_CODE = "import sys; sys.path[:] = {path!r}; from mantissa.doctor.isolated import main; main()"


class Reading:
    """A process at work on ``path``. Call ``dump`` or ``read`` once; it ends the process however it returns.

    ``reader``: MODULE:NAME of what is called with path, framework and the ``more`` texts.
    """

    def __init__(
        self, path: Path, framework: str | None = None, *more: str,
        reader: str = "mantissa.doctor.readers:read_dump", limits: Limits = LIMITS,
    ) -> None:  # fmt: skip
        free = available_memory()
        self._memory = limits.memory_bytes if free is None else min(limits.memory_bytes, free)
        self._path, self._limits, self._deadline = path, limits, time.monotonic() + limits.wall_s
        inner = json.dumps({"memory_bytes": self._memory, "cpu_s": limits.cpu_s})
        places = [place or os.getcwd() for place in sys.path]
        code = _CODE.format(path=places)
        # One thread: each takes an address space of its own, and a reader has no use for more.
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ARROW_IO_THREADS"), "1")
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
        command = [sys.executable, "-I", "-S", "-c", code, reader, str(path), framework or "", inner, *more]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            env=one | quiet,
        )  # fmt: skip

    def dump(self, tick: Callable[[str], None] = lambda line: None) -> Dump:
        """The dump that was read; raises as ``read`` does."""
        from mantissa.doctor.dump import Dump

        found = self.read(tick)
        if not isinstance(found, Dump):
            raise self._garbage("a log where a dump was asked for")
        return found

    def read(self, tick: Callable[[str], None] = lambda line: None) -> Dump | Log:
        """What was read; ``MantissaError`` with the reader's own words, or with how its process ended. ``tick`` is told
        twice a second how far it is."""
        self._tick = tick
        try:
            header = self._header()
            if header.keys() == {"memory"}:
                raise MantissaError(f"{self._path}: its reader used more than {_bytes(self._memory)}; {_ADVICE}")
            if header.keys() == {"error"} and isinstance(header["error"], str):
                raise MantissaError(_printable(header["error"]))
            return self._unpacked_log(header) if "log" in header else self._unpacked(header)
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def _header(self) -> dict[str, Any]:
        line = bytearray()
        while not line.endswith(b"\n"):
            line += self._bytes(1)  # a pipe has no way back: the arrays begin after the line
            if len(line) > _LONGEST_HEADER:
                raise self._garbage("an answer that begins with no line")
        try:
            header = parse_json(bytes(line))
        except ValueError:
            raise self._garbage("an answer that is no JSON") from None
        if not isinstance(header, dict):
            raise self._garbage("an answer without fields")
        return header

    def _bytes(self, count: int) -> bytearray:
        """So many bytes of the answer."""
        assert self._process.stdout is not None
        found, pipe = bytearray(count), self._process.stdout.fileno()
        view = memoryview(found)
        while view:
            while not select.select([pipe], [], [], _TICK_S)[0]:
                self._tick(f"reading {self._path}{self._place()}")
                if time.monotonic() >= self._deadline:
                    break
            if time.monotonic() >= self._deadline:
                raise MantissaError(f"{self._path}: its reader took longer than {self._limits.wall_s:g} s; {_ADVICE}")
            got = os.readv(pipe, [view])
            if not got:
                raise self._ended()
            view = view[got:]
        return found

    def _place(self) -> str:
        """Where the process is in the file that it has open; nothing where the system does not say."""
        about = Path(f"/proc/{self._process.pid}")
        with contextlib.suppress(OSError, ValueError, IndexError):
            within = str(self._path.resolve())
            for each in (about / "fd").iterdir():
                file = os.readlink(each)
                if file.startswith(within):
                    at = int((about / "fdinfo" / each.name).read_text().split()[1])
                    return f": {Path(file).name}, {_bytes(at)} of {_bytes(os.stat(file).st_size)}"
        return ""

    def _ended(self) -> MantissaError:
        """Why the answer ended early."""
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return self._garbage("half an answer")
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            spent = f"used more than {self._limits.cpu_s} s of processor time"
            said = spent if code == -signal.SIGXCPU else f"{spent}, or was killed by another, as where memory runs out"
            return MantissaError(f"{self._path}: its reader {said}; {_ADVICE}")
        if code == 0:
            return self._garbage("no whole answer")
        return MantissaError(f"{self._path}: its reader crashed ({cause_of_death(code)}); {_ADVICE}")

    def _garbage(self, what: str) -> MantissaError:
        return MantissaError(f"{self._path}: its reader gave {what}; {_ADVICE}")

    def _unpacked(self, header: dict[str, Any]) -> Dump:
        from mantissa.doctor.dump import Dump, Settings
        from mantissa.doctor.readers import FRAMEWORKS, checked

        names = {each.name for each in fields(Settings)}
        framework, pairs = header.get("framework"), header.get("pairs", [])

        def settings(given: Any) -> Settings:
            if not isinstance(given, dict) or given.keys() != names:
                raise self._garbage("an answer of other fields than a dump's")
            return checked(self._path, Settings(**given))

        def texts(name: str) -> tuple[str, ...]:
            given = header.get(name)
            if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
                raise self._garbage("an answer of other fields than a dump's")
            return tuple(map(_printable, given))

        good = isinstance(pairs, list) and all(isinstance(each, list) and len(each) == 2 for each in pairs)
        if framework not in FRAMEWORKS or not good:
            raise self._garbage("an answer of other fields than a dump's")
        how = settings(header.get("settings"))
        beside = tuple((_printable(str(name)), settings(given)) for name, given in pairs)
        sequences = unpacked(self._arrays(header.get("counts")))
        if sequences is None or (beside and not {each.pair for each in sequences} <= set(range(len(beside)))):
            raise self._garbage("arrays that do not fit one another")
        run = self._path if header.get("run") is True else None
        return Dump(str(framework), self._path, sequences, how, run, texts("notes"), beside, texts("mapped"))

    def _unpacked_log(self, header: dict[str, Any]) -> Log:
        """A log, its program and roles of the table, its curves by step."""
        import numpy as np

        from mantissa.doctor.logs import Curve, Log, Role, table

        whose, curves, notes = (header.get(name) for name in ("log", "curves", "notes"))
        places = [header.get(name) for name in ("resumes", "evaluations")]
        good = whose in table().programs and isinstance(curves, list) and 0 < len(curves) <= len(Role)
        good = good and isinstance(notes, list) and all(isinstance(note, str) for note in notes)
        good = good and all(isinstance(each, list) and all(number(x, -(2**63), 2**63) for x in each) for each in places)
        if not good or not isinstance(curves, list) or not isinstance(notes, list):
            raise self._garbage("an answer of other fields than a log's")
        found: dict[Role, Curve] = {}
        for each in curves:
            if not (isinstance(each, list) and len(each) == 3 and each[0] in set(Role) and isinstance(each[1], str)):
                raise self._garbage("a curve that has no role")
            if not number(each[2], 1, self._limits.output_bytes // 16, whole=True):
                raise self._garbage("curves of impossible sizes")
            require_memory(16 * each[2], str(self._path), "give a part of it")
            steps, values = (np.frombuffer(self._bytes(8 * each[2]), dtype="<f8") for _ in range(2))
            if not np.isfinite(steps).all() or (np.diff(steps) <= 0).any():
                raise self._garbage("a curve whose steps do not rise")
            found[Role(each[0])] = Curve(_printable(each[1]), steps, values)
        resumes, evaluations = (tuple(map(float, each or ())) for each in places)
        return Log(str(whose), self._path, found, resumes, evaluations, tuple(map(_printable, notes)))

    def _arrays(self, counts: Any) -> dict[str, np.ndarray]:
        import numpy as np

        if not isinstance(counts, list) or len(counts) != len(ARRAYS):
            raise self._garbage("an answer without the sizes of its arrays")
        most = self._limits.output_bytes
        if not all(number(count, 0, most, whole=True) for count in counts):
            raise self._garbage("arrays of impossible sizes")
        kinds = [np.dtype(kind) for kind in ARRAYS.values()]
        total = sum(count * kind.itemsize for count, kind in zip(counts, kinds, strict=True))
        if total > most:
            raise MantissaError(f"{self._path}: its reader gave {total:,} bytes; expected at most {most:,}; {_ADVICE}")
        require_memory(total, str(self._path), "give a part of it")
        return {
            name: np.frombuffer(self._bytes(count * kind.itemsize), dtype=kind)
            for name, count, kind in zip(ARRAYS, counts, kinds, strict=True)
        }


def unpacked(arrays: dict[str, np.ndarray]) -> list[Scored] | None:
    """The sequences that ``inside.packed`` made these arrays of; None where they are no such arrays."""
    import numpy as np

    from mantissa.doctor.dump import Scored

    a = arrays
    count = len(a["lengths"])
    if not _fitting(a, count):
        return None
    texts = [a[name].astype(bool) for name in ("mask", "flipped")]
    responses = a["lengths"] - a["prompts"]
    tokens = _cut(a["tokens"], a["lengths"])
    x, y, mask = (_cut(values, responses) for values in (a["rollout_logp"], a["learner_logp"], texts[0]))
    flipped = iter(_cut(texts[1], responses[a["flips"] != 0]))
    ids = _cut(a["kept"], np.maximum(a["kept_counts"], 0))
    places = [None if size < 0 else kept for size, kept in zip(a["kept_counts"].tolist(), ids, strict=True)]
    ends = np.cumsum(responses * (a["keeps"] != 0)).tolist()
    numbers = [value if known else None for value, known in zip(a["numbers"].tolist(), a["numbered"], strict=True)]
    versions = [numbers[place * count : (place + 1) * count] for place in range(len(NUMBERS))]
    return [
        Scored(
            tokens[n], prompt, x[n], y[n], mask[n], versions[0][n], versions[1][n], versions[2][n],
            next(flipped) if a["flips"][n] else None,
            places[ends[n] - len(mask[n]) : ends[n]] if a["keeps"][n] else None, versions[3][n],
        )
        for n, prompt in enumerate(a["prompts"].tolist())
    ]  # fmt: skip


def _fitting(a: dict[str, np.ndarray], count: int) -> bool:
    """Whether sizes fit one another and values are what a dump can hold."""
    import numpy as np

    per_sequence = all(len(a[name]) == count for name in ("prompts", "flips", "keeps"))
    per_number = len(a["numbered"]) == len(a["numbers"]) == count * len(NUMBERS)
    small = all(a[name].max(initial=0) <= 1 for name, kind in ARRAYS.items() if kind == "|u1")
    if not (per_sequence and per_number and small and count):
        return False
    lengths, prompts, kept = a["lengths"], a["prompts"], a["kept_counts"]
    if lengths.max() > len(a["tokens"]) or prompts.min() < 0 or (prompts > lengths).any():
        return False
    if kept.min(initial=0) < -1 or kept.max(initial=0) > len(a["kept"]):
        return False
    responses = lengths - prompts
    sizes = {
        "tokens": lengths, "rollout_logp": responses, "learner_logp": responses, "mask": responses,
        "flipped": responses[a["flips"] != 0], "kept_counts": responses[a["keeps"] != 0],
        "kept": np.maximum(kept, 0),
    }  # fmt: skip
    if any(int(size.sum()) != len(a[name]) for name, size in sizes.items()):
        return False
    if any(np.isinf(a[name]).any() for name in ("rollout_logp", "learner_logp")):
        return False
    return all(a[name].min(initial=0) >= 0 and a[name].max(initial=0) <= _LARGEST_TOKEN for name in ("tokens", "kept"))


def _cut(values: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    ends = sizes.cumsum().tolist()
    return [values[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=True)]


def _printable(text: str) -> str:
    """A text of the other process without what a terminal obeys."""
    text = text[:LONGEST_TEXT]
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count >> 20} MiB"


# In this order; S sequences, T their tokens, R their response positions, K the kept ids, each of all sequences. A
# version or group is preceded by whether there is one; ``flips`` and ``keeps``: whether a sequence has ``flipped`` and
# ``kept``; ``kept_counts``: the ids at each position of those that have, -1 where all were kept.
ARRAYS = {
    "lengths": "<i8", "prompts": "<i8", "numbered": "|u1", "numbers": "<i8", "flips": "|u1", "keeps": "|u1",
    "tokens": "<i8", "rollout_logp": "<f8", "learner_logp": "<f8", "mask": "|u1", "flipped": "|u1",
    "kept_counts": "<i8", "kept": "<i8",
}  # fmt: skip
NUMBERS = ("rollout_version", "learner_version", "group", "pair")
LONGEST_TEXT = 2000  # of an error
_WHY = "expected whole numbers of at most 63 bits; write the file again"


def main() -> None:
    """Read what the arguments say: reader, path, framework or "", the limits as JSON, and more of the reader's."""
    reader, path, framework, limits, *more = sys.argv[1:]
    gc.disable()  # rows make no circles, and looking for some takes a tenth of the time
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        read = _reader(reader, Path(path))
        confine(**parse_json(limits))
        with spending():
            found = read(Path(path), framework or None, *more)
        with boundary(path, _WHY):
            header, arrays = _message(found)
    except MantissaError as error:
        _say(out, {"memory": True} if _ran_out(error) else {"error": str(error)[:LONGEST_TEXT]})
    except MemoryError:
        _say(out, {"memory": True})
    except ModuleNotFoundError as error:
        if (refusal := missing(error)) is None:
            raise
        _say(out, {"error": f"{path}: {refusal}"})
    else:
        _say(out, header, arrays)


def _message(found: Dump | Log) -> tuple[dict[str, Any], list[np.ndarray]]:
    """What was read, as a header and arrays."""
    from mantissa.doctor.dump import Dump

    if not isinstance(found, Dump):
        return packed_log(found)
    counts, arrays = packed(found)
    header = {"framework": found.framework, "settings": asdict(found.settings), "run": found.run is not None,
              "notes": list(found.notes), "mapped": list(found.mapped), "counts": counts}  # fmt: skip
    if found.pairs:
        header["pairs"] = [[name, asdict(how)] for name, how in found.pairs]
    return header, arrays


def _reader(named: str, path: Path) -> Callable[..., Dump | Log]:
    """The function MODULE:NAME; what it will import late is imported now, while nothing is limited."""
    module, _, name = named.partition(":")
    if (path / "config.yaml").is_file():
        import mantissa.doctor.runs
        import mantissa.model.tokenizer  # noqa: F401 - its torch alone takes a gigabyte of address space
    if path.suffix == ".parquet" or (path.is_dir() and any(path.rglob("*.parquet"))):
        import pyarrow.parquet  # noqa: F401
    read: Callable[..., Dump | Log] = getattr(importlib.import_module(module), name)
    return read


def confine(memory_bytes: int, cpu_s: int) -> None:
    """Limits and the layers that hold here; each that this kernel lacks is left out."""
    bounds = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CPU: cpu_s,
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


def _say(out: BinaryIO, header: dict[str, Any], arrays: list[np.ndarray] | None = None) -> None:
    out.write(json.dumps(header).encode() + b"\n")
    for array in arrays or ():
        out.write(array.data)
    out.close()


def packed(dump: Dump) -> tuple[list[int], list[np.ndarray]]:
    """The sequences of a dump as the arrays of ``ARRAYS``, and how many numbers each has."""
    import numpy as np

    each = dump.sequences
    kept = [place for s in each if s.kept is not None for place in s.kept]
    numbers = [getattr(s, name) for name in NUMBERS for s in each]
    columns: dict[str, Any] = {
        "lengths": [len(s.tokens) for s in each],
        "prompts": [s.prompt_length for s in each],
        "numbered": [number is not None for number in numbers],
        "numbers": [number or 0 for number in numbers],
        "flips": [s.flipped is not None for s in each],
        "keeps": [s.kept is not None for s in each],
        **{name: _joined([getattr(s, name) for s in each]) for name in ("tokens", "rollout_logp", "learner_logp")},
        "mask": _joined([s.mask for s in each]),
        "flipped": _joined([s.flipped for s in each if s.flipped is not None]),
        "kept_counts": [-1 if ids is None else len(ids) for ids in kept],
        "kept": _joined([ids for ids in kept if ids is not None]),
    }
    arrays = [np.ascontiguousarray(columns[name], dtype=kind) for name, kind in ARRAYS.items()]
    return [len(array) for array in arrays], arrays


def _joined(parts: list[np.ndarray]) -> Any:
    import numpy as np

    return np.concatenate(parts) if parts else []


def packed_log(log: Log) -> tuple[dict[str, Any], list[np.ndarray]]:
    """A log's header, and steps and values of each of its curves."""
    import numpy as np

    curves = [[str(role), each.name, len(each.steps)] for role, each in log.curves.items()]
    header = {"log": log.program, "curves": curves, "resumes": list(log.resumes),
              "evaluations": list(log.evaluations), "notes": list(log.notes)}  # fmt: skip
    arrays = [part for each in log.curves.values() for part in (each.steps, each.values)]
    return header, [np.ascontiguousarray(part, dtype="<f8") for part in arrays]
