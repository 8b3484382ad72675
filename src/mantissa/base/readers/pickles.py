"""Tensors out of others' pickles (``.pt`` of torch.save, ``.pkl``), without running anything that is in them.

A pickle is a program: whoever loads a hostile one with ``pickle.load`` runs it. Here a name is looked up in one table
of harmless stand-ins and nowhere else; what is not in it ends the reading. Storages are taken out of the zip file as
bytes and become numpy arrays, their bounds checked; torch itself is not asked. Before a pickle is read its operations
are counted, since some (a memo at index 2^32) would fill the memory before anything is looked up. A file and all the
files within it draw from one budget, and what is read is walked once, for few bytes may name one list very often.

No stand-in lets a pickle change it: each has a ``__setstate__`` of its own, which is what the operation BUILD calls.

A trainer's own arguments (``training_args.bin``) are read where ``records`` are asked for: an object of any class but
the standard library's is then a dictionary of what the pickle put into it.

Read: torch.save's zip format (torch 1.6 and later), and pickles whose tensors lie in such bytes, as SkyRL writes them.
The stand-in for anything else that may stand beside the tensors (a device, a dtype) is a text.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mantissa.base.bounds import Budget, boundary, budget, require_size
from mantissa.base.errors import MantissaError
from mantissa.base.readers import child, zips

LARGEST = zips.LARGEST  # bytes of a file, and of all tensors in one
_LIMITS = child.Limits(memory_bytes=3 << 29, output_bytes=1 << 30)
_LARGE, _TIMES = 64 << 20, 8  # a file that may take more: its bytes, those of its tensors, and both once more
_MOST_OPERATIONS = 50_000_000  # of a pickle, and values in what it makes
# Values that are written out for each operation, and beside that: what is not shared has an operation each, and a list
# that is shared is sent as often as it stands there.
_SHARED, _ALWAYS = 8, 1_000_000
_MOST_CLASSES = 256  # that a pickle's records may be of
_LARGEST_INTEGER = 1 << 64  # larger ones can be chosen to share one hash: a dictionary of them takes hours to fill
_ADVICE = (
    "expected a pickle of tensors, numbers, texts, lists and dictionaries; write it again, as plain jsonl if need be"
)
_NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
_STORAGES = {
    "DoubleStorage": "<f8", "FloatStorage": "<f4", "HalfStorage": "<f2", "LongStorage": "<i8", "IntStorage": "<i4",
    "ShortStorage": "<i2", "CharStorage": "<i1", "ByteStorage": "<u1", "BoolStorage": "<u1", "BFloat16Storage": "<u2",
}  # fmt: skip


class UnknownClassError(ValueError):
    """A pickle asks for what is not on the list; ``module`` and ``name``: of that."""

    def __init__(self, module: str, name: str) -> None:
        super().__init__(f"it asks for {module}.{name}, which no dump of log-probs needs; nothing of it was run")
        self.module, self.name = module, name


def load(path: Path, *, records: bool = False) -> Any:
    """What ``path`` holds: numpy arrays where it has tensors (bf16 widened to fp32), else plain values; and, where
    ``records`` are asked for, a ``Record`` for each object.

    It is read in a process of its own (``child.py``), or where this is one here. ``MantissaError`` for
    anything damaged, too large, or that names what is not on the list (its cause is then an ``UnknownClassError``).
    """
    with boundary(path, _ADVICE):
        spent = budget()
        size = require_size(path, LARGEST, spent)
        if child.inside:
            return _load(path, records, spent)
        more = _TIMES * size if size > _LARGE else 0
        limits = replace(_LIMITS, memory_bytes=_LIMITS.memory_bytes + more)
        with child.lent(__name__, source=str(path), limits=limits) as process:
            process.ask(f"{__name__}:sent", path, str(path), records)
            return _received([*process.parts(spent)])


def _load(path: Path, records: bool, spent: Budget) -> Any:
    data = path.read_bytes()
    whole = _Whole(path, spent, {} if records else None)
    value = _zip(data, whole) if data.startswith(zips.MAGIC) else _unpickle(data, {}, whole)
    if isinstance(value, NESTED):
        walk(value, min(_MOST_OPERATIONS, _SHARED * whole.operations + _ALWAYS))
    return value


def sent(path: str, records: bool) -> Iterator[Any]:
    """In the process that reads: what ``load`` found, as values of JSON with a mark each, and the bytes of arrays."""
    arrays: list[np.ndarray] = []
    try:
        with boundary(path, _ADVICE):
            value = _marked(load(Path(path), records=records), arrays)
    except MantissaError as error:
        if not isinstance(error.__cause__, UnknownClassError):
            raise
        value = ["unknown", error.__cause__.module, error.__cause__.name]
    yield value
    for each in arrays:
        yield np.frombuffer(each.tobytes(), np.uint8)


def _marked(value: Any, arrays: list[np.ndarray]) -> Any:
    """A value as [kind, what of it JSON holds]; one that JSON has is itself."""
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        return value
    if isinstance(value, np.generic):
        return ["scalar", *_marked(np.asarray(value), arrays)[1:]]
    if isinstance(value, np.ndarray | _Array):
        value = value.array if isinstance(value, _Array) else value
        if not isinstance(value, np.ndarray):
            raise ValueError("an array without numbers")
        arrays.append(value)
        return ["array", value.dtype.str, list(value.shape)]
    if kind is bytes:
        return ["bytes", value.hex()]
    if isinstance(value, Record):
        return ["record", value.of, _pairs(value, arrays)]
    if isinstance(value, dict):
        return ["dict", _pairs(value, arrays)]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [kind.__name__, [_marked(each, arrays) for each in value]]
    if kind is type and issubclass(value, Record):
        return ["class", value.of]
    return ["text", kind.__name__]  # of a stand-in for what has no values, such as a storage


def _pairs(value: dict[Any, Any], arrays: list[np.ndarray]) -> list[list[Any]]:
    return [[_marked(key, arrays), _marked(each, arrays)] for key, each in value.items()]


def _received(parts: list[Any]) -> Any:
    """What ``_marked`` was given, of an answer's parts. Any exception where they are none of its."""
    value, *arrays = parts
    found = iter(arrays)
    classes: dict[str, type[Record]] = {}

    def of(name: str) -> type[Record]:
        return classes.setdefault(str(name), type("_RecordOf", (Record,), {"of": str(name)}))

    def plain(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind, held, *more = value
        if kind in ("array", "scalar"):
            array = np.frombuffer(next(found), np.dtype(_numbers(held))).reshape(more[0])
            return array if kind == "array" else array[()]
        if kind == "unknown":
            raise UnknownClassError(held, more[0])
        if kind == "bytes":
            return bytes.fromhex(held)
        if kind == "record":
            made = of(held)()
            made.clear()
            made.update({plain(key): plain(each) for key, each in more[0]})
            return made
        if kind == "dict":
            return {plain(key): plain(each) for key, each in held}
        if kind in ("class", "text"):
            return of(held) if kind == "class" else str(held)
        return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(plain, held))

    return plain(value)


def _numbers(kind: str) -> str:
    if kind[1:] not in (*_NUMBERS, "b1"):
        raise ValueError(f"an array of {kind}")
    return kind


@dataclass
class _Whole:
    """A file with the files within it: what they draw from; ``inner``: this is one of those within; ``classes``: of
    records, by name, or None where there are to be none."""

    path: Path
    spent: Budget
    classes: dict[tuple[str, str], type[Record]] | None
    inner: bool = False
    operations: int = 0
    tensors: int = 0  # bytes

    def take(self, count: int) -> None:
        """Draw ``count`` bytes of tensors."""
        self.tensors += count
        if self.tensors > LARGEST:
            raise ValueError(f"tensors of more than {LARGEST:,} bytes")
        self.spent.draw("made", count, self.path)


NESTED = (list, tuple, dict, set, frozenset)


def walk(value: Any, most: int = _MOST_OPERATIONS) -> None:
    """Raise where ``value`` holds itself, or more than ``most`` values in all; a list that stands in it twice counts
    twice."""
    totals: dict[int, int | None] = {}  # by the container's id: the values in it; None while they are being counted
    waiting = [value]
    while waiting:
        each = waiting[-1]
        inner = [*each, *each.values()] if isinstance(each, dict) else each
        parts = [part for part in inner if isinstance(part, NESTED)]
        if id(each) not in totals:
            totals[id(each)] = None
            if any(totals.get(id(part), 0) is None for part in parts):
                raise ValueError("a list or dictionary that holds itself")
            waiting += [part for part in parts if id(part) not in totals]
            continue
        waiting.pop()
        if totals[id(each)] is None:
            totals[id(each)] = total = len(each) + sum(totals[id(part)] or 0 for part in parts)
            if total > most:
                raise ValueError(f"more than {most:,} values")


def _zip(data: bytes, whole: _Whole) -> Any:
    """torch.save's format: ``NAME/data.pkl``, and its storages ``NAME/data/KEY``, stored and not compressed."""
    found = zips.entries(data)
    main = [name for name in found if name.endswith("/data.pkl")]
    if len(main) != 1:
        raise ValueError(f"{len(main)} entries named data.pkl, expected one")
    prefix = main[0].removesuffix("data.pkl")
    if found.get(f"{prefix}byteorder", b"little") != b"little":
        raise ValueError("tensors of a big-endian machine")
    inside = f"{prefix}data/"
    storages = {name.removeprefix(inside): held for name, held in found.items() if name.startswith(inside)}
    return _unpickle(found[main[0]], storages, whole)


def _unpickle(data: bytes, storages: dict[str, bytes], whole: _Whole) -> Any:
    for number, (operation, argument, _) in enumerate(pickletools.genops(data)):
        whole.operations += 1
        if whole.operations > _MOST_OPERATIONS:
            raise ValueError(f"more than {_MOST_OPERATIONS:,} operations")
        if isinstance(argument, int) and abs(argument) >= _LARGEST_INTEGER:
            raise ValueError("an integer of more than 64 bits")
        if "PUT" in operation.name and isinstance(argument, int) and argument > number:
            raise ValueError("a memo entry beyond the number of operations")
        if operation.name.startswith("EXT"):
            raise ValueError("a code of the extension registry")
    return _Reader(io.BytesIO(data), storages, whole).load()


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: dict[str, bytes], whole: _Whole) -> None:
        super().__init__(file)
        self.storages, self.whole = storages, whole

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _Storage(name)
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor"):
            return _Function(self.tensor)
        if module == "torch.storage" and name == "_load_from_bytes":
            return _Function(_skipped)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("_codecs", "encode"):  # how pickles of protocol 2 write bytes
            return _Function(_latin)
        if module == "torch" and name in ("Size", "device", "dtype"):
            return _Function(_join_words)
        if module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray") and name in _ARRAYS:
            return _ARRAYS[name]
        if module.split(".")[0].startswith("skyrl") and name.endswith("Batch"):
            if self.whole.inner:
                raise ValueError("a batch within a field of a batch, which SkyRL never writes")
            return type("_BatchOf", (_Batch,), {"whole": self.whole})
        if module == "builtins" and name in ("set", "frozenset", "list", "dict", "tuple"):
            return {"set": set, "frozenset": frozenset, "list": list, "dict": dict, "tuple": tuple}[name]
        if self.whole.classes is not None and module.split(".")[0] not in sys.stdlib_module_names - {"pathlib"}:
            return self.record(module, name, self.whole.classes)
        raise UnknownClassError(module, name)

    def record(self, module: str, name: str, classes: dict[tuple[str, str], type[Record]]) -> type[Record]:
        """The class of records of this name."""
        if len(classes) > _MOST_CLASSES:
            raise ValueError(f"objects of more than {_MOST_CLASSES} classes")
        return classes.setdefault((module, name), type("_RecordOf", (Record,), {"of": f"{module}.{name}"}))

    def persistent_load(self, key: Any) -> Any:
        kind, storage, name, _, count = key
        if kind != "storage" or not isinstance(storage, _Storage):
            raise ValueError("a reference that is no tensor's storage")
        values = np.frombuffer(self.storages[name], dtype=_STORAGES[storage.name])
        if len(values) < count:
            raise ValueError(f"a storage of {len(values)} numbers where {count} are claimed")
        return _Values(values, storage.name)

    def tensor(self, values: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Any:
        """A tensor as an array, copied out of its storage."""
        if not isinstance(values, _Values):
            return None  # of bytes that were skipped
        shape, steps, first = tuple(map(int, size)), tuple(map(int, stride)), int(offset)
        if len(shape) != len(steps) or min((*shape, *steps, first), default=0) < 0:
            raise ValueError(f"a tensor of size {shape} and strides {steps}")
        last = first + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        if math.prod(shape) and last >= len(values.values):
            raise ValueError("a tensor that reaches beyond its storage")
        self.whole.take(8 * math.prod(shape))  # strides of 0 make much of little
        itemsize = values.values.itemsize
        view = np.lib.stride_tricks.as_strided(values.values[first:], shape, tuple(step * itemsize for step in steps))
        if values.kind == "BFloat16Storage":  # bf16 is the upper half of fp32
            return (view.astype(np.uint32) << 16).view(np.float32) if shape else np.float32(_bf16(int(view)))
        return view.astype(bool) if values.kind == "BoolStorage" else view.copy()


class _Fixed:
    """What a pickle may name and hand on, and not change."""

    def __setstate__(self, state: Any) -> None:
        raise ValueError(f"it changes a {type(self).__name__.strip('_').lower()}, which no pickle of torch's does")


class _Function(_Fixed):
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


class _Storage(_Fixed):
    def __init__(self, name: str) -> None:
        self.name = name


class _Values(_Fixed):
    def __init__(self, values: Any, kind: str) -> None:
        self.values, self.kind = values, kind


class _Batch(dict[str, Any]):
    """SkyRL's batch: each field's bytes are a file of torch.save's in its own right, on the same budget."""

    whole: _Whole

    def __setstate__(self, state: Any) -> None:
        named = state["batch_dict"]
        if not all(isinstance(name, str) and isinstance(data, bytes) for name, data in named.items()):
            raise ValueError("a batch whose fields are not bytes by name")
        self.whole.inner = True
        try:
            fields = {name: _zip(data, self.whole) for name, data in named.items()}
        finally:
            self.whole.inner = False
        self.clear()
        self.update(fields)
        self["metadata"] = state.get("metadata")


class Record(dict[str, Any]):
    """An object of a class that was not looked up: its fields, and as ``arguments`` what it was made of, such as an
    enumeration's value. ``of``: the class's name."""

    of: str

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self["arguments"] = list(arguments)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise ValueError(f"an object of {self.of} whose state is not values by name")
        self.update(state)


class _Array:
    """numpy's array, from its bytes; object arrays are refused."""

    def __init__(self, *_: Any) -> None:
        self.array: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(data, bytes):
            raise ValueError("an array of objects")
        self.array = np.frombuffer(data, dtype=dtype.dtype).reshape(shape, order="F" if fortran else "C")


class _Type:
    """numpy's dtype: a plain number's."""

    def __init__(self, name: str, *_: Any) -> None:
        if name not in (*_NUMBERS, "b1"):
            raise ValueError(f"an array of {name}")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


def _scalar(dtype: _Type, data: bytes) -> Any:
    return np.frombuffer(data, dtype=dtype.dtype)[0]


def _reconstruct(*_: Any) -> _Array:
    return _Array()


_ARRAYS: dict[str, Any] = {
    "_reconstruct": _Function(_reconstruct), "ndarray": _Array, "dtype": _Type, "scalar": _Function(_scalar)
}  # fmt: skip


def _skipped(*_: Any) -> None:
    """A storage in bytes of its own: SkyRL's batch has every tensor twice, and this is the copy that is not read."""


def _latin(text: str, coding: str) -> bytes:
    if coding != "latin1":
        raise ValueError(f"bytes in {coding}")
    return text.encode("latin1")


def _join_words(*parts: Any) -> str:
    """A device, a dtype or a size as text; a list within a list could be a text without end."""
    flat = [part for each in parts for part in (each if isinstance(each, (tuple, list)) else [each])]
    if len(flat) > 64 or not all(isinstance(part, (str, int, float, type(None))) for part in flat):
        raise ValueError("a size, device or dtype that is not made of numbers and words")
    return " ".join(map(str, flat))


def _bf16(bits: int) -> float:
    return float(np.array([bits << 16], dtype=np.uint32).view(np.float32)[0])
