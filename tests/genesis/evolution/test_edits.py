"""Edits: pure, bounded, and rich enough to mend what is wrong."""

import ast
import random

import pytest

from evolution_references import REFERENCES
from mantissa.genesis.evolution import shipped
from mantissa.genesis.evolution.edits import apply, changes, draw, normal

CLAMP = normal(shipped()["clamp"].start) or ""


def test_every_change_gives_another_program_or_nothing() -> None:
    for name in ("clamp", "rotate", "histogram"):
        source = normal(shipped()[name].start) or ""
        made = [(change, apply(source, change)) for change in changes(source)]
        assert len(made) > 60
        for change, program in made:
            if program is not None:
                ast.parse(program)
                action, pattern = change.described()
                assert change.kind in action
                assert not {"items", "counts", "x"} & set(pattern.partition(f"depth{len(change.path)}")[2].split())
        assert len({program for _, program in made}) > 50
        assert normal(source) == source  # nothing was changed in what is cached


def test_the_right_change_is_among_them() -> None:
    programs = {apply(CLAMP, change) for change in changes(CLAMP)}
    for old, new in (
        ("if x > low", "if x < low"),
        ("        return x\n    return x", "        return high\n    return x"),
    ):
        assert CLAMP.replace(old, new) in programs


def test_parts_of_another_program_are_lent() -> None:
    right = normal(REFERENCES["clamp"]) or ""
    programs = {apply(CLAMP, change) for change in changes(CLAMP, right)}
    assert any("max(low, min(x, high))" in (program or "") for program in programs)
    assert all("def clamp" in (program or "def clamp") for program in programs)


def test_drawing_is_a_function_of_the_generator() -> None:
    drawn = [draw(CLAMP, random.Random(seed)) for seed in range(30)]
    assert drawn == [draw(CLAMP, random.Random(seed)) for seed in range(30)]
    assert len({each[1] for each in drawn if each is not None}) > 15


NO_PROGRAMS = {
    "empty": "", "broken": "def f(:", "nul": "\0", "long": "x" * 30_000, "deep": "(" * 300 + ")" * 300,
    "wide": f"a = [{'1,' * 4000}]", "nested": f"def f():\n    return {'-' * 9000}1",
}  # fmt: skip


@pytest.mark.parametrize("source", NO_PROGRAMS.values(), ids=NO_PROGRAMS)
def test_what_is_no_small_program_has_no_changes(source: str) -> None:
    assert changes(source) == ()
    assert draw(source, random.Random(0)) is None
    assert changes(CLAMP, source) == ()
