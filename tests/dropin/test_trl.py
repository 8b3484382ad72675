"""The recorder in TRL's real GRPO trainer: what it writes is read, with TRL's name, and is what both sides computed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mantissa.doctor.readers import read_dump

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("TRL_VENV", ROOT / ".venv-trl")) / "bin" / "python"
pytestmark = pytest.mark.variants  # TRL takes half a minute to import


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    if not PYTHON.is_file():
        pytest.skip(f"{PYTHON} is not there; make .venv-trl/.installed makes it")
    worker = Path(__file__).with_name("trl_worker.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(PYTHON), str(worker), str(folder), *more]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_what_trl_scores_is_recorded(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    dump = read_dump(tmp_path / "logps")
    assert dump.framework == "trl"
    assert dump.settings.temperature == 0.8
    assert len(dump.sequences) == 8
    assert len({each.group for each in dump.sequences}) == 2  # of four samples of a prompt
    for each in dump.sequences:
        assert each.prompt_length == 3
        assert each.mask.sum() == 5
        d = np.abs(each.learner_logp - each.rollout_logp)
        assert 0 < d.max() < 0.1  # the head in bf16, and nothing more: same weights, temperature and tokens


def test_a_sampler_without_logprobs_is_said(tmp_path: Path) -> None:
    done = run(tmp_path, "without")
    assert done.returncode != 0
    assert "delivers no log-probs" in done.stderr
