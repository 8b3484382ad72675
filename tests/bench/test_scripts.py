"""The scripts under benchmarks/: each runs for one short round, and says nothing that it did not measure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mantissa.model import Decoder, ModelConfig, byte_tokenizer, save_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def _model(folder: Path) -> Path:
    """A pretrained model of the smallest kind, as the scripts expect one."""
    config = ModelConfig("llama", 300, 64, 64, 1, 4, 2, 16, max_position_embeddings=128, tie_word_embeddings=True)
    save_model(Decoder(config).initialize(), byte_tokenizer(), folder / "model")
    return folder / "model"


def _run(script: str, *options: str) -> str:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(BENCHMARKS / script), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.variants
def test_rl_step_runs_in_each_precision() -> None:
    options = ("--work", "tiny", "--threads", "1", "--rounds", "2", "--warm-up", "0", "--dry", "--trl-python", "none")
    table = [line.split() for line in _run("rl_step_vs_trl.py", *options).splitlines()]
    seconds = {words[0]: float(words[2]) for words in table if words[1] == "step_seconds"}
    assert seconds.keys() == {"fp32", "fp16", "bf16"}
    assert all(0 < value < 60 for value in seconds.values())


@pytest.mark.variants
def test_sampling_from_a_pretrained_model_is_timed_by_phase(tmp_path: Path) -> None:
    options = ("--threads", "1", "--rounds", "1", "--rows", "4", "--samples", "2", "--precisions", "fp32", "--dry")
    table = _run("decode_pretrained.py", str(_model(tmp_path)), *options)
    assert [line.split()[2:4] for line in table.splitlines() if "processor" not in line] == [
        [name, phase] for name in ("transformers", "fp32") for phase in ("prefill", "all", "decode")
    ]


@pytest.mark.variants
def test_the_peak_is_measured_by_both_libraries() -> None:
    values = {
        line.split(":")[1].split("  ")[0].strip() for line in _run("peak.py", "--threads", "1", "--dry").splitlines()
    }
    assert values == {"square", "step", "square onednn", "step onednn", "memory"}
