"""Every mistake a user can make: one line on stderr, exit code 2, no traceback, and nothing lost.

The wording is in ``errors.txt``, one table for every command.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mantissa.base.files import JsonLines
from mantissa.guard import GuardConfig, open_guard
from mantissa.runs.directory import RunDirectory, deterministic

Mantissa = Callable[..., Any]
Recipe = Callable[..., Path]
ROOT = Path(__file__).parents[2]
LINES = [line for line in Path(__file__).with_name("errors.txt").read_text().splitlines() if line[:1] not in ("", "#")]
CASES = list(zip(LINES[::2], (line.strip() for line in LINES[1::2]), strict=True))
TEXTS = {  # files of which mistakes are made
    "file": "x",
    "full/thesis.txt": "x",
    "page.html/thesis.txt": "x",
    "bad.jsonl": '{"problem": "1+1?", "answer": "2"}\n{"problem": "2+2?"}\n',
    "torn.jsonl": '{"problem": "1+1?", "answer": "2"}\n' * 3 + '{"problem": "2+',
    "foreign.jsonl": '{"image": "cat.png", "caption": "a cat"}\n',
    "prompts.txt": "12=\n\n345=\n9876543=\n1=\n22=\n",
    "empty.txt": "\n  \n",
    "many.txt": "1=\n" * 20_000,
    "words.txt": "What is 1 plus 1?\n",
    "cli_users_model.py": "def factory(): raise AssertionError\n",
    "benched/bench.csv": "of another day",
    "stepless/metrics.jsonl": "",
    "nonsense/metrics.jsonl": "nonsense\n",
    "accuracies/metrics.jsonl": '{"step": 1, "accuracy": 0.5}\n',
    "zipped/metrics.jsonl": "PK\x03\x04",
    "backwards/metrics.jsonl": '{"step": 2, "train/loss": 1}\n{"step": 1, "train/loss": 1}\n',
    "settings_cut/guard.json": "{",
}


@pytest.fixture(scope="session")
def mistakes(finished: Path, small_recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the table's commands are called."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "binary").mkdir()
    (folder / "binary" / "metrics.jsonl").write_bytes(b"\x00\x01\n\xff")
    with open(folder / "huge.txt", "wb") as file:
        file.truncate(65 << 20)
    fresh = {"fresh": {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8}}
    dataset = {"task": {"kind": "dataset", "files": ["bad.jsonl"]}, "warm_start": None, "model": fresh}
    for name, sections in (("recipe.yaml", {}), ("dataset.yaml", dataset)):
        (folder / name).write_text(yaml.safe_dump(small_recipe | sections))
    (folder / "no_weights").mkdir()
    shutil.copy(finished / "policy" / "config.json", folder / "no_weights")
    (folder / "run").symlink_to(finished)
    (folder / "recipes").symlink_to(ROOT / "recipes")
    for name in ("guarded", "settings_cut", "settings_gone"):
        (folder / name).mkdir(exist_ok=True)
        if not (folder / name / "guard.json").exists():
            open_guard(folder / name, GuardConfig(window=10, min_steps=5))
        for step in range(1, 31):
            JsonLines(folder / name / "metrics.jsonl").append({"step": step, "train/loss": 1.0})
    (folder / "settings_gone" / "guard.json").unlink()
    (folder / "settings_gone" / "guard.jsonl").touch()
    return folder


@pytest.mark.parametrize(("command", "words"), CASES, ids=[command for command, _ in CASES])
def test_the_one_line_that_answers_a_mistake(
    command: str, words: str, mantissa: Mantissa, mistakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mistakes)
    before = {path: path.stat().st_mtime_ns for path in mistakes.rglob("*")}
    assert words in mantissa(*shlex.split(command)).error()
    sys.modules.pop("cli_users_model", None)
    after = {path: path.stat().st_mtime_ns for path in mistakes.rglob("*") if path.name != "__pycache__"}
    assert {path for path in after if path.suffix != ".pyc" and after[path] != before.get(path)} <= {mistakes}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_precision_that_this_machine_cannot_prove(mantissa: Mantissa, recipe: Recipe, tmp_path: Path) -> None:
    for argv in (
        ("train", recipe(), f"run_dir={tmp_path / 'run'}", "device=cuda"),
        ("precision", "fp16", "--device", "cuda"),
        ("sample", tmp_path, "1", "--device", "cuda"),
    ):
        assert "torch sees no CUDA device here; use device=cpu or device=auto" in mantissa(*argv).error()
    assert not (tmp_path / "run").exists()


def test_a_folder_without_permission(recipe: Recipe, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    command = [sys.executable, "-m", "mantissa", "train", str(recipe()), f"run_dir={locked / 'run'}"]
    drop = []
    if os.geteuid() == 0:  # root writes everywhere: take that power from the child
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv, to test as root what others may not do")
        drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    result = subprocess.run([*drop, *command], capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    *at_work, last = result.stderr.splitlines()
    assert last.startswith(f"mantissa: error: cannot write {locked / 'run'}: Permission denied; ")
    assert {*at_work} <= {"loading the model and proving its kernels"}


def test_damaged_checkpoints_name_the_way_out(mantissa: Mantissa, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    weights = run / "checkpoints" / "step-2" / "policy.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    error = mantissa("train", "--resume", run).error()
    assert "is damaged: expected" in error
    assert f"delete {weights.parent} to go on from step-1" in error
    shutil.rmtree(weights.parent)
    assert mantissa("train", "--resume", run).code == 0  # and that way leads to the same end
    rows = [[deterministic(row) for row in RunDirectory.open(path).metrics.read()] for path in (run, finished)]
    assert rows[0] == rows[1]
    (run / "checkpoints" / "step-2" / "state.json").write_text("{")
    assert "no readable state.json" in mantissa("train", "--resume", run).error()
    (run / "config.yaml").write_text("steps: [")
    assert "not valid YAML" in mantissa("train", "--resume", run).error()
