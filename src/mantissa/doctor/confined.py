"""The inside of the process that reads a stranger's file: what it gives up first, and how it says what it found.

``isolated.py`` starts it as a fresh interpreter, so that nothing of the command lies in its memory. Before it opens
what it was given it has, in this order: no core dump, no file to write to, limits on CPU seconds and on the address
space beyond what its imports took; a user namespace of its own, where the kernel grants it, and no capability, root's
neither; Landlock, where the kernel has it: no file made, changed or started; a system-call filter (x86_64 and aarch64)
that allows what reading needs and nothing else: files opened to read, threads, its own limits. It may read what its
user may, since a dump is a folder and libraries load parts of themselves late; what it read cannot leave but through
its pipe.

On stdout, one message: a line of JSON, then the arrays of ``ARRAYS`` as raw bytes; of a log, each curve's steps and
values (float64). ``{"error": TEXT}`` where the reader
raised ``MantissaError``, ``{"memory": true}`` where it ran out of it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mantissa.base.bounds import address_space, boundary, spending
from mantissa.base.errors import MantissaError, missing
from mantissa.base.readers.json import parse_json
from mantissa.tasks.sandbox import jail

if TYPE_CHECKING:
    import numpy as np

    from mantissa.doctor.dump import Dump
    from mantissa.doctor.logs import Log

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
