from __future__ import annotations

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from mantissa.runs.directory import environment, git_state


def test_it_records_what_numbers_depend_on_and_nothing_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "s3cret-value")
    record = environment()
    assert {name: record["versions"][name] for name in ("torch", "transformers")} == {
        name: version(name) for name in ("torch", "transformers")
    }
    assert (record["threads"], record["cores"]) == (torch.get_num_threads(), os.cpu_count())
    assert record["cpu"]
    home = os.path.expanduser("~")
    assert not [private for private in ("s3cret-value", home) if private != "/" and private in json.dumps(record)]


def test_git_state_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert git_state(tmp_path) is None
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "untracked").touch()
    assert git_state(tmp_path) == {"commit": commit, "changed": False}
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {"commit": commit, "changed": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None, "no git"
