"""The scripts under benchmarks/: each runs for one short round, and says nothing that it did not measure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


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
