"""The recorder in TRL's real GRPO trainer: what it writes is read, with TRL's name, and is what both sides computed."""

from __future__ import annotations

import json
import os
import re
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
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)


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


def test_what_generate_samples_is_recorded(tmp_path: Path) -> None:
    """TRL's default: no vLLM, no rollout_func. The same model, so in fp32 both sides differ by rounding alone."""
    done = run(tmp_path, "generate")
    assert done.returncode == 0, done.stderr[-2000:]
    dump = read_dump(tmp_path / "logps")
    assert len(dump.sequences) == 8
    assert dump.settings.rollout_format == dump.settings.learner_format == "fp32"
    for each in dump.sequences:
        assert np.abs(each.learner_logp - each.rollout_logp)[each.mask].max() < 1e-5
        assert (each.rollout_version, each.learner_version) == (0, 0)
    row = json.loads(next((tmp_path / "logps").glob("*.jsonl")).read_text().splitlines()[0])
    assert row["libraries"].keys() >= {"trl", "transformers", "torch"}


@pytest.mark.parametrize("kind", ["gemma3_text fp32", "gpt_oss bf16", "qwen3_5_text fp32"])
def test_an_adopted_model_samples_with_the_learners_log_probs(kind: str, tmp_path: Path) -> None:
    """Two steps with checkpointed layers, TRL's default: windows, sinks and experts, a gated delta rule."""
    done = run(tmp_path, f"adopted {kind}")
    assert done.returncode == 0, done.stderr[-2000:]
    dump = read_dump(tmp_path / "logps")
    assert {each.learner_version for each in dump.sequences} == {0, 1}
    assert sum(int(each.mask.sum()) for each in dump.sequences) > 30
    for each in dump.sequences:
        assert np.array_equal(each.learner_logp[each.mask], each.rollout_logp[each.mask])


def test_bf16_generate_is_recorded_with_formats_and_versions(tmp_path: Path) -> None:
    """How much cached decoding then differs from the whole forward is the model's size: docs/integrations.md."""
    done = run(tmp_path, "bf16")
    assert done.returncode == 0, done.stderr[-2000:]
    dump = read_dump(tmp_path / "logps")
    assert dump.settings.rollout_format == dump.settings.learner_format == "bf16"
    d = np.concatenate([(each.learner_logp - each.rollout_logp)[each.mask] for each in dump.sequences])
    assert np.sqrt(np.square(d).mean()) < 0.1
    assert {each.learner_version for each in dump.sequences} == {0, 1}
    assert {each.rollout_version for each in dump.sequences} == {0, 1}


def test_a_samplers_own_temperature_is_seen(tmp_path: Path) -> None:
    """generation_kwargs' temperature is the sampler's alone: TRL's learner divides by the field."""
    done = run(tmp_path, "hot")
    assert done.returncode == 0, done.stderr[-2000:]
    dump = read_dump(tmp_path / "logps")
    assert dump.settings.temperature == 0.4
    assert max(np.abs(each.learner_logp - each.rollout_logp)[each.mask].max() for each in dump.sequences) > 0.01


def test_a_fault_stops_the_training_after_a_step(tmp_path: Path) -> None:
    done = run(tmp_path, "stop")
    assert done.returncode == 0, done.stderr[-2000:]
    steps = int(re.search(r"^steps (\d+)", done.stdout, re.M)[1])
    assert 1 <= steps < 6
    assert "stop True" in done.stdout


def test_looks_at_the_start_after_the_first_update_and_after_a_resume(tmp_path: Path) -> None:
    done = run(tmp_path / "whole", "watched")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "looked [0, 1] stop False" in done.stdout
    resumed = run(tmp_path / "resumed", "resume")
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert "looked [2]" in resumed.stdout
    assert "its measure 1 True" in resumed.stdout


def test_watching_changes_no_bit_of_the_training(tmp_path: Path) -> None:
    watched, unwatched = (run(tmp_path / kind, kind) for kind in ("watched", "unwatched"))
    assert watched.returncode == unwatched.returncode == 0, watched.stderr[-2000:] + unwatched.stderr[-2000:]
    last = [re.search(r"^steps 2 weights .*$", done.stdout, re.M) for done in (watched, unwatched)]
    assert last[0] is not None
    assert last[1] is not None
    assert last[0][0] == last[1][0]


def test_a_recorder_that_fails_is_a_warning_and_no_end(tmp_path: Path) -> None:
    done = run(tmp_path, "broken")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "steps 1" in done.stdout
    assert "TRL's batch is left out, and the training goes on" in done.stderr


def test_the_example_runs_with_generate(tmp_path: Path) -> None:
    """On a small Llama of random weights, written as a folder; the doctor reads what it leaves."""
    if not PYTHON.is_file():
        pytest.skip(f"{PYTHON} is not there; make .venv-trl/.installed makes it")
    made = run(tmp_path, "folder")
    assert made.returncode == 0, made.stderr[-2000:]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(PYTHON), str(ROOT / "examples" / "trl_doctor.py"), str(tmp_path / "model"), "generate", "logps", "1"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the gate said:" in done.stdout
    assert len(read_dump(tmp_path / "logps").sequences) == 16
