"""Runs whose policy is by transformers' own code: families that our decoder does not know, exact and fast."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import yaml
from transformers import AutoModelForCausalLM

from killable import Server
from mantissa.base.errors import MantissaError
from mantissa.model import byte_tokenizer
from mantissa.rl import RunConfig, make_config, resume, start
from mantissa.rl.config.run import apply_overrides
from mantissa.runs.directory import RunDirectory
from small_run import contents, rows_of, stopped

RECIPE: dict[str, Any] = yaml.safe_load("""
name: any
steps: 4
device: cpu
precision: {preset: bf16, kernels: exact}
task: {kind: running_sum, min_digits: 1, max_digits: 3, train_size: 64, heldout_size: 16, warm_start_size: 128}
warm_start: {steps: 8, batch: 16, lr: 0.003, evaluate_every: 8, problems: 8}
rollout: {engine: transformers, prompts: 6, samples: 4, max_tokens: 5, slots: 16}
algorithm: {correction: token_tis}
optimizer: {lr: 0.001, updates_per_batch: 2}
evaluation: {every: 2, problems: 8}
checkpoint: {every: 2}
""")
KL = ("algorithm.reference={refresh_every: 3}", "algorithm.kl={coefficient: 0.01}")
QUICK = ("steps=2", "warm_start.steps=24", "warm_start.evaluate_every=24", "task.reward=prefix")


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """Not here: transformers' own code mixes dtypes."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of other families, with a tokenizer of bytes."""
    root = tmp_path_factory.mktemp("families")
    for name in ("gemma3_text", "gpt_oss", "qwen3_5_text", "bloom"):
        model = families.make(name, vocab_size=258, eos_token_id=257, pad_token_id=256)
        model.save_pretrained(root / name)
        byte_tokenizer().save(root / name)
    return root


def configured(folder: Path, *overrides: str) -> RunConfig:
    return make_config(apply_overrides({**RECIPE, "model": {"path": str(folder)}}, overrides), "test")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gemma3_text", ("rollout.top_k=40", 'rollout.stop=["7"]')),
        ("gpt_oss", ("precision={preset: fp16, kernels: exact}", "precision.check_every=2", *KL)),
        ("qwen3_5_text", ("precision={train: fp8, rollout: fp8, kernels: exact}",)),
    ],
)
def test_rollout_and_learner_are_equal_to_the_bit(
    folders: Path, tmp_path: Path, name: str, overrides: tuple[str, ...]
) -> None:
    start(configured(folders / name, *QUICK, *overrides, f"run_dir={tmp_path / 'run'}"))
    rows = rows_of(tmp_path / "run")
    assert [row["exact/mismatched_tokens"] for row in rows if "exact/checked_tokens" in row]
    assert all(row["gap/abs_logp_diff_mean"] == 0 for row in rows)
    assert all(row["exact/mismatched_tokens"] == row["exact/misdrawn_tokens"] == 0 for row in rows)
    assert rows[-1]["optim/updates"] > 0
    if KL[0] in overrides:
        assert rows[0]["reference/k3_kl"] == 0  # its copy, by the same kernels
        assert rows[1]["reference/k3_kl"] > 0
    table = RunDirectory.open(tmp_path / "run").environment["precision"]
    assert "logits equal" in table[0]["evidence"]


@pytest.mark.parametrize("train", ["fp32", "bf16", "fp16"])
def test_fast_kernels_are_transformers_own_in_each_role_s_format(folders: Path, tmp_path: Path, train: str) -> None:
    given = (f"precision={{train: {train}, rollout: bf16}}", "rollout.top_p=0.95", "doctor={every: 1}", *KL)
    start(configured(folders / "bloom", *QUICK, *given, f"run_dir={tmp_path / 'run'}"))
    rows = rows_of(tmp_path / "run")
    low, high = (1e-4, 0.1) if train != "bf16" else (0.0, 0.1)
    assert all(low <= row["gap/abs_logp_diff_mean"] < high for row in rows)
    assert rows[-1]["optim/updates"] > 0
    table = {row["role"]: row for row in RunDirectory.open(tmp_path / "run").environment["precision"]}
    assert table["learner"]["active"] == train
    assert table["rollout"]["active"] == "bf16"
    assert "on bf16's grid" in table["rollout"]["evidence"]


@pytest.mark.parametrize(
    ("train", "rollout", "more"),
    [("bf16", "fp8", "fp8: {exclude: [layers.0.mlp, o_proj]}"), ("int8", "bf16", "quantized: {first: 1}")],
)
def test_fast_products_in_fp8_or_a_scaled_format_are_of_the_role_that_is_asked(
    folders: Path, tmp_path: Path, train: str, rollout: str, more: str
) -> None:
    given = (f"precision={{train: {train}, rollout: {rollout}, {more}}}", *KL)
    start(configured(folders / "gemma3_text", *QUICK, *given, f"run_dir={tmp_path / 'run'}"))
    rows = rows_of(tmp_path / "run")
    assert all(1e-4 < row["gap/abs_logp_diff_mean"] < 0.1 for row in rows)
    assert rows[-1]["optim/updates"] > 0
    assert rows[0]["reference/k3_kl"] == 0  # a reference is as the learner
    table = {row["role"]: row for row in RunDirectory.open(tmp_path / "run").environment["precision"]}
    scaled = "rollout" if rollout == "fp8" else "learner"
    assert table[scaled]["kernels"] == "simulated"
    assert table[scaled]["active"] == f"{rollout if rollout == 'fp8' else train} on bf16"


def test_a_stopped_run_goes_on_bit_for_bit_and_its_policy_is_a_model_of_transformers(
    folders: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    start(configured(folders / "gemma3_text", *KL, f"run_dir={whole}"))
    part = stopped(whole, 2, tmp_path / "part")
    resume(part)
    assert contents(part) == contents(whole)
    policy = AutoModelForCausalLM.from_pretrained(whole / "policy")
    assert type(policy).__name__ == "Gemma3ForCausalLM"
    start(configured(whole, *QUICK, f"run_dir={tmp_path / 'next'}"))  # a run's folder stands for its policy
    assert len(rows_of(tmp_path / "next")) == 2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_bit_for_bit(folders: Path, tmp_path: Path, server: Server) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "model": {"path": str(folders / "gpt_oss")}}))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert server.run(["train", str(recipe), f"run_dir={whole}"]) == 0
    moments = (
        lambda: next(killed.glob("checkpoints/.step-0.*.tmp"), None) is not None,
        lambda: (killed / "metrics.jsonl").exists() and (killed / "metrics.jsonl").read_bytes().count(b"\n") >= 1,
        lambda: next(killed.glob("checkpoints/.step-2.*.tmp/optimizer.safetensors"), None) is not None,
        lambda: next(killed.glob(".policy.*.tmp"), None) is not None,
    )
    argv = ["train", str(recipe), f"run_dir={killed}"]
    for moment in moments:
        assert server.run(argv, moment) == -9
        argv = ["train", "--resume", str(killed)]
    assert server.run(argv) == 0
    assert contents(killed) == contents(whole)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model={fresh: {}}",), "it has no folder"),
        (("model.lora={rank: 2, alpha: 4}",), "adapters are for our own decoder"),
        (("nproc=2",), "runs in one process"),
        (("algorithm.reference={path: /nowhere}",), "exact kernels are planned|a copy of itself"),
        (("guard={}",), "does not change its format"),
        (("precision={train: fp32, rollout: bf16, kernels: exact}",), "one"),
        (("precision={train: bf16, rollout: bf16, logits: bf16}",), "its head is its own"),
    ],
)
def test_what_it_does_not_have_is_refused(folders: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(MantissaError, match=message):
        configured(folders / "gpt_oss", *overrides)


def test_what_cannot_be_exact_or_computed_is_refused_before_a_folder_is_made(folders: Path, tmp_path: Path) -> None:
    run = f"run_dir={tmp_path / 'run'}"
    with pytest.raises(MantissaError, match="BloomAttention"):
        start(configured(folders / "bloom", run))
    for name, precision, said in (
        ("gpt_oss", "{train: e8m4, rollout: e8m4}", "which is in fp32, bf16, fp16, fp8 or a scaled format"),
        ("gpt_oss", "{train: bf16, rollout: fp8, fp8: {exclude: [no_proj]}}", "matches no layer of this model"),
        ("bloom", "{train: bf16, rollout: fp8}", "fp8 quantises no layer of BloomForCausalLM"),
    ):
        with pytest.raises(MantissaError, match=said):
            start(configured(folders / name, f"precision={precision}", run))
    with pytest.raises(MantissaError, match=r"rollout\.engine=transformers runs it"):
        start(configured(folders / "gpt_oss", "rollout.engine=native", run))
    assert not (tmp_path / "run").exists()
