"""One reader of YAML, and what it stands: aliases that multiply, merges of them, and more text than anybody writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hostile import attempt
from mantissa.base.errors import MantissaError
from mantissa.base.readers.yaml import RECORDED, parse_yaml, read_yaml
from mantissa.doctor.runs import read_run
from mantissa.genesis.evolution.programs import read_tasks
from mantissa.runs.directory import RunDirectory

SOURCE = Path(__file__).parents[3] / "src" / "mantissa"
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40))
ALIASES = "a0: &a0 [1, 2]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
LONG = "name: " + "x" * 20_000_000
READERS: dict[str, Callable[[Path], object]] = {
    "a run's recipe": lambda path: RunDirectory(path.parent).config,
    "the doctor's run": lambda path: read_run(path.parent),
    "evolve's tasks": read_tasks,
    "any": lambda path: read_yaml(path, RECORDED),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", [MERGES, ALIASES, LONG, "a: &a [*a]", "{" * 4000], ids=lambda text: text[:12])
def test_few_lines_that_stand_for_many_are_one_error(reader: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    error = attempt(READERS[reader], tmp_path / "config.yaml")
    assert re.search("more than|alias of what it is inside of|nested too deeply", str(error))


def test_shipped_tables_alone_are_read_without_limits() -> None:
    shipped = [path for path in SOURCE.rglob("*.py") if "read_shipped(" in path.read_text()]
    assert {path.name for path in shipped} == {"yaml.py", "facts.py", "logs.py", "compare.py", "refusals.py"}


MERGED = [
    "a: &x {k: 1, j: 2}\nb:\n  <<: *x\n  k: 3\n",
    "a: &x {k: 1}\nb: &y\n  <<: *x\n  k: 2\nc:\n  <<: [*y, *x]\n  z: 1\n",
    "policy: &p\n  x: 1\n  y: {z: 2}\nteacher:\n  <<: *p\n  y: {z: 3}\n",
    "a: {'<<': 1}",
]


@pytest.mark.parametrize("text", MERGED, ids=range(len(MERGED)))
def test_merged_mappings_are_those_of_pyyaml(text: str) -> None:
    assert parse_yaml(text, "here") == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [("<<: 3", "expected a mapping"), ("a: &x {k: 1, k: 2}\nb: {<<: *x}", "'k' is given twice"),
     ("a: {k: 1}\nb: {<<: {k: 2}, j: 1, j: 2}", "'j' is given twice"), ("a: &x\n  <<: *x\n", "inside of")],
    ids=["no mapping", "twice in the base", "twice beside it", "itself"],
)  # fmt: skip
def test_merges_that_are_refused(text: str, said: str) -> None:
    with pytest.raises(MantissaError, match=said):
        parse_yaml(text, "here")


def test_merges_do_not_grow_beyond_the_limit() -> None:
    levels = "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
    with pytest.raises(MantissaError, match="more than"):
        parse_yaml("a0: &a0 {k: 1}\n" + levels, "here")
