"""The archive: every program that was executed, in the database of the replay buffer, a generation a transaction; and
what it knows of a proposal before it is executed: how the same lines fared elsewhere in its task.

Nothing is kept elsewhere: what a killed run needs to go on is what was committed, and a generation that was not is
drawn, and executed, again.

A change is the lines that a child has and its parent has not, and the reverse: text alone, so that the history of edits
and of what a model wrote is one. A line is a program's, without its indentation. Only candidates of earlier generations
count, so nothing of what is executed beside a proposal, or after it, can stand in its history.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mantissa.base.readers.json import parse_json
from mantissa.genesis.worldmodel import SQLiteBuffer, Trajectory

STEEPNESS = 10.0  # of the odds of a parent in its score
_SCHEMA = """
CREATE TABLE IF NOT EXISTS candidates (number INTEGER PRIMARY KEY AUTOINCREMENT, task TEXT NOT NULL,
    digest TEXT NOT NULL, body TEXT NOT NULL, UNIQUE (task, digest));
CREATE TABLE IF NOT EXISTS generations (task TEXT NOT NULL, generation INTEGER NOT NULL, proposed INTEGER NOT NULL,
    executed INTEGER NOT NULL, best REAL NOT NULL, retrained INTEGER NOT NULL, PRIMARY KEY (task, generation));
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL)
"""


@dataclass(frozen=True)
class Candidate:
    """A program that was executed. ``number``: in the order of execution, over all tasks; ``parents``: theirs.

    ``operator``: start, revise, recombine or refine; ``actions``: what was done to the parent, in words. ``kept``: it
    ran, so it may be a parent. ``probability``: of success as the world model said before, NaN where none did.
    """

    task: str
    source: str
    operator: str
    generation: int
    score: float
    passed: tuple[bool, ...]
    failure: str
    errors: tuple[str, ...]
    kept: bool
    cheat: bool
    parents: tuple[int, ...] = ()
    actions: tuple[str, ...] = ()
    probability: float = math.nan
    number: int = field(default=0, compare=False)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()[:32]


class Archive:
    """Candidates and generations, beside the trajectories of ``buffer``."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.buffer = SQLiteBuffer(path, capacity)
        self.buffer.database.create(_SCHEMA)

    def settle(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Write these settings if there are none yet; those that are there."""
        with self.buffer.database.writing() as connection:
            rows = [(name, json.dumps(value)) for name, value in values.items()]
            connection.executemany("INSERT OR IGNORE INTO settings VALUES (?, ?)", rows)
        return {name: parse_json(value) for name, value in self.buffer.database.read("SELECT * FROM settings")}

    def commit(
        self,
        candidates: Sequence[Candidate],
        trajectories: Iterable[Trajectory],
        row: tuple[str, int, int, int, float, int],
    ) -> None:
        """One generation: what was executed, what was learnt from it, and its row. All of it or nothing."""
        with self.buffer.database.writing() as connection:
            connection.execute("INSERT INTO generations VALUES (?, ?, ?, ?, ?, ?)", row)
            for each in candidates:
                body = {name: value for name, value in vars(each).items() if name != "number"}
                values = (each.task, each.digest, json.dumps(body))
                connection.execute("INSERT INTO candidates (task, digest, body) VALUES (?, ?, ?)", values)
            self.buffer.store_in(connection, trajectories)

    def candidates(self, task: str | None = None) -> list[Candidate]:
        """All, or one task's, in the order of execution."""
        condition, values = ("1", ()) if task is None else ("task = ?", (task,))
        rows = self.buffer.database.read(
            f"SELECT number, body FROM candidates WHERE {condition} ORDER BY number", values
        )
        found = []
        for number, body in rows:
            fields = parse_json(body)
            lists = {name: tuple(fields[name]) for name in ("passed", "errors", "parents", "actions")}
            found.append(Candidate(**(fields | lists), number=number))
        return found

    def generations(self) -> list[dict[str, Any]]:
        """The rows of all generations, in the order in which they were committed."""
        names = ("task", "generation", "proposed", "executed", "best", "retrained")
        rows = self.buffer.database.read(f"SELECT {','.join(names)} FROM generations ORDER BY rowid")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def close(self) -> None:
        self.buffer.close()


def parent_weights(candidates: Sequence[Candidate]) -> list[float]:
    """sigmoid(``STEEPNESS`` (score - 1/2)) / (1 + children) of each kept candidate, 0 for the others.

    Source: Zhang et al., "Darwin Goedel Machine" (2025), arXiv:2505.22954, with its values.
    """
    children = {each.number: 0 for each in candidates}
    for each in candidates:
        for parent in each.parents[:1]:
            children[parent] = children.get(parent, 0) + 1
    return [
        each.kept / (1 + math.exp(-STEEPNESS * (each.score - 0.5))) / (1 + children[each.number]) for each in candidates
    ]


def draw_parent(candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
    """One kept candidate, by ``parent_weights``."""
    return rng.choices(candidates, parent_weights(candidates))[0]


def partner_of(parent: Candidate, candidates: Sequence[Candidate], rng: random.Random) -> Candidate | None:
    """One that passes a test that ``parent`` fails, and the reverse; None where there is none."""
    pairs = [
        each for each in candidates
        if each.kept and any(b and not a for a, b in zip(parent.passed, each.passed, strict=True))
        and any(a and not b for a, b in zip(parent.passed, each.passed, strict=True))
    ]  # fmt: skip
    return rng.choice(pairs) if pairs else None


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """The highest score; of several the first."""
    return max(candidates, key=lambda each: (each.score, -each.number))


Lines = frozenset[str]
ENDS = ("rose", "same", "fell")


def end_of(child: Candidate, parent: Candidate) -> str:
    """How a child's score compares with its parent's, one of ``ENDS``; what did not run or cheated fell."""
    return "rose" if child.score > parent.score else "same" if child.score == parent.score and child.kept else "fell"


class History:
    """Of one task's candidates, as they were before a generation."""

    def __init__(self, known: Sequence[Candidate]) -> None:
        self._best = best_of(known).score if known else 0.0
        self._executed = len(known)
        self._by_number = {each.number: each for each in known}
        self._children, self._adding = defaultdict[int, Counter[str]](Counter), defaultdict[str, Counter[str]](Counter)
        self._change = defaultdict[tuple[Lines, Lines], Counter[str]](Counter)
        self._having = defaultdict[str, list[Candidate]](list)
        for child in known:
            for line in _lines(child.source):
                self._having[line].append(child)
            if child.parents:
                parent = self._by_number[child.parents[0]]
                end, (removed, added) = end_of(child, parent), changed(parent.source, child.source)
                self._children[parent.number][end] += 1
                self._change[removed, added][end] += 1
                for line in added:
                    self._adding[line][end] += 1

    def facts(self, parent: Candidate, source: str) -> dict[str, float]:
        """Numbers about ``source``, proposed as a child of ``parent``, and about that parent.

        ``behind``: best score so far less the parent's; ``parent_gained``: the parent's score less its own parent's;
        ``executed``: programs so far; ``children``, ``children_rose``: of the parent; ``changes_END``: how often the
        very same change, of any parent, ended so; ``alike_END``: the same of changes that added one of its lines;
        ``new_tests``: most tests that a program with one of these lines passes and the parent fails;
        ``removed``, ``added``: lines; ``grown``: words, in tens.
        """
        removed, added = changed(parent.source, source)
        before = self._by_number.get(parent.parents[0]) if parent.parents else None
        children, same = self._children[parent.number], self._change[removed, added]
        alike = sum((self._adding[line] for line in sorted(added)), Counter[str]())
        passed = [
            sum(theirs and not ours for ours, theirs in zip(parent.passed, each.passed, strict=True))
            for line in added for each in self._having[line]
        ]  # fmt: skip
        return {
            "behind": self._best - parent.score,
            "parent_gained": 0.0 if before is None else parent.score - before.score,
            "executed": self._executed,
            "children": children.total(),
            "children_rose": children["rose"],
            **{f"changes_{end}": same[end] for end in ENDS},
            **{f"alike_{end}": alike[end] for end in ENDS},
            "new_tests": max(passed, default=0),
            "removed": len(removed),
            "added": len(added),
            "grown": (len(source.split()) - len(parent.source.split())) / 10,
        }


@functools.lru_cache(maxsize=1024)  # a generation asks again for all that was executed before
def changed(parent: str, child: str) -> tuple[Lines, Lines]:
    """The lines that a child no longer has as often as its parent, and those that it has more often."""
    before, after = Counter(_stripped(parent)), Counter(_stripped(child))
    return frozenset(before - after), frozenset(after - before)


def _lines(source: str) -> set[str]:
    return set(_stripped(source))


def _stripped(source: str) -> Iterable[str]:
    return filter(None, map(str.strip, source.splitlines()))
