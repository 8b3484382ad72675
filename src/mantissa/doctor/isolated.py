"""A stranger's dump or log, read in a process of its own (``base/readers/child.py``) while this one imports the rest.

What comes back is a header, plain values, and the bytes of arrays whose kinds are known beforehand: those of
``ARRAYS``; of a log, each curve's steps and values (float64). They are checked before anything is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mantissa.base.bounds import boundary, number
from mantissa.base.readers.child import LONGEST_TEXT, Child, Limits

if TYPE_CHECKING:
    import numpy as np

    from mantissa.doctor.dump import Dump, Scored
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
_WHY = "expected whole numbers of at most 63 bits; write the file again"
# A pickle of the largest size that is read takes 6 GB on the way; four million tokens of jsonl take minutes on a slow
# machine, and a file over a network longer than its CPU seconds.
LIMITS = Limits(memory_bytes=8 << 30)
_LARGEST_TOKEN = 2**31 - 1


class Reading:
    """A process at work on ``path``. Call ``dump`` or ``read`` once; it ends the process however it returns.

    ``reader``: MODULE:NAME of what is called with path, framework and the ``more`` texts.
    """

    def __init__(
        self, path: Path, framework: str | None = None, *more: str,
        reader: str = "mantissa.doctor.readers:read_dump", limits: Limits = LIMITS,
    ) -> None:  # fmt: skip
        self._path, self._limits = path, limits
        needed = ["mantissa.doctor.isolated", reader.partition(":")[0]]
        if (path / "config.yaml").is_file():
            needed += [
                "mantissa.doctor.runs",
                "mantissa.model.tokenizer",
            ]  # its torch alone takes a gigabyte of address space
        if path.suffix == ".parquet" or (path.is_dir() and any(path.rglob("*.parquet"))):
            needed.append("pyarrow.parquet")
        self._child = Child(needed, limits)
        self._child.ask("mantissa.doctor.isolated:read_packed", path, reader, str(path), framework, *more)

    def dump(self, tick: Callable[[str], None] = lambda line: None) -> Dump:
        """The dump that was read; raises as ``read`` does."""
        from mantissa.doctor.dump import Dump

        found = self.read(tick)
        if not isinstance(found, Dump):
            raise self._child.garbage("a log where a dump was asked for")
        return found

    def read(self, tick: Callable[[str], None] = lambda line: None) -> Dump | Log:
        """What was read; ``MantissaError`` with the reader's own words, or with how its process ended. ``tick`` is told
        twice a second how far it is."""
        try:
            header, *arrays = [*self._child.parts(tick=tick)] or [None]
            if not isinstance(header, dict) or not all(isinstance(each, bytearray) for each in arrays):
                raise self._child.garbage("an answer without fields")
            return self._unpacked_log(header, arrays) if "log" in header else self._unpacked(header, arrays)
        finally:
            self._child.close()

    def _unpacked(self, header: dict[str, Any], arrays: list[bytearray]) -> Dump:
        from mantissa.doctor.dump import Dump, Settings
        from mantissa.doctor.readers import FRAMEWORKS, checked

        names = {each.name for each in fields(Settings)}
        framework, pairs = header.get("framework"), header.get("pairs", [])

        def settings(given: Any) -> Settings:
            if not isinstance(given, dict) or given.keys() != names:
                raise self._child.garbage("an answer of other fields than a dump's")
            return checked(self._path, Settings(**given))

        def texts(name: str) -> tuple[str, ...]:
            given = header.get(name)
            if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
                raise self._child.garbage("an answer of other fields than a dump's")
            return tuple(map(_printable, given))

        good = isinstance(pairs, list) and all(isinstance(each, list) and len(each) == 2 for each in pairs)
        if framework not in FRAMEWORKS or not good:
            raise self._child.garbage("an answer of other fields than a dump's")
        how = settings(header.get("settings"))
        beside = tuple((_printable(str(name)), settings(given)) for name, given in pairs)
        sequences = unpacked(self._arrays(arrays))
        if sequences is None or (beside and not {each.pair for each in sequences} <= set(range(len(beside)))):
            raise self._child.garbage("arrays that do not fit one another")
        run = self._path if header.get("run") is True else None
        return Dump(str(framework), self._path, sequences, how, run, texts("notes"), beside, texts("mapped"))

    def _unpacked_log(self, header: dict[str, Any], arrays: list[bytearray]) -> Log:
        """A log, its program and roles of the table, its curves by step."""
        import numpy as np

        from mantissa.doctor.logs import Curve, Log, Role, table

        whose, curves, notes = (header.get(name) for name in ("log", "curves", "notes"))
        places = [header.get(name) for name in ("resumes", "evaluations")]
        good = whose in table().programs and isinstance(curves, list) and 0 < len(curves) <= len(Role)
        good = good and isinstance(notes, list) and all(isinstance(note, str) for note in notes)
        good = good and all(isinstance(each, list) and all(number(x, -(2**63), 2**63) for x in each) for each in places)
        if not good or not isinstance(curves, list) or not isinstance(notes, list):
            raise self._child.garbage("an answer of other fields than a log's")
        found: dict[Role, Curve] = {}
        if len(arrays) != 2 * len(curves):
            raise self._child.garbage("curves without numbers")
        for each, *both in zip(curves, arrays[::2], arrays[1::2], strict=True):
            if not (isinstance(each, list) and len(each) == 2 and each[0] in set(Role) and isinstance(each[1], str)):
                raise self._child.garbage("a curve that has no role")
            if not both[0] or len(both[0]) != len(both[1]) or len(both[0]) % 8:
                raise self._child.garbage("curves of impossible sizes")
            steps, values = (np.frombuffer(part, dtype="<f8") for part in both)
            if not np.isfinite(steps).all() or (np.diff(steps) <= 0).any():
                raise self._child.garbage("a curve whose steps do not rise")
            found[Role(each[0])] = Curve(_printable(each[1]), steps, values)
        resumes, evaluations = (tuple(map(float, each or ())) for each in places)
        return Log(str(whose), self._path, found, resumes, evaluations, tuple(map(_printable, notes)))

    def _arrays(self, parts: list[bytearray]) -> dict[str, np.ndarray]:
        import numpy as np

        kinds = [np.dtype(kind) for kind in ARRAYS.values()]
        fit = len(parts) == len(kinds) and not any(
            len(part) % kind.itemsize for part, kind in zip(parts, kinds, strict=True)
        )
        if not fit:
            raise self._child.garbage("other arrays than a dump's")
        return {name: np.frombuffer(part, dtype=kind) for name, part, kind in zip(ARRAYS, parts, kinds, strict=True)}


def unpacked(arrays: dict[str, np.ndarray]) -> list[Scored] | None:
    """The sequences that ``packed`` made these arrays of; None where they are no such arrays."""
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


# in the process


def read_packed(reader: str, path: str, framework: str | None, *more: str) -> Iterator[Any]:
    """What ``reader`` finds, as a header and arrays."""
    from mantissa.doctor.dump import Dump

    module, _, name = reader.partition(":")
    found: Dump | Log = getattr(import_module(module), name)(Path(path), framework, *more)
    with boundary(path, _WHY):
        header, arrays = _message(found) if isinstance(found, Dump) else packed_log(found)
    yield header
    yield from arrays


def _message(dump: Dump) -> tuple[dict[str, Any], list[np.ndarray]]:
    header = {"framework": dump.framework, "settings": asdict(dump.settings), "run": dump.run is not None,
              "notes": list(dump.notes), "mapped": list(dump.mapped)}  # fmt: skip
    if dump.pairs:
        header["pairs"] = [[name, asdict(how)] for name, how in dump.pairs]
    return header, packed(dump)


def packed(dump: Dump) -> list[np.ndarray]:
    """The sequences of a dump as the arrays of ``ARRAYS``."""
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
    return [np.ascontiguousarray(columns[name], dtype=kind) for name, kind in ARRAYS.items()]


def _joined(parts: list[np.ndarray]) -> Any:
    import numpy as np

    return np.concatenate(parts) if parts else []


def packed_log(log: Log) -> tuple[dict[str, Any], list[np.ndarray]]:
    """A log's header, and steps and values of each of its curves."""
    import numpy as np

    curves = [[str(role), each.name] for role, each in log.curves.items()]
    header = {"log": log.program, "curves": curves, "resumes": list(log.resumes),
              "evaluations": list(log.evaluations), "notes": list(log.notes)}  # fmt: skip
    arrays = [part for each in log.curves.values() for part in (each.steps, each.values)]
    return header, [np.ascontiguousarray(part, dtype="<f8") for part in arrays]
