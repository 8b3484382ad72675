"""The archive: every program that was executed, in the database of the replay buffer, a generation a transaction.

Nothing is kept elsewhere: what a killed run needs to go on is what was committed, and a generation that was not is
drawn, and executed, again.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
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


def parent_weights(candidates: Sequence[Candidate], steepness: float = STEEPNESS, middle: float = 0.5) -> list[float]:
    """sigmoid(steepness (score - middle)) / (1 + children) of each kept candidate, 0 for the others.

    Source: Zhang et al., "Darwin Goedel Machine" (2025), arXiv:2505.22954, with its values.
    """
    children = {each.number: 0 for each in candidates}
    for each in candidates:
        for parent in each.parents[:1]:
            children[parent] = children.get(parent, 0) + 1
    return [
        each.kept / (1 + math.exp(-steepness * (each.score - middle))) / (1 + children[each.number])
        for each in candidates
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
