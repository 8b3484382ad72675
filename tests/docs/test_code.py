"""The code as one reads it: short functions, no decision by a sentence, and no word of a file that is not there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "mantissa"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES = 60  # of a function
# Said by others, who say it in no other way.
THEIRS = {"Could not find any running Ray"}
# Of runs and of other programs, or named by a reader.
ELSEWHERE = {"config.yaml", "NAME.yaml", "NAME.py"}
# A value of a type, which a checker holds to it, decides, however many words it has.
TYPED = {
    constant.value
    for source in SOURCES
    for node in ast.walk(ast.parse(source.read_text()))
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal"
    for constant in ast.walk(node.slice)
    if isinstance(constant, ast.Constant)
}
_SENTENCE = re.compile(r"[A-Za-z,']+ [A-Za-z,']+ [A-Za-z,']")
_READS_A_START = ("startswith", "endswith", "find", "index", "count")


def long_functions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno >= MOST_LINES:
                yield node.name


def sentences_compared(tree: ast.AST) -> Iterator[str]:
    """Texts of three words or more that something is compared with, looked for in, or matched by."""
    for node in ast.walk(tree):
        given: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            given = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _READS_A_START:
            given = [*node.args]
        elif isinstance(node, ast.MatchValue):
            given = [node.value]
        for each in given:
            parts = each.elts if isinstance(each, ast.Tuple | ast.List | ast.Set) else [each]
            for part in parts:
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and _SENTENCE.search(part.value):
                    yield part.value


def files_named(tree: ast.AST) -> Iterator[str]:
    """What docstrings call by the name of a file of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield from re.findall(r"`([\w./-]+\.(?:py|yaml|c))`", ast.get_docstring(node) or "")


def is_there(name: str, source: Path) -> bool:
    return Path(name).name in ELSEWHERE or any(
        (folder / name).is_file() for folder in (ROOT, PACKAGE, *source.parents) if folder.is_relative_to(ROOT)
    )


@pytest.mark.parametrize("room", sorted({path.relative_to(PACKAGE).parts[0] for path in SOURCES}))
def test_functions_are_short_types_decide_and_docstrings_name_what_is_there(room: str) -> None:
    for source in SOURCES:
        if source.relative_to(PACKAGE).parts[0] == room:
            tree = ast.parse(source.read_text())
            assert not [*long_functions(tree)], source
            assert {*sentences_compared(tree)} <= THEIRS | TYPED, source
            assert [name for name in files_named(tree) if not is_there(name, source)] == [], source


def test_what_is_looked_for_is_found() -> None:
    tree = ast.parse(
        'def f(said):\n    """See ``rl/none.py`` and ``rl/step.py``."""\n'
        '    if said.startswith("rounding in the") or said == "of one side alone" or "in of a b" in said:\n'
        "        pass\n"
    )
    assert {*sentences_compared(tree)} == {"rounding in the", "of one side alone", "in of a b"}
    assert [name for name in files_named(tree) if not is_there(name, PACKAGE / "rl" / "run.py")] == ["rl/none.py"]
    for lines, found in ((MOST_LINES - 1, []), (MOST_LINES, ["f"])):
        assert [*long_functions(ast.parse("def f():\n" + "    pass\n" * lines))] == found
