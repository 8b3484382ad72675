"""The commands that people call often start without what they do not need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dumps

HEAVY = ("torch", "matplotlib", "transformers", "scipy.stats", "pyarrow")


def imported(*arguments: str) -> tuple[int, set[str]]:
    """The command's exit code, and which packages it imported."""
    command = [sys.executable, "-X", "importtime", "-m", "mantissa", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return done.returncode, {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}


@pytest.mark.parametrize("command", ["doctor", "check"])
def test_a_call_imports_no_library_that_takes_seconds(command: str, tmp_path: Path) -> None:
    """`mantissa doctor DUMP` in this process and its reader's; torch alone takes longer than all the rest."""
    dumps.write_plain(tmp_path / "x.jsonl", dumps.healthy(prompts=8, samples=2, length=20), temperature=1.0)
    (tmp_path / "x.sh").write_text("python -m openrlhf.cli.train_ppo_ray --ds.param_dtype bf16")
    code, found = imported(command, str(tmp_path / ("x.jsonl" if command == "doctor" else "x.sh")))
    assert code == 0
    assert found.isdisjoint(HEAVY)
    assert "mantissa.cli" in found


@pytest.mark.parametrize(
    ("command", "code", "more"),
    [("--help", 0, {"pydantic"}), ("metrics", 0, set()), ("doctor mistyped.jsonl", 2, set())],
)
def test_what_only_prints_starts_at_once(command: str, code: int, more: set[str]) -> None:
    """Neither numbers nor a table's drawing: 0.15 to 0.35 s of processor time where other work shares the core, most of
    them typer's and pydantic's; the bound has room for a slower processor and for what counts the imports."""
    before = os.times()
    given, found = imported(*command.split())
    after = os.times()
    assert given == code
    assert found.isdisjoint({"numpy", "scipy", "torch", "yaml", "rich", "jinja2", "rich.console", *more})
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.2


def test_the_doctor_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dumps.write_plain(tmp_path / "x.jsonl", dumps.healthy(prompts=8, samples=2, length=20))
    command = [sys.executable, "-m", "mantissa", "doctor", "x.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[0].endswith((".", "rounding alone."))
    assert "no number format is named: judged as bf16" in " ".join(done.stdout.split())
    assert [each.name for each in tmp_path.iterdir()] == ["x.jsonl"]
    told = subprocess.run([*command, "--explain"], capture_output=True, text=True, timeout=600).stdout
    assert {"signature", "result", "explains"} <= set(told.split())


def test_a_gap_asks_for_determinism_without_torchs_compiler() -> None:
    """Its import takes longer than all else at the start of `mantissa gap`."""
    code = "import json, sys, torch; from mantissa import be_deterministic; be_deterministic(torch.device('cpu'))"
    more = "print(json.dumps([torch.are_deterministic_algorithms_enabled(), 'torch._inductor' in sys.modules]))"
    last = "import torch._inductor.config as c; print(json.dumps(c.deterministic))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {more}; {last}"], capture_output=True, text=True, timeout=600
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[True, False], True], done.stderr
