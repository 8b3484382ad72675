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

A field in another is ``OUTER.INNER`` (``final.reward/accuracy``). Of a lab only finished cells are rows.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
Row = dict[str, Any]
_QUERY = re.compile(
    r"(?:(?P<verb>[a-z]+) )?(?P<file>[\w/]+)\{(?P<where>[^{}]*)\}\.(?P<field>[^:]+)(?::(?P<format>.+))?"
)
_BOUNDS = (("{}_low", "{}_high"), ("quartile_low", "quartile_high"), ("low", "high"), ("min", "max"))


@functools.cache
def rows(file: str) -> tuple[Row, ...]:
    """Every row of ``results/FILE.jsonl``, in the file's order; of a lab the cells that ran to their end."""
    path = RESULTS / f"{file}.jsonl"
    if not path.is_file():
        raise SystemExit(f"there is no {path.relative_to(RESULTS.parent)}")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    if file.startswith("lab/"):
        return tuple(row for row in found if row.get("status") == "finished")
    if file == "final_policy":
        return tuple(row | {"cell": row["run"].rpartition("-seed")[0]} for row in found)
    return tuple(found)


def select(file: str, where: dict[str, str]) -> list[Row]:
    """The rows in which every key has one of its values, written ``A|B``."""
    return [row for row in rows(file) if all(str(row.get(key)) in value.split("|") for key, value in where.items())]


def field(row: Row, name: str) -> Any:
    """A row's value; ``OUTER.INNER`` is one in another."""
    if name in row:
        return row[name]
    outer, _, inner = name.partition(".")
    return row[outer][inner]


def over_seeds(file: str, where: dict[str, str], name: str) -> dict[int, float]:
    """Seed -> the newest row's value."""
    return {row["seed"]: field(row, name) for row in select(file, where)}


def paired(file: str, where: dict[str, str], name: str) -> Any:
    """The mean over seeds of ``A``'s less ``B``'s, where one value is ``A - B``: an ``Estimate`` with its interval."""
    from mantissa.runs.groups import over_seeds as interval

    ours, theirs = (over_seeds(file, side, name) for side in _sides(where, " - "))
    return interval([value - theirs[seed] for seed, value in sorted(ours.items())])


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
        ours, theirs = (field(select(file, side)[-1], name) for side in _sides(where, " / "))
        return shown(ours / theirs, spec)
    estimate = paired(file, where, name)
    bounds = f"{shown(estimate.low, spec)}..{shown(estimate.high, spec)}"
    mean = shown(estimate.value, spec)
    return {"paired": f"{mean} ({bounds})", "off": mean, "bounds": bounds}[verb]


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
        chosen = select(file, where)
        if not chosen:
            raise SystemExit(f"{query!r}: no row of {file}.jsonl is such")
        return _VERBS[verb](chosen, name, spec)
    except (KeyError, IndexError, StopIteration, TypeError, ValueError) as error:
        raise SystemExit(f"{query!r} cannot be answered: {type(error).__name__}: {error}") from None
