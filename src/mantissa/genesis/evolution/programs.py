"""Programming tasks, and the verdict of their tests on a program; programs run in the sandbox and nowhere else."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mantissa.base.bounds import boundary, regular_file
from mantissa.base.errors import MantissaError, nearest
from mantissa.base.readers.yaml import RECORDED, read_yaml
from mantissa.tasks.code import MAX_PROGRAM_CHARACTERS, CodeVerifier, same
from mantissa.tasks.sandbox.run import Sandbox, limits_of

SHIPPED = Path(__file__).with_name("tasks.yaml")
Test = tuple[list[Any], Any]
_TESTS = ("development", "held_out", "canary")


@dataclass(frozen=True)
class Task:
    """A function to write. ``start``: a program that is wrong or unfinished. Tests are (arguments, value).

    Proposers see those of ``development``; ``held_out`` are for the final report; ``canary`` break what knows
    development by heart.
    """

    name: str
    text: str
    start: str
    development: tuple[Test, ...]
    held_out: tuple[Test, ...]
    canary: tuple[Test, ...]


@dataclass(frozen=True)
class ProgramResult:
    """What the tests said. ``score``: share of development passed; 0 where all passed and a canary did not (``cheat``).

    ``ran``: at least one call returned or raised, so the program is one. ``failure``: the first failing test in words,
    empty where none; ``errors``: how its calls failed, each once. ``ended``: as ``sandbox.run.Outcome``.
    """

    score: float
    passed: tuple[bool, ...]
    ran: bool
    cheat: bool
    ended: str
    failure: str
    errors: tuple[str, ...]


class Judge:
    """Runs programs against tasks, ``workers`` at a time. ``isolation``: as the ``code`` task's. A context manager."""

    def __init__(
        self, timeout_s: float = 1.0, memory_mib: int = 256, isolation: Any = "required", workers: int = 2
    ) -> None:
        CodeVerifier(isolation=isolation).prepare()
        self._sandboxes = [Sandbox(limits_of(timeout_s, memory_mib)) for _ in range(workers)]
        self._free = SimpleQueue[Sandbox]()
        for sandbox in self._sandboxes:
            self._free.put(sandbox)
        self._threads = ThreadPoolExecutor(workers)

    def judge(self, task: Task, sources: Sequence[str]) -> list[ProgramResult]:
        """Development and canary tests of each, in one run a program."""
        return list(
            self._threads.map(lambda source: self._verdict(task, source, task.development, task.canary), sources)
        )

    def held_out(self, task: Task, source: str) -> float:
        """The share of held-out tests passed."""
        return self._verdict(task, source, task.held_out, ()).score

    def _verdict(self, task: Task, source: str, tests: Sequence[Test], canary: Sequence[Test]) -> ProgramResult:
        if len(source) > MAX_PROGRAM_CHARACTERS:
            return ProgramResult(0.0, (False,) * len(tests), False, False, "too long", "", ())
        everything = [*tests, *canary]
        sandbox = self._free.get()
        try:
            outcome = sandbox.run(source, task.name, [arguments for arguments, _ in everything])
        finally:
            self._free.put(sandbox)
        if outcome.ended == "sandbox lost":
            raise RuntimeError("the sandbox died or fell silent")
        outputs = [*outcome.outputs, *[{}] * (len(everything) - len(outcome.outputs))]  # it ended early: not passed
        hits = [
            "value" in output and same(output["value"], value)
            for output, (_, value) in zip(outputs, everything, strict=True)
        ]
        passed, failure, errors = tuple(hits[: len(tests)]), "", dict[str, None]()
        for output, hit, (arguments, value) in zip(outputs, passed, tests, strict=False):
            if not hit:
                got = json.dumps(output["value"])[:200] if "value" in output else output.get("error", outcome.ended)
                call = ", ".join(map(json.dumps, arguments))
                failure = failure or f"{task.name}({call}) gave {got}, expected {json.dumps(value)}"
                errors["wrong value" if "value" in output else str(got)[:40]] = None
        cheat = all(passed) and not all(hits)
        score = 0.0 if cheat else sum(passed) / len(passed)
        return ProgramResult(score, passed, bool(outcome.outputs), cheat, outcome.ended, failure, tuple(errors))

    def close(self) -> None:
        self._threads.shutdown()
        for sandbox in self._sandboxes:
            sandbox.close()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@functools.cache
def shipped() -> dict[str, Task]:
    """The tasks that come with the package, by name."""
    return read_tasks(SHIPPED)


def read_tasks(path: Path) -> dict[str, Task]:
    """Tasks from a YAML file; ``MantissaError`` for one that is none, or that could not fail."""
    with boundary(path, "expected tasks as in the shipped file: name: {text, start, development, held_out, canary}"):
        if not regular_file(path):
            raise FileNotFoundError(f"{path}: there is no such file")
        raw = read_yaml(path, RECORDED)
        if not isinstance(raw, dict) or not raw:
            raise ValueError("it holds no tasks")
        return {str(name): _task(str(name), value) for name, value in raw.items()}


def _task(name: str, value: Mapping[str, Any]) -> Task:
    unknown = value.keys() - {"text", "start", *_TESTS}
    if unknown or not name.isidentifier():
        what = f"unknown key {min(unknown)!r}{nearest(min(unknown), _TESTS)}" if unknown else "no function's name"
        raise MantissaError(f"task {name}: {what}")
    tests: dict[str, tuple[Test, ...]] = {}
    for kind in _TESTS:
        rows = value[kind]
        if not rows or not all(isinstance(r, list) and len(r) == 2 and isinstance(r[0], list) for r in rows):
            raise MantissaError(f"task {name}: {kind}: expected tests as [[arguments], value], at least one")
        json.dumps(rows, allow_nan=False)
        tests[kind] = tuple((arguments, expected) for arguments, expected in rows)
    known = {json.dumps(arguments) for arguments, _ in tests["development"]}
    if any(json.dumps(arguments) in known for kind in _TESTS[1:] for arguments, _ in tests[kind]):
        raise MantissaError(f"task {name}: a held-out test or a canary has the arguments of a development test")
    return Task(name, str(value["text"]), str(value["start"]), **tests)


def select_tasks(names: Sequence[str], tasks: Mapping[str, Task]) -> list[Task]:
    """The tasks of these names, in order; ``all``, or no name, is every one."""
    if not names or list(names) == ["all"]:
        return list(tasks.values())
    for name in names:
        if name not in tasks:
            raise MantissaError(f"task {name!r}: expected some of {', '.join(tasks)}{nearest(name, tasks)}")
    return [tasks[name] for name in names]
