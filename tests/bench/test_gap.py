"""Which pairs a gap may be measured of; and models that run by transformers' own code."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from families import make

from mantissa.base.errors import MantissaError
from mantissa.bench.gap import GapResult, policies_of, run_gap
from mantissa.bench.options import VLLM_PAIRS, GapConfig
from mantissa.model import byte_tokenizer


def config(engine: str, *pairs: str) -> GapConfig:
    return GapConfig.model_validate({"model": "m", "device": "cpu", "engine": engine, "pairs": pairs})


def test_another_program_is_neither_exact_nor_emulates() -> None:
    """Those that it can serve stay; one that it cannot is named, wherever among them it stands."""
    assert tuple(policies_of(config("vllm"))) == VLLM_PAIRS
    for pairs, said in (
        (("bf16", "exact"), "--pairs exact: vLLM's kernels add in another order"),
        (("fp16+exact", "bf16"), r"--pairs fp16\+exact: vLLM's kernels add in another order"),
        (("bf16", "fp16+serving"), r"--pairs fp16\+serving: vLLM computes as it does, and emulates nothing"),
    ):
        assert tuple(policies_of(config("native", *pairs))) == pairs
        with pytest.raises(MantissaError, match=said):
            policies_of(config("vllm", *pairs))


def test_which_pairs_are_exact_and_which_emulate() -> None:
    found = policies_of(config("native", "bf16", "exact", "fp16+serving"))
    assert [policy.kernels == "exact" for policy, _ in found.values()] == [False, True, False]
    assert [emulation is not None for _, emulation in found.values()] == [False, False, True]


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """Not here: transformers' own code mixes dtypes."""


def saved(name: str, folder: Path, **settings: Any) -> Path:
    """A tiny model of a family that our decoder does not know, with a tokenizer of bytes."""
    make(name).save_pretrained(folder)
    byte_tokenizer().save(folder)
    if settings:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def measured(folder: Path, *pairs: str) -> GapResult:
    options = {"model": str(folder), "device": "cpu", "pairs": pairs, "own": 3, "max_tokens": 6, "samples": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model has more rows than bytes are
        return run_gap(GapConfig.model_validate(options | {"out": str(folder / "gap")}), lambda _: None)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5_text"])
def test_a_family_that_only_transformers_knows_is_measured_and_exact(name: str, tmp_path: Path) -> None:
    result = measured(saved(name, tmp_path / name), "bf16/fp16", "bf16", "exact", "bf16/fp8", "bf16+serving")
    different, same, exact, scaled = result.rows
    assert scaled["abs_logp_diff_mean"] > 2 * same["abs_logp_diff_mean"]
    assert different["abs_logp_diff_mean"] > 10 * same["abs_logp_diff_mean"] or same["differing"] > 0
    assert (exact["differing"], exact["kernels"]) == (0, "exact, adopted")
    assert exact["tokens"] > 20
    assert "logits equal" in exact["evidence"]
    assert len(result.failed) == 1
    assert "an engine's habits are for the families that our decoder knows" in result.failed[0]
    assert len(result.completions) == 4 * 6
    assert (result.folder / "gap.html").is_file()


def test_what_cannot_be_exact_is_measured_otherwise_and_says_why(tmp_path: Path) -> None:
    result = measured(saved("bloom", tmp_path / "bloom"), "fp32", "fp32+exact")
    assert [row["pair"] for row in result.rows] == ["fp32"]
    assert result.rows[0]["abs_logp_diff_mean"] < 1e-4
    assert "BloomAttention" in result.failed[0]


def test_a_folders_own_code_and_pickles_are_never_run(tmp_path: Path) -> None:
    own = saved("gemma3_text", tmp_path / "own", auto_map={"AutoModelForCausalLM": "evil.Model"}, model_type="evil")
    (own / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(MantissaError, match="evil"):
        measured(own, "fp32")
    pickled = saved("gemma3_text", tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(MantissaError, match="does not load it"):
        measured(pickled, "fp32")
    assert not (tmp_path / "ran").exists()
