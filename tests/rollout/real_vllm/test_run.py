"""A short RL run on the real vLLM: the new weights sampled from, the gap measured, the table saying who computed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mantissa.rl import make_config
from mantissa.rl.recipe import apply_overrides
from mantissa.rl.session import start
from mantissa.runs.directory import RunDirectory

pytestmark = pytest.mark.vllm
RECIPE: dict[str, Any] = {
    "name": "on-vllm",
    "steps": 2,
    "device": "cpu",
    "model": {
        "fresh": {
            "hidden_size": 64,
            "layers": 2,
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 32,
            "intermediate_size": 64,
            "max_positions": 64,
        },
        "tokenizer": "characters",
    },
    "task": {
        "kind": "running_sum",
        "min_digits": 1,
        "max_digits": 3,
        "train_size": 200,
        "heldout_size": 32,
        "warm_start_size": 512,
    },
    "warm_start": {"steps": 60, "batch": 32, "lr": 3e-3, "evaluate_every": 60, "problems": 16},
    "rollout": {"prompts": 16, "samples": 8, "max_tokens": 6, "slots": 64, "engine": "vllm"},
    "algorithm": {"correction": "token_tis"},
    "optimizer": {"lr": 1e-3, "updates_per_batch": 2},
    "evaluation": {"every": 2, "problems": 16, "samples": 2},
    "checkpoint": {"every": 2},
    "trackers": [],
}
# Seen: mean |difference of log-probs| 1e-7 in fp32, 5e-4 in bf16, 0.016 with an fp8 cache; the bounds leave a factor of
# ten and of four.
GAPS = {"fp32": (0.0, 1e-6), "bf16": (2e-5, 4e-3), "{preset: bf16, kv_cache: fp8}": (4e-3, 0.06)}


def test_a_short_run_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the products lent to a CPU (``vllm_fp8_worker.py``): the learner in fp8 too, the codes its own."""
    monkeypatch.setattr("mantissa.rollout.vllm_start.EXTENSION", "vllm_fp8_worker.WithProducts")
    monkeypatch.setattr("mantissa.rollout.vllm_fp8.device_problem", lambda device: None)
    sizes = [f"model.fresh.{name}=128" for name in ("hidden_size", "head_dim", "intermediate_size")]
    folder = tmp_path / "run"
    overrides = ["precision=fp8", f"run_dir={folder}", *sizes]
    start(make_config(apply_overrides(copy.deepcopy(RECIPE), overrides), "test"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/version"] for row in rows] == [0, 2]
    for row in rows:
        assert 1e-4 < row["gap/abs_logp_diff_mean"] < 0.02  # seen: 0.002
    table = {row["role"]: row for row in RunDirectory.open(folder).environment["precision"]}
    assert table["rollout"]["active"] == "fp8 on bf16"
    assert "vLLM's own fp8 kernels" in table["rollout"]["reason"]
    assert "products of e4m3 in 1x128 and e4m3 in 128x128 by PlainProduct" in table["rollout"]["evidence"]


@pytest.mark.parametrize("precision", sorted(GAPS))
def test_a_short_run_measures_the_gap_of_two_engines(precision: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = [f"precision={precision}", f"run_dir={folder}"]
    start(make_config(apply_overrides(copy.deepcopy(RECIPE), overrides), "test"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["rollout/version"] for row in rows] == [0, 2]  # two updates a step, each step sampled with the newest
    low, high = GAPS[precision]
    for row in rows:
        assert low < row["gap/abs_logp_diff_mean"] < high
    table = {row["role"]: row for row in RunDirectory.open(folder).environment["precision"]}
    assert "vLLM" in table["rollout"]["reason"]
    assert "tensors read back as sent, bit for bit" in table["rollout"]["evidence"]
    assert "vLLM" not in table["learner"]["reason"]
    if "kv_cache" in precision:
        assert table["kv_cache"]["active"] == "e4m3"
        assert "vLLM's e4m3 cache without scales" in table["kv_cache"]["reason"]
        assert "cache fp8_e4m3 of scale 1" in table["rollout"]["evidence"]
