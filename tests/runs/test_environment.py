from __future__ import annotations

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from mantissa.runs.environment import environment, git_state


def test_it_records_what_numbers_depend_on_and_nothing_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "s3cret-value")
    record = environment()
    text = json.dumps(record)
    assert record["versions"]["torch"] == version("torch")
    assert record["versions"]["transformers"] == version("transformers")
    assert record["threads"] == torch.get_num_threads()
    assert record["cores"] == os.cpu_count()
    assert record["cpu"]
    assert "s3cret-value" not in text
    assert os.path.expanduser("~") not in text or os.path.expanduser("~") == "/"


def test_git_state_of_a_checkout(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": commit, "changed": False}
    (tmp_path / "untracked").touch()
    assert git_state(tmp_path) == {"commit": commit, "changed": False}
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {"commit": commit, "changed": True}


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None
