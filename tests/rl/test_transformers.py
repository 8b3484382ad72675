"""Runs whose policy is by transformers' own code: families that our decoder does not know, exact and fast."""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from killable import Server
from mantissa.base.errors import MantissaError
from mantissa.doctor.readers import read_dump
from mantissa.model import byte_tokenizer
from mantissa.precision import FP32
from mantissa.rl import RunConfig, make_config, resume, start
from mantissa.rl.assemble import assemble
from mantissa.rl.config.run import apply_overrides
from mantissa.rl.doctor_model import open_for_doctor
from mantissa.rl.policy import open_any
from mantissa.rollout.transformers import CopiedTransformers, TransformersPolicy
from mantissa.runs.directory import RunDirectory
from mantissa.training import load_checkpoint
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
        ("qwen3_5_text", ("precision={train: fp8, rollout: fp8, kernels: exact}", *KL)),
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
    table = {row["role"]: row for row in RunDirectory.open(tmp_path / "run").environment["precision"]}
    assert all("logits equal" in table[role]["evidence"] for role in ("learner", "rollout"))
    if KL[0] in overrides:
        assert rows[0]["reference/k3_kl"] == 0  # its copy, by the same kernels
        assert rows[1]["reference/k3_kl"] > 0
        assert "logits equal to the policy's" in table["reference"]["evidence"]


@pytest.mark.parametrize("train", ["fp32", "bf16", "fp16"])
def test_fast_kernels_are_transformers_own_in_each_role_s_format(
    folders: Path, tmp_path: Path, train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (f"precision={{train: {train}, rollout: bf16}}", "rollout.top_p=0.95", "doctor={every: 1}", *KL)
    start(configured(folders / "bloom", *QUICK, *given, f"run_dir={tmp_path / 'run'}"))
    rows = rows_of(tmp_path / "run")
    low, high = (1e-4, 0.1) if train != "bf16" else (0.0, 0.1)
    assert all(low <= row["gap/abs_logp_diff_mean"] < high for row in rows)
    assert rows[-1]["optim/updates"] > 0
    table = {row["role"]: row for row in RunDirectory.open(tmp_path / "run").environment["precision"]}
    assert table["learner"]["active"] == train
    assert table["rollout"]["active"] == "bf16"
    assert table["reference"]["active"] == train  # as the learner, where the recipe does not say
    for role, fmt in {"learner": train, "rollout": "bf16", "reference": train}.items():
        assert f"on {fmt}'s grid" in table[role]["evidence"]
    said = capsys.readouterr().out
    assert f"precision reference: asked for as learner, active {train} (native kernels)" in said


def test_a_reference_that_computes_otherwise_than_it_was_asked_to_is_found(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def otherwise(self: CopiedTransformers, policy: TransformersPolicy, fmt: Any) -> None:
        model = copy.deepcopy(policy.model)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(2.0)
        self.decoder = TransformersPolicy(model, FP32, policy.adopted)

    monkeypatch.setattr(CopiedTransformers, "__init__", otherwise)
    with pytest.raises(MantissaError, match=r"the reference was to compute in bf16, and its .* logits are in fp32"):
        assemble(configured(folders / "bloom", "precision=bf16", *KL))
    with pytest.raises(MantissaError, match="the reference was to compute as the adopted policy does, and "):
        assemble(configured(folders / "gemma3_text", *KL))


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


def test_weights_have_the_names_that_transformers_gives_them(folders: Path, tmp_path: Path) -> None:
    own = AutoModelForCausalLM.from_pretrained(folders / "bloom")
    parts = assemble(configured(folders / "bloom", "precision=fp32", *KL))
    names = [name for name, _ in own.named_parameters()]
    assert list(parts.learner.trained) == list(parts.learner.weights) == names
    assert parts.reference is not None
    assert list(parts.reference.weights) == names
    assert dict(parts.model.named_modules()).keys() == dict(own.named_modules()).keys()
    parts.sampler.engine.sync(parts.learner.weights, 0)
    with torch.no_grad():
        parts.learner.weights[names[3]].fill_(torch.inf)
    with pytest.raises(MantissaError, match=f"weight {re.escape(names[3])} "):
        parts.sampler.engine.sync(parts.learner.weights, 1)
    parts.close()
    run = tmp_path / "run"
    start(configured(folders / "bloom", "precision=fp32", "checkpoint={every: 1, keep: 9}", *QUICK, f"run_dir={run}"))
    saved = load_checkpoint(run / "checkpoints", 1).policy
    assert set(saved) == set(names)
    opened = open_for_doctor(str(run), read_dump(run), None, torch.device("cpu"))  # by the names that the run saved
    assert all(torch.equal(weight, saved[name]) for name, weight in opened.model.named_parameters())
    assert [weights.keys() for weights in opened.versions.values()] == [set(names)]


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


UP = "model.layers.0.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (
        lambda at: (at / "model.safetensors").unlink(),
        r"does not load it .*no file named model\.safetensors",
    ),
    "truncated": (lambda at: os.truncate(at / "model.safetensors", 5000), "does not load it .*SafetensorError"),
    "empty": (lambda at: (at / "model.safetensors").write_bytes(b""), "does not load it .*SafetensorError"),
    "one is missing": (_tensors(lambda weights: weights.pop(UP)), f"1 weight is missing, {UP}; fetch"),
    "one is nan": (_tensors(lambda weights: weights[UP].fill_(torch.nan)), f"weight {UP} holds nan"),
    "other shapes": (_tensors(lambda weights: weights.update({UP: torch.zeros(2, 2)})), "does not load it"),
    "no config": (lambda at: (at / "config.json").unlink(), r"no config\.json there"),
    "no JSON": (lambda at: (at / "config.json").write_text("{nope"), r"config\.json: not valid JSON"),
    "a list": (lambda at: (at / "config.json").write_text("[1]"), r"config\.json: expected a JSON object, got a list"),
    "no family": (lambda at: (at / "config.json").write_text("{}"), "does not load it"),
    "no tokenizer": (lambda at: (at / "tokenizer.json").unlink(), "cannot load the tokenizer"),
    "half a tokenizer": (lambda at: os.truncate(at / "tokenizer.json", 300), r"tokenizer\.json: not valid JSON"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_line_and_nothing_is_written(
    folders: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, said = DAMAGES[name]
    folder = tmp_path / "policy"
    shutil.copytree(folders / "gemma3_text", folder)
    damage(folder)
    capsys.readouterr()
    with pytest.raises(MantissaError, match=said) as caught:
        start(configured(folder, f"run_dir={tmp_path / 'run'}"))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().err == ""  # no report of transformers either
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_weights_that_the_model_does_not_have_are_said(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "gemma3_text", tmp_path / "policy")
    _tensors(lambda weights: weights.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}))(tmp_path / "policy")
    with pytest.warns(UserWarning, match=r"1 weight is not the model's, and left out: model\.layers\.9\.mlp\.up_proj"):
        open_any(str(tmp_path / "policy"))


HELD = r": weight model\.layers\.0\.mlp\.down_proj\.weight holds 70000, which fp16 cannot \(largest 65504\)"


@pytest.mark.parametrize(
    "precision",
    [
        "{train: fp16, rollout: fp16, kernels: exact}",
        "{train: fp16, rollout: fp16}",
        "{train: bf16, rollout: fp16}",
        "{train: fp16, rollout: bf16}",
        "{train: bf16, rollout: bf16, reference: fp16}",
    ],
)
def test_a_weight_that_fp16_cannot_hold_is_named_with_its_value(folders: Path, tmp_path: Path, precision: str) -> None:
    parts = assemble(configured(folders / "gemma3_text", f"precision={precision}", *KL))
    weights = parts.learner.weights
    parts.sampler.engine.sync(weights, 0)
    assert parts.reference is not None
    parts.reference.take(weights, 0)
    name = "model.layers.0.mlp.down_proj.weight"
    with torch.no_grad():
        weights[name][1, 2] = -7e4
    for who, take, of_it in (
        ("sync", lambda: parts.sampler.engine.sync(weights, 1), "reference: fp16" not in precision),
        ("reference", lambda: parts.reference.take(weights, 1), "train: fp16" in precision or "e: fp16" in precision),
    ):
        if of_it:
            with pytest.raises(MantissaError, match=f"^{who}{HELD}"):
                take()
        else:
            take()
    policy = parts.model.model
    parts.close()
    policy.save_pretrained(tmp_path / "large")
    byte_tokenizer().save(tmp_path / "large")
    with pytest.raises(MantissaError, match=f"^model.path=.*large{HELD}"):
        start(configured(tmp_path / "large", f"precision={precision}", *KL, f"run_dir={tmp_path / 'run'}"))
    assert not (tmp_path / "run").exists()


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


@pytest.mark.parametrize(
    "content", ["{", '{"model_type": null}', '{"model_type": "llama"}', '{"model_type": "llama", "hidden_size": "x"}']
)
def test_a_damaged_configuration_is_not_told_to_change_its_engine(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    for attempt in (lambda: start(configured(tmp_path, "rollout.engine=native")), lambda: open_any(str(tmp_path))):
        with pytest.raises(MantissaError) as caught:
            attempt()
        assert "config.json" in str(caught.value)
        assert "transformers" not in str(caught.value)


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
