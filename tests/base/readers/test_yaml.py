"""One reader of YAML, and what it stands: aliases that multiply, merges of them, and more text than anybody writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hostile import attempt
from mantissa.base.readers.yaml import RECORDED, read_yaml
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
    assert {path.name for path in shipped} == {"yaml.py", "facts.py", "profiles.py"}
