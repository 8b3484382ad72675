"""``benchmarks/verl_jobs.py``: one kind of each sort gives a row, and the picture is drawn from rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_job import ROOT

pytestmark = [pytest.mark.verl, pytest.mark.slow, pytest.mark.variants]


@pytest.mark.parametrize(("kind", "field"), [("spikes", "lost"), ("mantissa-fp16", "unlike")])
def test_a_kind_gives_a_row(tmp_path: Path, kind: str, field: str) -> None:
    environment = os.environ | {"OUT": str(tmp_path), "PYTHONPATH": f"{ROOT}/src", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "verl_jobs", kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads((tmp_path / "verl.jsonl").read_text())
    assert (row["kind"], row[field]) == (kind, {"verl": 4, "ours": 0, "mantissa": 0} if kind == "spikes" else 0)
