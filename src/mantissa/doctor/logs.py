"""Training logs as programs write them: curves of a few known figures, by step, whoever wrote them.

| log | written by | layout |
|---|---|---|
| trainer_state.json | TRL, Hugging Face's Trainer | ``log_history``: rows with ``step`` |
| a list of such rows, json or jsonl | ``trainer.state.log_history``, prime-rl, W&B's ``scan_history``, ours | rows |
| jsonl | verl's ``file`` logger | ``{"step": 1, "data": {...}}`` |
| text | verl's ``console`` logger; slime; Trainer | ``step:1 - a/b:0.1``; ``step 1: {'a/b': 0.1}``; ``{'loss': 0.1}`` |
| events.out.tfevents.* | TensorBoard, of any program | records |
| json | NeMo-RL's merged metrics | ``{"train/loss": {"1": 0.1}}`` |
| json, csv | MLflow | rows of ``key``, ``value``, ``step`` |
| csv | W&B, TensorBoard | a row a step; columns NAME, or RUN - NAME |

Names are those of ``curves.yaml``; what is not there is not read. A program is known by the names that only it writes.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from mantissa.base.bounds import boundary
from mantissa.base.errors import MantissaError, nearest
from mantissa.base.readers.csv import read_csv
from mantissa.base.readers.events import read_events
from mantissa.base.readers.json import DOCUMENT, ROW, parse_json, read_json, read_lines
from mantissa.base.readers.yaml import read_shipped
from mantissa.doctor.facts import unchanging
from mantissa.mismatch.usual import Usual, usual


class Role(StrEnum):
    """What a curve is of; d = log-prob of the learner - log-prob of the rollout, means over tokens.

    Of the gap: ``ABS`` mean |d|, ``MAX`` the largest, ``PROB`` mean difference of probabilities, ``MULT`` mean exp|d|,
    ``K1`` mean -d, ``K3`` mean exp(d) - 1 - d, ``RATIO`` mean exp(d). ``CLIPPED``: share of clipped tokens.
    ``SAME_REWARD``: share of groups whose rewards are equal. ``VERSION``: of the weights that sampled.
    """

    ABS = "gap_abs"
    PROB = "gap_prob"
    K3 = "gap_k3"
    MULT = "gap_mult"
    K1 = "gap_k1"
    MAX = "gap_max"
    RATIO = "ratio"
    ENTROPY = "entropy"
    GRAD_NORM = "grad_norm"
    LOSS = "loss"
    CLIPPED = "clipped"
    REWARD = "reward"
    REWARD_STD = "reward_std"
    SAME_REWARD = "same_reward"
    LENGTH = "length"
    LENGTH_MIN = "length_min"
    LENGTH_MAX = "length_max"
    TRUNCATED = "truncated"
    STALENESS = "staleness"
    VERSION = "version"
    LOSS_SCALE = "loss_scale"


@dataclass(frozen=True)
class Program:
    """One program's names, where they are from, and what to record next."""

    source: str
    names: dict[Role, str]
    record: str
    more: str


@dataclass(frozen=True)
class Mark:
    """A mean of the gap beyond which it is too large in bf16."""

    bf16: float
    source: str


@dataclass(frozen=True)
class Shown:
    """What a curve shows, in words."""

    title: str
    likely: str
    absent: str


@dataclass(frozen=True)
class Table:
    """All of ``curves.yaml``."""

    programs: dict[str, Program]
    loss_scales: tuple[str, ...]
    marks: dict[Role, Mark]
    faults: dict[str, Shown]


@functools.cache
def table() -> Table:
    """The table, read once."""
    given = unchanging(read_shipped(Path(__file__).with_name("curves.yaml")))
    return Table(
        {name: Program(**row | {"names": _by_role(row["names"])}) for name, row in given["programs"].items()},
        given["loss_scales"],
        _by_role({name: Mark(**row) for name, row in given["marks"].items()}),
        {name: Shown(**row) for name, row in given["faults"].items()},
    )


def _by_role(row: dict[str, Any]) -> dict[Role, Any]:
    return {Role(name): each for name, each in row.items()}


@dataclass(frozen=True)
class Curve:
    """``steps``, ``values``: float64 [N], by step; a step stands once. ``name``: as the log has it."""

    name: str
    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Log:
    """What a log holds. ``resumes``, ``evaluations``: steps. ``notes``: what was left out. ``expected``: the usual of
    its formats, which only a run's folder names."""

    program: str
    path: Path
    curves: Mapping[Role, Curve]
    resumes: tuple[float, ...] = ()
    evaluations: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    expected: Usual = field(default_factory=lambda: usual(()))


_MOST_POINTS = 20_000_000
_MOST_NAMES = 50_000
_LISTED = 500  # resumes and evaluations: enough to look beside
_EVALUATION = re.compile(r"^(?:eval|val|validation|test)(?:[-_/].*)?$")
_STEPS = ("step", "global_step", "_step", "Step", "train/step", "train/global_step", "trainer/global_step",
          "rollout/step", "training/global_step", "trainer/step")  # fmt: skip


@dataclass
class _Heap:
    """What the rows of a log say, as they come."""

    path: Path
    points: dict[str, dict[float, float]] = field(default_factory=dict)
    resumes: list[float] = field(default_factory=list)
    evaluations: dict[float, None] = field(default_factory=dict)
    last: float = -math.inf
    count: int = 0

    def add(self, step: float, row: Mapping[str, Any]) -> None:
        """The numbers of one row; a step that goes back is a resume."""
        if step < self.last:
            self.resumes.append(step)
        self.last = step
        for name, value in row.items():
            number = _number(value)
            if number is None or not isinstance(name, str):
                continue
            self.put(name, step, number)

    def put(self, name: str, step: float, value: float) -> None:
        if _EVALUATION.match(name.removeprefix("train/")):
            self.evaluations[step] = None
            return
        at = self.points.setdefault(name, {})
        at.pop(step, None)
        at[step] = value
        self.count += 1
        if self.count > _MOST_POINTS or len(self.points) > _MOST_NAMES:
            raise MantissaError(
                f"{self.path}: more than {_MOST_POINTS:,} numbers or {_MOST_NAMES:,} names; give a part of it"
            )


def _number(value: Any) -> float | None:
    """A number, or a text that is one: NaN and infinities too, for a loss may be one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and (len(value) > 40 or not _NUMERIC.fullmatch(value.strip())):
        return None
    return float(value)


_NUMERIC = re.compile(r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|NaN|inf|Infinity)")


def is_log(path: Path) -> bool:
    """Whether a file's name says that it is a log and no dump."""
    return "tfevents" in path.name or path.suffix in (".json", ".csv", ".log", ".txt", ".out", ".stdout", "")


def read_log(path: Path, program: str | None = None, mapping: Mapping[str, str] | None = None) -> Log:
    """The curves of a file, or of the newest log in a folder. ``program``: whose it is, None is found by its
    names. ``mapping``: role to name.

    Raises ``MantissaError`` for what is damaged, holds no figure that is known, or may be of two programs.
    """
    heap, notes = _Heap(path), list[str]()
    with boundary(path, "expected a training log: json, jsonl, csv, an event file, or a program's console output"):
        for file in _files(path):
            notes += _READERS[_layout(file)](file, heap)
    return _found(heap, program, mapping or {}, notes)


def _files(path: Path) -> list[Path]:
    """The file; of a folder the newest log, and all event files beside it, for a resumed run has several."""
    if not path.is_dir():
        return [path]
    first = next(newest(path))
    if "tfevents" not in first.name:
        return [first]
    return sorted((each for each in first.parent.glob("*tfevents*") if each.is_file()), key=lambda each: each.name)


def _layout(path: Path) -> str:
    """What a file is by how it begins, whatever its name ends in."""
    if "tfevents" in path.name:
        return "events"
    if path.suffix == ".csv":
        return "csv"
    with path.open("rb") as file:
        head = file.read(4096)
    if not head.strip():
        raise MantissaError(f"{path} is empty; expected a training log")
    if head.startswith((b"\x80", b"PK\x03\x04")):
        raise MantissaError(f"{path} holds a pickle or a zip, whatever its name says; as a dump it ends in .pt or .pkl")
    if b"\x00" in head:
        raise MantissaError(f"{path} is binary and no event file of TensorBoard; expected a training log")
    first = head.lstrip()[:1]
    if path.suffix in (".jsonl", ".ndjson"):
        return "rows"
    if path.suffix == ".json":
        return "json"
    return _json_or_rows(head) if first in (b"{", b"[") and not path.suffix else "text"


def _json_or_rows(head: bytes) -> str:
    """A text without an ending that begins with a bracket: rows, where its first line is a whole object."""
    try:
        return "rows" if isinstance(parse_json(head.splitlines()[0]), dict) and b"\n" in head else "json"
    except ValueError:
        return "json" if head.lstrip()[:1] == b"[" or not head.lstrip().startswith(b"{'") else "text"


# layouts


def _events(path: Path, heap: _Heap) -> tuple[str, ...]:
    found = read_events(path)
    if not found.scalars:
        raise MantissaError(f"{path} holds no scalar; it was cut off at its beginning, or is of a run that logged none")
    for each in found.scalars:
        heap.put(each.tag, each.step, each.value)
    heap.resumes += found.starts
    return () if found.whole else ("the file ends within a record, as of a run that still writes",)


def _rows(path: Path, heap: _Heap) -> tuple[str, ...]:
    """Lines of JSON; the last may be cut off, as of a run that still writes."""
    bad, several = None, 0
    for number, line in read_lines(path, ROW):
        if bad is not None:
            raise MantissaError(f"{path}, line {bad}: not JSON; delete the line, or write the file again")
        try:
            row = parse_json(line, ROW)
        except ValueError as error:
            if not several or line.endswith(b"\n"):
                raise MantissaError(f"{path}, line {number}: not JSON ({str(error)[:200]}); delete the line") from None
            bad = number
            continue
        several += 1
        _row(f"{path}, line {number}", row, heap, several)
    return () if bad is None else (f"line {bad} is cut off, as of a run that still writes",)


def _row(where: str, row: Any, heap: _Heap, place: int) -> None:
    """A flat row, verl's nested one, or one point of MLflow's."""
    if not isinstance(row, dict):
        raise MantissaError(f"{where}: expected an object of figures, got {type(row).__name__}")
    if {"key", "value"} <= row.keys() and isinstance(row["key"], str):
        if (value := _number(row["value"])) is not None:
            heap.put(row["key"], _step(row, place), value)
        return
    inner = row.get("data", row.get("metrics"))
    heap.add(_step(row, place), inner if isinstance(inner, dict) else row)


def _step(row: Mapping[str, Any], place: int) -> float:
    """The step that a row names; its place where it names none."""
    for name in _STEPS:
        step = _number(row.get(name))
        if step is not None and abs(step) < 2**53:
            return step
    return float(place)


def _json(path: Path, heap: _Heap) -> tuple[str, ...]:
    value = read_json(path, limits=DOCUMENT)
    if isinstance(value, dict):
        for key in ("log_history", "metrics", "history"):
            if isinstance(value.get(key), list):
                value = value[key]
                break
    if isinstance(value, list):
        for place, row in enumerate(value, start=1):
            if isinstance(row, list) and len(row) == 3 and all(_number(each) is not None for each in row):
                raise MantissaError(
                    f"{path}: one scalar of TensorBoard without its name; export the event file, or csv of all"
                )
            _row(f"{path}, row {place}", row, heap, place)
        return ()
    if isinstance(value, dict) and value and all(isinstance(each, dict) for each in value.values()):
        _by_name(value, heap)
        return ()
    if isinstance(value, dict):
        _row(str(path), value, heap, 1)
        return ("one row: a summary, and no curve",)
    raise MantissaError(f"{path}: expected rows of figures, or figures by name, got {type(value).__name__}")


def _by_name(value: Mapping[str, Mapping[str, Any]], heap: _Heap) -> None:
    """``{name: {step: value}}``, as NeMo-RL's tests merge event files."""
    for name, points in value.items():
        for key, each in points.items():
            step, number = _number(key), _number(each)
            if step is not None and number is not None:
                heap.put(name, step, number)


def _csv(path: Path, heap: _Heap) -> tuple[str, ...]:
    """A row a step; or MLflow's, a row a point. W&B writes RUN - NAME, and __MIN and __MAX of a group beside it."""
    runs: set[str] = set()
    for place, row in enumerate(read_csv(path), start=1):
        if {"key", "value"} <= row.keys():
            _row(f"{path}, row {place}", row, heap, place)
            continue
        plain: dict[str, str] = {}
        for name, cell in row.items():
            run, dash, rest = name.rpartition(" - ")
            if name.endswith(("__MIN", "__MAX")):
                continue
            plain[rest if dash else name] = cell
            runs |= {run} if dash and not rest.startswith("_") else set()
        if len(runs) > 1:
            raise MantissaError(
                f"{path} holds {len(runs)} runs; export one of them: {', '.join(sorted(runs)[:5])[:200]}"
            )
        heap.add(_step(plain, place), plain)
    return ()


_CONSOLE = re.compile(rb"\bstep:(\d{1,15}) - ")
_PIECE = re.compile(r"([^\s:]{1,200}):(?:np\.\w{1,20}\()?([-+]?(?:\d[\d.eE+-]{0,40}|nan|inf))\)?")
_BEFORE = re.compile(rb"\b(step|rollout|perf) (\d{1,15}): $")
_SCALE = re.compile(rb"\bloss scale: ?[\d.eE+]{1,40}, reducing to ([\d.eE+]{1,40})|\| loss scale: ?([\d.eE+]{1,40}) \|")
_LONGEST_LINE = 1 << 17  # bytes: a hundred figures are a twentieth of it
_ENTRY = re.compile(r"'([^']{1,200})': '?(?:np\.\w{1,20}\()?([-+]?(?:\d[\d.eE+-]{0,40}|nan|inf))\)?'?(?=[,}])")


def _text(path: Path, heap: _Heap) -> tuple[str, ...]:
    """Lines that a program printed, among any others."""
    seen = 0
    for _, line in read_lines(path, ROW):
        if len(line) > _LONGEST_LINE:
            continue
        step, before = None, None
        if found := _CONSOLE.search(line):
            step = found[1]
            pieces = line[found.end() :].decode("utf-8", "replace").split(" - ")
            entries = {piece[1]: piece[2] for each in pieces if (piece := _PIECE.fullmatch(each.strip()))}
        elif (start := line.find(b"{'")) >= 0:
            before = _BEFORE.search(line[max(0, start - 40) : start])
            step = before[2] if before else None
            entries = {piece[1]: piece[2] for piece in _ENTRY.finditer(line[start:].decode("utf-8", "replace"))}
        elif scale := _SCALE.search(line):  # DeepSpeed's word at an overflow, Megatron's at each iteration
            entries = {"loss_scale": (scale[1] or scale[2]).decode()}
        else:
            continue
        if entries and before is not None and before[1] != b"step":  # slime counts rollouts apart from steps
            seen += 1
            for name, value in entries.items():
                heap.put(name, float(before[2]), float(value))
        elif entries:
            seen += 1
            heap.add(_step(entries, seen) if step is None else float(step), entries)
    if not seen:
        raise MantissaError(
            f"{path}: no line with figures; expected those of verl's console (step:1 - actor/loss:0.1), or "
            "dictionaries as slime and Trainer print them"
        )
    return ()


_READERS = {"events": _events, "rows": _rows, "json": _json, "csv": _csv, "text": _text}


# whose it is


def _plain(name: str) -> str:
    return name.removeprefix("train/")


def _found(heap: _Heap, program: str | None, mapping: Mapping[str, str], notes: Iterable[str]) -> Log:
    """The curves that are known, by the names of the program that they are of."""
    by_name: dict[str, list[str]] = {}
    for name in heap.points:
        by_name.setdefault(_plain(name), []).append(name)
    whose = program if program in table().programs else _whose(heap.path, by_name, bool(mapping))
    chosen = {role: name for role, name in table().programs[whose].names.items() if _plain(name) in by_name}
    scales = [name for name in table().loss_scales if _plain(name) in by_name]
    if scales:
        chosen.setdefault(Role.LOSS_SCALE, scales[0])
    chosen |= _mapped(heap, mapping)
    curves = {}
    for role, name in chosen.items():
        written = [name] if name in heap.points else by_name[_plain(name)]
        if len(written) > 1:
            raise MantissaError(f"{heap.path}: both {written[0]} and {written[1]} may be {role}; say --map {role}=NAME")
        points = sorted(heap.points[written[0]].items())
        both = np.array(points, dtype=np.float64).reshape(-1, 2)
        curves[role] = Curve(written[0], both[:, 0], both[:, 1])
    if not curves:
        raise MantissaError(f"{heap.path}: no figure of {whose} in it; {_there(by_name)}")
    ends = tuple(heap.resumes[:_LISTED]), tuple(sorted(heap.evaluations)[:_LISTED])
    return Log(whose, heap.path, curves, ends[0], ends[1], tuple(notes))


def _whose(path: Path, by_name: Mapping[str, list[str]], mapped: bool) -> str:
    """The program with the most of its own names in the log; those that several write decide nothing."""
    programs = table().programs
    writers: dict[str, int] = {}
    for each in programs.values():
        for name in {_plain(name) for name in each.names.values()}:
            writers[name] = writers.get(name, 0) + 1
    own, all_ = {}, {}
    for whose, each in programs.items():
        there = {_plain(name) for name in each.names.values()} & by_name.keys()
        own[whose], all_[whose] = sum(writers[name] == 1 for name in there), len(there)
    best = max(own, key=lambda whose: (own[whose], all_[whose]))
    if own[best]:
        rivals = [each for each in own if each != best and (own[each], all_[each]) == (own[best], all_[best])]
        if rivals:
            raise MantissaError(f"{path}: names of {best} and of {rivals[0]} alike; say which by --from")
        return best
    if all_[best] or mapped or any(_plain(name) in by_name for name in table().loss_scales):
        return "trainer"
    raise MantissaError(f"{path}: no figure that is known; {_there(by_name)}")


def _there(by_name: Mapping[str, Any]) -> str:
    names = ", ".join(sorted(by_name)[:8])[:300] or "nothing"
    return f"it has {names}; say which is the gap: --map gap_abs=NAME (mean |d|), gap_k1, gap_k3, gap_prob or gap_mult"


def _mapped(heap: _Heap, mapping: Mapping[str, str]) -> dict[Role, str]:
    for role, name in mapping.items():
        if role not in list(Role):
            raise MantissaError(f"--map {role}: of a log, expected one of {', '.join(Role)}{nearest(role, list(Role))}")
        if name not in heap.points:
            raise MantissaError(f"{heap.path}: --map {role}={name}: no such figure{nearest(name, heap.points)}")
    return {Role(role): name for role, name in mapping.items()}


def newest(folder: Path) -> Iterator[Path]:
    """The logs of a folder, the one to read first."""
    states = [each for each in folder.rglob("trainer_state.json") if each.is_file()]
    yield from sorted(states, key=lambda each: (each.parent != folder, -_last_number(each.parent.name)))
    events = [each for each in folder.rglob("*tfevents*") if each.is_file()]
    yield from sorted(events, key=lambda each: -each.stat().st_mtime)
    yield from (each for each in (folder / "metrics.jsonl",) if each.is_file())


def _last_number(name: str) -> int:
    found = re.findall(r"\d{1,15}", name)
    return int(found[-1]) if found else -1
