"""The stamp: of the code as it was imported, of the chip, and of what holds libraries back."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mantissa.base import environ
from mantissa.base.provenance import PACKAGE, Code, source_of


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a data file, committed."""
    made = tmp_path / "src" / "one"
    made.mkdir(parents=True)
    (made / "__init__.py").write_text("x = 1\n")
    (made / "data.yaml").write_text("y: 2\n")
    (tmp_path / "results.jsonl").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "src", "results.jsonl")
    git(tmp_path, "commit", "-qm", "first")
    return made


def test_what_is_committed_while_it_runs_is_not_what_ran(package: Path) -> None:
    code, first = Code(package), git(package, "rev-parse", "--short=12", "HEAD")
    assert code.stamp == {"commit": first, "dirty": False, "source": source_of(package), "source_changed": False}
    before = code.source
    (package / "__init__.py").write_text("x = 3\n")
    git(package, "commit", "-qam", "second")
    assert code.stamp == {"commit": first, "dirty": False, "source": before, "source_changed": True}
    again = Code(package)
    assert again.commit != first
    assert again.source != before


def test_edits_of_the_code_are_edits_and_rows_are_none(package: Path) -> None:
    (package.parents[1] / "results.jsonl").write_text("{}\n")  # as a lab writes while its cells run
    assert Code(package).dirty is False
    (package / "data.yaml").write_text("y: 4\n")
    assert Code(package).dirty is True
    git(package, "checkout", "-q", ".")
    (package / "new.py").touch()
    assert Code(package).dirty is True


def test_an_edit_begun_before_the_first_stamp_counts(package: Path) -> None:
    code = Code(package)
    (package / "__init__.py").write_text("x = 3\n")
    assert code.stamp["dirty"]
    assert code.stamp["source_changed"]


def test_what_is_installed_has_a_source_and_no_commit(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within another project's checkout, whose commit is none of it."""
    installed = package.parents[1] / "site-packages" / "one"
    installed.mkdir(parents=True)
    for path in package.iterdir():
        (installed / path.name).write_bytes(path.read_bytes())
    assert Code(installed).stamp == Code(package).stamp | {"commit": None, "dirty": None}
    monkeypatch.setenv("PATH", str(installed))
    assert Code(package).commit is None, "no git"


def test_a_source_is_names_and_contents_and_nothing_compiled(package: Path) -> None:
    before = source_of(package)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_bytes(b"1")
    assert source_of(package) == before
    (package / "data.yaml").rename(package / "other.yaml")
    assert source_of(package) != before


INTEL = """processor\t: 0
model name\t: Xeon
cpu family\t: 6
model\t\t: 143
stepping\t: 8
flags\t\t: fpu avx2 avx512f amx_bf16 avx512_bf16 sse

processor\t: 1
model name\t: other
"""


def test_one_name_of_several_generations_is_told_apart() -> None:
    told = environ.processor(INTEL.splitlines())
    assert told == ("Xeon (family 6, model 143, stepping 8)", "avx2 avx512f avx512_bf16 amx_bf16")
    assert environ.processor(()) == (platform.machine(), "")  # a system that does not tell


def stamped(**environment: str) -> dict[str, Any]:
    program = "import json; from mantissa.base.provenance import stamp; print(json.dumps(stamp()))"
    kept = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=kept | environment, cwd=PACKAGE.parent, capture_output=True, check=True
    )
    return dict(json.loads(done.stdout))


def test_a_chip_held_back_by_a_variable_is_not_another_chip() -> None:
    free, held = stamped(), stamped(ATEN_CPU_CAPABILITY="default")
    assert held["cpu_capability"] in ("DEFAULT", "NO AVX")
    assert "ATEN_CPU_CAPABILITY=default" in held["settings"].split()
    assert "ATEN_CPU_CAPABILITY" not in free["settings"]
    assert (held["device"], held["cpu_flags"]) == (free["device"], free["cpu_flags"])
    assert held["source"] == free["source"] == source_of(PACKAGE)
