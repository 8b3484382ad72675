"""The examples, run as a user runs them: each learns what it says, in the precision that it says."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch

from mantissa.model import byte_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"
# accuracy that each must reach: seeds are fixed, so the margin is for other machines' sums
ACCURACY = {"mlp": 0.95, "convnet": 0.9, "gru": 0.95, "transformer": 0.95}


Run = Callable[..., str]


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """A user's program runs without our strict mode."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example here, as the main program, and no warning is allowed; returns what it prints."""

    def call(name: str, *arguments: str, **environment: str) -> str:
        path = str(EXAMPLES / f"{name}.py")
        with monkeypatch.context() as changed:
            changed.setattr(sys, "argv", [path, *arguments])
            for variable, value in environment.items():
                changed.setenv(variable, value)
            runpy.run_path(path, run_name="__main__")
        printed = capsys.readouterr()
        assert "Warning" not in printed.err
        return printed.out

    return call


def started(name: str, *arguments: str, processes: int = 1, quiet: bool = True) -> str:
    """What the example prints in processes of its own: several, or one that other people's libraries change."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    strict = ["-W", "error::UserWarning"] if quiet else []
    command = [sys.executable, *strict, *launch, str(EXAMPLES / f"{name}.py"), *arguments]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not quiet or "Warning" not in done.stderr
    return done.stdout


def stats_in(printed: str) -> list[dict[str, Any]]:
    return [ast.literal_eval(text) for text in re.findall(r"\{.*\}", printed)]


def test_every_example_is_here() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {*ACCURACY, "compat", "distributed", "accelerate_loop", "lightning_fit", "hf_trainer", "rl_loop",
                     "rl_any_model", "trl_doctor"}  # fmt: skip
    for path in EXAMPLES.glob("*.py"):
        assert f"examples/{path.name}" in ast.get_docstring(ast.parse(path.read_text())), "says how to run it"
        assert len(path.read_text().splitlines()) <= (150 if path.stem == "rl_loop" else 80)


def test_rl_of_a_model_that_only_transformers_knows(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own code samples and learns: no token's log-prob differs, before an update and after it."""
    tokenizer = byte_tokenizer()
    model = families.make("phi", vocab_size=tokenizer.vocab_size)
    likely = [*(tokenizer.encode(digit)[0] for digit in "0123456789"), *tokenizer.eos_ids]
    model.lm_head.bias.data[likely] = 8.0  # so that some are right
    model.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    printed = run("rl_any_model", str(tmp_path), "8", "bf16")
    assert printed.count("gap |dlogp| 0.0e+00") == 8
    assert "stepped" in printed


@pytest.mark.slow
def test_lightning_learns_in_fp16() -> None:
    pytest.importorskip("lightning", reason="needs lightning: pip install 'mantissa-rl[lightning]'")
    printed = started("lightning_fit", quiet=False)
    assert "fp16 asked, fp16 active" in printed
    assert float(re.findall(r"accuracy ([\d.]+)", printed)[0]) > 0.9
    assert "steps 384, skipped 0" in printed


@pytest.mark.slow
def test_hugging_faces_trainer_learns_in_fp16() -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'mantissa-rl[accelerate]'")
    printed = started("hf_trainer", quiet=False)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+), scale 65536", printed)]
    assert len(losses) == 4
    assert losses[-1] < 0.05 < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("mlp", ""), ("convnet", ""), ("transformer", ""), ("gru", "bf16"),
        pytest.param("gru", "", marks=pytest.mark.variants), pytest.param("mlp", "bf16", marks=pytest.mark.variants),
    ],
)  # fmt: skip
def test_an_example_learns_in_fp16_or_as_its_argument_says(name: str, precision: str, run: Run) -> None:
    printed, asked = run(name, *([precision] if precision else [])), precision or "fp16"
    accuracy, guessing = re.search(r"accuracy ([\d.]+) .*guessing gives ([\d.]+)", printed).groups()
    assert float(accuracy) >= ACCURACY[name] > 2.5 * float(guessing)
    (stats,) = stats_in(printed)
    backend = "native" if torch.cuda.is_available() else "simulated"
    assert (stats["precision_active"], stats["backend"]) == (asked, backend)
    assert (stats["loss_scale"] == 1.0) == (asked == "bf16")
    assert printed.startswith(f"precision: {asked} asked, {asked} active, {backend} (")
    assert stats["overflow_rate"] == 0.0
    assert stats["updates"] == stats["steps"]
    assert len(re.findall(r"^step \d+: (?:stepped|retried)", printed, re.M)) >= 4


def test_the_compat_example(run: Run) -> None:
    printed = run("compat")
    first, second, third, last = stats_in(printed)
    assert [s["overflow_steps"] for s in (first, second, third)] == [0, 1, 1]
    assert second["current_scale"] == first["current_scale"] / 2
    assert (second["overflow_rate"], third["training_steps"]) == (1 / 200, 300)
    assert (last["precision_mode"], last["precision_in_use"]) == ("mixed_bf16", "bf16")
    assert last["update_steps"] == 299 + 50
    assert float(re.search(r"evaluated: loss ([\d.]+)", printed)[1]) < 0.15
    switched_off = stats_in(run("compat", ENABLE_FP16_TRAINING="false"))
    assert switched_off[0]["precision_in_use"] == "fp32"
    scaled = stats_in(run("compat", FP16_LOSS_SCALE="1024"))
    assert scaled[0]["current_scale"] == 1024.0


@pytest.mark.variants
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_distributed_example_goes_on_where_it_was(kind: str, tmp_path: Path) -> None:
    """Two ranks, one with three times the data of the other; interrupted after two epochs of four, or not at all."""
    started("distributed", kind, str(tmp_path / "run.pt"), "2", processes=2)
    resumed = started("distributed", kind, str(tmp_path / "run.pt"), "4", processes=2)
    whole = started("distributed", kind, str(tmp_path / "other.pt"), "4", processes=2)
    assert "epoch 2" not in resumed
    assert resumed.splitlines()[1:] == whole.splitlines()[3:]  # epochs 3 and 4, the error and the stats, to the digit
    error, variance = re.search(r"error ([\d.]+) of a variance of ([\d.]+)", whole).groups()
    assert float(error) < 0.4 * float(variance)
    (stats,) = stats_in(whole)
    assert (stats["precision_active"], stats["world_size"], stats["steps"]) == ("fp16", 2, 96)


@pytest.mark.variants
def test_the_distributed_example_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    path = str(tmp_path / "run.pt")
    started("distributed", "fsdp2", path, "2", processes=2)
    three = started("distributed", "ddp", path, "4", processes=3)
    assert "written by 2 processes, read by 3" in three
    alone = started("distributed", "ddp", path, "6")
    assert "written by 3 processes, read by 1" in alone
    errors = [float(re.search(r"error ([\d.]+)", text)[1]) for text in (three, alone)]
    assert errors[1] < 0.7 * errors[0]
