"""Rows of ``results/``, and figures asked of them by a line of text.

A figure is ``[VERB] FILE{KEY=VALUE, ...}.FIELD[:FORMAT]``. FILE is a file of ``results/`` without its ending, and the
braces say which of its rows: ``KEY=VALUE`` holds where the row's value, as text, is VALUE (``A|B``: either). FORMAT is
Python's. Without a verb it is the newest such row's field. The verbs:

- ``each``: every row's, in order of seeds. ``span``: least and largest. ``mean``, ``min``, ``max``, ``sum``, ``count``.
- ``seeds``: the mean over seeds, with Student's 95% interval.
- ``interval``: the newest row's with the interval, quartiles or range that the row has beside it.
- ``ratio``: one VALUE is ``A / B``: the newest row's of A over that of B.
- ``paired``: one VALUE is ``A - B``: the mean over seeds of A's less B's, with Student's 95% interval. ``off`` is that
  mean alone, ``bounds`` the interval alone.

A row counts by what ran: its commit. ``LOST`` are commits that rows name and that are not in the history, so that
nobody can look up what ran; ``rows`` leaves such rows out unless asked for them, and a figure or a table line made of
one ends in ``†``. A difference of two runs is of one code: a pair whose rows have two sources is refused, and one of
two commits, from before rows had a source, makes the figure end in ``‡``. A row with a source and uncommitted edits is
refused; of older rows, whose mark counts results that were being written as edits, ``make_figures.origins`` says how
many a finding has.

A field in another is ``OUTER.INNER`` (``final.reward/accuracy``). Of a lab only finished cells are rows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from mantissa.runs.rows import Row, codes_of, commit_of, read

# Commits that rows name and that are not in the history (a test asks git). Only rows older than ``source`` may, and
# those of commits that were lost with the machine that they were made on: the rows, a GPU's among them, are all that is
# left.
GONE_WITH_A_MACHINE = frozenset({"484b1509646e", "a364a05bf95d", "d64bd9fa28db"})
LOST = GONE_WITH_A_MACHINE | {
    "16014c316482", "20ba512f0201", "356b439fdf79", "3b44753d887f", "3d28539de23d", "58e6d54ceaf1", "84344095cf7e",
    "8498bb59b428", "995e26f17142",
}  # fmt: skip
# Rows older than ``source`` that are known to be of another kernel than the others of their file, by commit: it summed
# a gradient in another order.
KERNELS = {("lab/clipping", "a7534b8936fc"): "before", ("clipping_replaced", "a7534b8936fc"): "before"}
GONE, TWO = "†", "‡"
RESULTS = Path(__file__).resolve().parents[1] / "results"
_QUERY = re.compile(
    r"(?:(?P<verb>[a-z]+) )?(?P<file>[\w/]+)\{(?P<where>[^{}]*)\}\.(?P<field>[^:]+)(?::(?P<format>.+))?"
)
_BOUNDS = (("{}_low", "{}_high"), ("quartile_low", "quartile_high"), ("low", "high"), ("min", "max"))


def is_lost(row: Row) -> bool:
    """Whether nobody can look up what ran: it names a commit that is not in the history, or none."""
    return "commit" in row and (row["commit"] is None or commit_of(row) in LOST)


def marks(used: Sequence[Row]) -> str:
    """What is printed behind anything made of these rows."""
    return GONE if any(map(is_lost, used)) else ""


@functools.cache
def _read(file: str) -> tuple[Row, ...]:
    path = RESULTS / f"{file}.jsonl"
    if not path.is_file():
        raise SystemExit(f"there is no {path.relative_to(RESULTS.parent)}")
    found = read(path)
    for row in found:
        if row.get("dirty") or row.get("source_changed"):
            raise SystemExit(f"{file}.jsonl: a row of uncommitted or changed code ({row['time']}) is no result")
    if file.startswith("lab/"):
        return tuple(row for row in found if row.get("status") == "finished")
    if file == "final_policy":
        return tuple(row | {"cell": row["run"].rpartition("-seed")[0]} for row in found)
    return tuple(found)


@functools.cache
def rows(file: str, lost: bool = False) -> tuple[Row, ...]:
    """Every row of ``results/FILE.jsonl``, in the file's order; of a lab the cells that ran to their end. ``lost``:
    those too that ``is_lost``; who asks for them prints ``marks``."""
    return tuple(row for row in _read(file) if lost or not is_lost(row))


def select(file: str, where: dict[str, str], lost: bool = False) -> list[Row]:
    """The rows in which every key has one of its values, written ``A|B``."""
    return _noted([r for r in rows(file, lost) if _is_such(r, where)])


def _such(file: str, where: dict[str, str]) -> list[Row]:
    return [row for row in rows(file, lost=True) if _is_such(row, where)]


def _is_such(row: Row, where: dict[str, str]) -> bool:
    return all(str(row.get(key)) in value.split("|") for key, value in where.items())


_seen: list[Row] | None = None


def _noted(used: list[Row]) -> list[Row]:
    if _seen is not None:
        _seen.extend(used)
    return used


def used_by(make: Callable[[], str]) -> tuple[str, list[Row]]:
    """A figure, and the rows that it was made of: those that it selected."""
    global _seen
    _seen = []
    try:
        return make(), _seen
    finally:
        _seen = None


def field(row: Row, name: str) -> Any:
    """A row's value; ``OUTER.INNER`` is one in another."""
    if name in row:
        return row[name]
    outer, _, inner = name.partition(".")
    return row[outer][inner]


def over_seeds(file: str, where: dict[str, str], name: str, lost: bool = False) -> dict[int, float]:
    """Seed -> the newest row's value."""
    return {row["seed"]: field(row, name) for row in _noted(list(_by_seed(file, where, lost).values()))}


def _by_seed(file: str, where: dict[str, str], lost: bool) -> dict[int, Row]:
    """Seed -> the newest row."""
    return {row["seed"]: row for row in rows(file, lost) if _is_such(row, where)}


def pairs(file: str, where: dict[str, str]) -> list[tuple[Row, Row]]:
    """Of each seed the newest rows of ``A`` and ``B``, where one value is ``A - B``; ``SystemExit`` where two codes
    are known to have run them."""
    ours, theirs = (_by_seed(file, side, lost=True) for side in _sides(where, " - "))
    both = [(row, theirs[seed]) for seed, row in sorted(ours.items())]
    _noted([row for pair in both for row in pair])
    for one, other in both:
        codes = codes_of((one, other), {commit: kernel for (of, commit), kernel in KERNELS.items() if of == file})
        if codes[0] != codes[1]:
            raise SystemExit(f"{file}.jsonl, seed {one['seed']}: two codes ran this pair ({codes[0]}, {codes[1]})")
    return both


def paired(file: str, where: dict[str, str], name: str) -> Any:
    """The mean over seeds of ``A``'s less ``B``'s, where one value is ``A - B``: an ``Estimate`` with its interval."""
    from mantissa.runs.groups import over_seeds as interval

    return interval([field(one, name) - field(other, name) for one, other in pairs(file, where)])


def _sides(where: dict[str, str], sign: str) -> tuple[dict[str, str], dict[str, str]]:
    key = next(key for key, value in where.items() if sign in value)
    left, right = where[key].split(sign)
    return where | {key: left}, where | {key: right}


def shown(value: float, spec: str) -> str:
    """A number in a format; a point with nothing behind it is left out, and so is the sign of 0."""
    text = format(value, spec)
    text = re.sub(r"\.(?=$|%)", "", text)
    return text.replace("-", "", 1) if text.startswith("-") and not re.search("[1-9]", text) else text


def _interval(found: Sequence[Row], name: str, spec: str) -> str:
    row = found[-1]
    low, high = next((low.format(name), high.format(name)) for low, high in _BOUNDS if low.format(name) in row)
    return f"{shown(field(row, name), spec)} ({shown(row[low], spec)}..{shown(row[high], spec)})"


def _span(found: Sequence[Row], name: str, spec: str) -> str:
    values = [field(row, name) for row in found]
    ends = [shown(value, spec) for value in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _each(found: Sequence[Row], name: str, spec: str) -> str:
    of_seed = {row["seed"]: field(row, name) for row in found}  # the newest of each
    return ", ".join(shown(of_seed[seed], spec) for seed in sorted(of_seed))


def _seeds(found: Sequence[Row], name: str, spec: str) -> str:
    from mantissa.runs.groups import over_seeds as interval

    estimate = interval(list({row["seed"]: field(row, name) for row in found}.values()))
    assert estimate.low is not None  # there are several seeds
    assert estimate.high is not None
    return f"{shown(estimate.value, spec)} ({shown(estimate.low, spec)}..{shown(estimate.high, spec)})"


_VERBS: dict[str, Callable[[Sequence[Row], str, str], str]] = {
    "": lambda found, name, spec: shown(field(found[-1], name), spec),
    "each": _each,
    "seeds": _seeds,
    "span": _span,
    "interval": _interval,
    "mean": lambda found, name, spec: shown(fmean(field(row, name) for row in found), spec),
    "min": lambda found, name, spec: shown(min(field(row, name) for row in found), spec),
    "max": lambda found, name, spec: shown(max(field(row, name) for row in found), spec),
    "sum": lambda found, name, spec: shown(sum(field(row, name) for row in found), spec),
    "count": lambda found, name, spec: shown(len(found), spec),
}


def _of_two(verb: str, file: str, where: dict[str, str], name: str, spec: str) -> str:
    if verb == "ratio":
        ours, theirs = _noted([_such(file, side)[-1] for side in _sides(where, " / ")])
        return shown(field(ours, name) / field(theirs, name), spec) + marks([ours, theirs])
    both, estimate = pairs(file, where), paired(file, where, name)
    bounds = "" if verb == "off" else f"{shown(estimate.low, spec)}..{shown(estimate.high, spec)}"
    mean = shown(estimate.value, spec)
    two = TWO if any(commit_of(one) != commit_of(other) for one, other in both) else ""
    mark = marks([row for pair in both for row in pair]) + two
    return {"paired": f"{mean} ({bounds})", "off": mean, "bounds": bounds}[verb] + mark


def answer(query: str) -> str:
    """The figure that ``query`` asks for; ``SystemExit`` says what of it no row has."""
    found = _QUERY.fullmatch(query)
    if found is None:
        raise SystemExit(f"{query!r} is no figure: [VERB] FILE{{KEY=VALUE, ...}}.FIELD[:FORMAT]")
    verb, file, name, spec = found["verb"] or "", found["file"], found["field"], found["format"] or ""
    where = dict(tuple(each.strip().split("=", 1)) for each in found["where"].split(",") if each.strip())
    try:
        if verb in ("ratio", "paired", "off", "bounds"):
            return _of_two(verb, file, where, name, spec)
        chosen = _such(file, where)
        if not chosen:
            raise SystemExit(f"{query!r}: no row of {file}.jsonl is such")
        chosen = list({row["seed"]: row for row in chosen}.values()) if verb in ("each", "seeds") else chosen
        used = _noted(chosen[-1:] if verb in ("", "interval") else chosen)
        return _VERBS[verb](chosen, name, spec) + marks(used)
    except (KeyError, IndexError, StopIteration, TypeError, ValueError) as error:
        raise SystemExit(f"{query!r} cannot be answered: {type(error).__name__}: {error}") from None
