"""Tasks and their judge: right solutions pass, the starts do not, and cheating is caught."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from evolution_references import REFERENCES
from mantissa.base.errors import MantissaError
from mantissa.genesis.evolution import Judge, Task, read_tasks, shipped
from mantissa.genesis.evolution.programs import select_tasks

TASKS = list(shipped().values())


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(timeout_s=2.0) as judge:
        yield judge


def table_of(task: Task) -> str:
    """A program that knows the development tests by heart."""
    known = {json.dumps(arguments): value for arguments, value in task.development}
    return (
        f"import json\nknown = json.loads({json.dumps(json.dumps(known))})\n"
        f"def {task.name}(*arguments):\n    return known[json.dumps(list(arguments))]\n"
    )


def test_there_are_enough_tasks_with_enough_tests() -> None:
    assert len(TASKS) >= 20
    assert set(REFERENCES) == set(shipped())
    for task in TASKS:
        assert (len(task.development) >= 6) + (len(task.held_out) >= 3) + (len(task.canary) >= 1) == 3, task.name


def test_every_task_can_be_solved_and_is_not_yet(judge: Judge) -> None:
    for task in TASKS:
        right, start = judge.judge(task, [REFERENCES[task.name], task.start])
        assert (right.score, right.cheat, right.failure, right.ended) == (1.0, False, "", "returned"), task.name
        assert judge.held_out(task, REFERENCES[task.name]) == 1, task.name
        assert start.score < 1, task.name
        assert start.ran, task.name
        assert start.failure.startswith(f"{task.name}("), task.name


def test_a_program_that_knows_the_tests_by_heart_breaks_on_a_canary(judge: Judge) -> None:
    for task in TASKS:
        (verdict,) = judge.judge(task, [table_of(task)])
        assert (verdict.score, verdict.cheat, all(verdict.passed)) == (0.0, True, True), task.name


def test_what_a_program_may_do_harms_nothing() -> None:
    task = shipped()["clamp"]
    programs = {
        "while True: pass": ("out of time", False),
        "def clamp(x, low, high):\n    while True: pass": ("out of time", False),
        "raise SystemExit(0)": ("exit code 1", False),
        "def other(): pass": ("exit code 1", False),
        "def clamp(x, low, high):\n    return open('/etc/passwd').read()": ("returned", True),
        "def clamp(x, low, high):\n    return __import__('os').fork()": ("returned", True),
        "def clamp(x, low, high):\n    return 'a' * 10**6": ("too much output", False),
        "def clamp(x, low, high):\n    class Equal:\n        __eq__ = lambda *a: True\n    return Equal()": (
            "returned",
            True,
        ),
        "import os\ndef clamp(x, low, high):\n    os._exit(0)": ("returned", False),
        "\0": ("exit code 1", False),
        "x" * 200_000: ("too long", False),
    }
    with Judge(timeout_s=0.5) as judge:
        for source, verdict in zip(programs, judge.judge(task, list(programs)), strict=True):
            assert verdict.score == 0, source[:60]
            assert (verdict.ended, verdict.ran) == programs[source], source[:60]
        (right,) = judge.judge(task, [REFERENCES["clamp"]])
        assert right.score == 1  # and it still judges


def test_a_task_file_that_could_not_fail_is_refused(tmp_path: Path) -> None:
    good = (
        "f: {text: t, start: 'def f(x): return x', development: [[[1], 1]], held_out: [[[2], 2]], canary: [[[3], 3]]}"
    )
    path = tmp_path / "tasks.yaml"
    path.write_text(good)
    assert read_tasks(path)["f"].held_out == (([2], 2),)
    for old, new, said in (
        ("canary: [[[3], 3]]", "canary: []", "canary: expected tests"),
        ("[[[2], 2]]", "[[[1], 1]]", "has the arguments of a development test"),
        ("[[[2], 2]]", "[[2, 2]]", "held_out: expected tests"),
        ("text: t", "texts: t", "unknown key 'texts'"),
        ("f: {", "f g: {", "no function's name"),
        (good, "[1, 2]", "it holds no tasks"),
        (good, "{", "not valid YAML"),
        ("[[[3], 3]]", "[[[.nan], 3]]", "Out of range"),
    ):
        path.write_text(good.replace(old, new))
        with pytest.raises(MantissaError, match=said):
            read_tasks(path)
    with pytest.raises(MantissaError, match="no such file"):
        read_tasks(tmp_path / "absent.yaml")
    with pytest.raises(MantissaError, match="did you mean 'clamp'"):
        select_tasks(["clmp"], shipped())
