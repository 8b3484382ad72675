"""Every mistake a user can make: one line on stderr, exit code 2, no traceback, and nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mantissa.model import byte_tokenizer
from mantissa.runs.directory import RunDirectory
from mantissa.runs.metrics import deterministic

Mantissa = Callable[..., Any]
Recipe = Callable[..., Path]


def dataset(*files: Path) -> dict[str, Any]:
    return {
        "task": {"kind": "dataset", "files": [str(file) for file in files]},
        "warm_start": None,
        "model": {"fresh": {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8}},
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimiser.lr=1"], "unknown key 'optimiser'; did you mean 'optimizer'?"),
        (["rollout.prompt=1"], "unknown key 'rollout.prompt'; did you mean 'prompts'?"),
        (["precision=fp9"], "unknown precision preset 'fp9'"),
        (["precision=bf61"], "did you mean 'bf16'?"),
        (["precision.rollout=int4"], "unknown number format 'int4'"),
        (["precision.master=bf16"], "master"),
        (["steps"], "expected key=value"),
        (["steps=x"], "steps: expected a number, without quotes"),
        (["trackers=[wanbd]"], "'tensorboard' or 'wandb', got 'wanbd'"),
        (["model.path=/nowhere", "model.fresh=null", "model.tokenizer=null"], "/nowhere"),
    ],
)
def test_mistakes_in_the_recipe(
    mantissa: Mantissa, recipe: Recipe, tmp_path: Path, overrides: list[str], message: str
) -> None:
    error = mantissa("train", recipe(), f"run_dir={tmp_path / 'run'}", *overrides).error()
    assert message in error
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_precision_that_this_machine_cannot_prove(mantissa: Mantissa, recipe: Recipe, tmp_path: Path) -> None:
    for argv in (
        ("train", recipe(), f"run_dir={tmp_path / 'run'}", "device=cuda"),
        ("precision", "fp16", "--device", "cuda"),
        ("sample", tmp_path, "1", "--device", "cuda"),
    ):
        assert "torch sees no CUDA device here; use device=cpu or device=auto" in mantissa(*argv).error()
    assert "expected auto, cpu or cuda" in mantissa("precision", "--device", "tpu").error()
    assert not (tmp_path / "run").exists()


def test_words_that_are_no_command(mantissa: Mantissa, tmp_path: Path) -> None:
    assert "No such command 'trian'" in mantissa("trian").error()
    assert "No such option: --bogus" in mantissa("sample", "--bogus").error()
    assert "Missing argument 'PROMPT'" in mantissa("sample", "model").error()
    assert "expected a recipe, such as recipes/demo.yaml, or --resume RUN" in mantissa("train").error()
    assert "no recipe at" in mantissa("train", tmp_path / "absent.yaml").error()


def damage(model: Path, how: str) -> None:
    """Break a model's folder in one way."""
    weights, config = model / "model.safetensors", model / "config.json"
    fields = json.loads(config.read_text())
    match how:
        case "no weights":
            weights.unlink()
        case "truncated weights":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "no config":
            config.unlink()
        case "broken config":
            config.write_text(config.read_text()[:-20])
        case "another architecture":
            config.write_text(json.dumps(fields | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
        case "another shape":
            config.write_text(json.dumps(fields | {"hidden_size": 64}))
        case "no tokenizer":
            for path in model.glob("tokenizer*"):
                path.unlink()
        case "wrong tokenizer":
            byte_tokenizer().save(model)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no weights", "no weights; expected model.safetensors"),
        ("truncated weights", "truncated or damaged"),
        ("no config", "config.json"),
        ("broken config", "config.json"),
        ("another architecture", "mamba"),
        ("another shape", "has shape"),
        ("no tokenizer", "no tokenizer files"),
        ("wrong tokenizer", "wrong tokenizer: it has ids up to 257 but the model embeds only 13 tokens"),
    ],
)
def test_broken_models(
    mantissa: Mantissa, recipe: Recipe, finished: Path, tmp_path: Path, how: str, message: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(finished / "policy", model)
    (model / "digests.json").unlink()
    damage(model, how)
    trained = mantissa("train", recipe(model={"path": str(model)}), f"run_dir={tmp_path / 'run'}").error()
    assert message in trained
    assert message in mantissa("sample", model, "12=").error()
    assert not (tmp_path / "run").exists()


def test_datasets_that_cannot_be_read(mantissa: Mantissa, recipe: Recipe, tmp_path: Path) -> None:
    empty, bad, torn = (tmp_path / f"{name}.jsonl" for name in ("empty", "bad", "torn"))
    empty.write_text("")
    good = json.dumps({"problem": "1+1?", "answer": "2"}) + "\n"
    bad.write_text(good + '{"problem": "2+2?"}\n')
    torn.write_text(good * 3 + '{"problem": "2+')
    for file, message in (
        (empty, "the dataset holds no problem"),
        (bad, f"{bad}, row 2: "),
        (torn, f"{torn}, row 4: "),
        (tmp_path / "absent.parquet", "absent.parquet"),
    ):
        error = mantissa("train", recipe(**dataset(file)), f"run_dir={tmp_path / 'run'}").error()
        assert message in error
        assert not (tmp_path / "run").exists()


def test_folders_that_cannot_hold_a_run(mantissa: Mantissa, recipe: Recipe, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    for folder, message in (
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "run", "a part of this path is a file"),
        (tmp_path / "full", "is not empty and not a run (it has thesis.txt)"),
        (finished, f"already holds a run: continue it with --resume {finished}"),
    ):
        assert message in mantissa("train", recipe(), f"run_dir={folder}").error()
    assert (tmp_path / "full" / "thesis.txt").read_text() == "x"


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
    assert result.stderr.startswith(f"mantissa: error: cannot write {locked / 'run'}: Permission denied; ")
    assert result.stderr.count("\n") == 1


def test_resuming_what_is_no_run(mantissa: Mantissa, recipe: Recipe, finished: Path, tmp_path: Path) -> None:
    assert "no such folder" in mantissa("train", "--resume", tmp_path / "absent").error()
    assert "is not a run: it has no config.yaml" in mantissa("train", "--resume", tmp_path).error()
    assert "is not a run" in mantissa("report", tmp_path).error()
    for extra in ([recipe()], ["steps=9"], [recipe(), "steps=9"]):
        error = mantissa("train", "--resume", finished, *extra).error()
        assert "cannot be changed" in error
    assert len(RunDirectory.open(finished).read_metrics()) == 2


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
    rows = [[deterministic(row) for row in RunDirectory.open(path).read_metrics()] for path in (run, finished)]
    assert rows[0] == rows[1]
    (run / "checkpoints" / "step-2" / "state.json").write_text("{")
    assert "no readable state.json" in mantissa("train", "--resume", run).error()
    (run / "config.yaml").write_text("steps: [")
    assert "config.yaml is not YAML" in mantissa("train", "--resume", run).error()


def test_sampling_mistakes(mantissa: Mantissa, finished: Path) -> None:
    assert "top_p=0.0: expected more than 0" in mantissa("sample", finished, "12=", "--top-p", "0").error()
    assert "holds 'x'" in mantissa("sample", finished, "12x").error()
    assert "no chat template" in mantissa("sample", finished, "12=", "--chat").error()
    assert "max_tokens=9999" in mantissa("sample", finished, "12=", "--max-tokens", "9999").error()
    assert "the prompt is empty" in mantissa("sample", finished, "").error()
    assert "unknown precision preset" in mantissa("sample", finished, "12=", "--precision", "fp15").error()
