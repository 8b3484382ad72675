"""Exact kernels in a run: nothing differs, and whatever is made to differ on one side is caught, named and replayed."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

from mantissa.cli import app
from mantissa.errors import MantissaError
from mantissa.kernels import ExactKernels, Kernels, plan_exact
from mantissa.model import load_model
from mantissa.precision import BF16, E4M3, round_to_format
from mantissa.rl import assemble, replay, session
from mantissa.rl.exactness import Exactness
from mantissa.rl.replay import read_case
from mantissa.runs.directory import RunDirectory

Train = Callable[..., RunDirectory]
QUICK = ("steps=2", "warm_start.steps=20", "warm_start.evaluate_every=20", "task.reward=prefix", "evaluation=null")
EXACT = (*QUICK, "precision.kernels=exact")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
def test_no_log_prob_differs_in_any_precision(train: Train, precision: str) -> None:
    rows = train(*EXACT, f"precision={precision}").read_metrics()
    for row in rows:
        assert row["exact/mismatched_tokens"] == 0
        assert row["exact/checked_tokens"] == row["gap/tokens"] > 50
        for name, value in row.items():
            if name.startswith("gap/") and name not in ("gap/tokens", "gap/seq_log_ratio_slope"):
                nothing = 1.0 if name in ("gap/ess", "gap/pearson", "gap/ppl_ratio", "gap/equal_fraction") else 0.0
                assert value == nothing, name
        assert row["correction/weight_mean"] == row["correction/weight_max"] == 1.0


def test_the_ratio_of_the_first_optimiser_step_is_one(train: Train) -> None:
    exact, fast = ("optimizer.updates_per_batch=1", "precision=fp32", "algorithm.correction=bypass"), QUICK
    for row in train(*EXACT, *exact).read_metrics():
        assert (row["policy/ratio_max"], row["policy/ratio_mean"], row["policy/kl_old"]) == (1, 1, 0)
    rows = train(*fast, *exact).read_metrics()  # its anchor is the rollout's log-prob, to which fast kernels have a gap
    assert any(row["policy/ratio_max"] != 1.0 for row in rows)


def test_with_adapters_a_reference_and_a_coarser_cache(train: Train) -> None:
    run = train(
        *EXACT,
        "precision.kv_cache=bf16",
        "model.lora={rank: 4, alpha: 8}",
        "algorithm.reference={}",
        "algorithm.kl={coefficient: 0.1}",
        "rollout.slots=5",
        "optimizer.micro_batch_tokens=40",
    )
    rows = run.read_metrics()
    assert [row["exact/mismatched_tokens"] for row in rows] == [0, 0]
    assert rows[0]["reference/kl"] == 0  # as the learner: equal weights, equal bits


def test_unchecked_steps_learn_the_same_without_the_forward(train: Train) -> None:
    every = train(*EXACT, "steps=4", "precision.check_every=1")
    some = train(*EXACT, "steps=4", "precision.check_every=3")
    rows = some.read_metrics()
    assert [row.get("exact/mismatched_tokens") for row in rows] == [0, None, None, 0]
    for row in rows:
        checked = "exact/checked_tokens" in row
        measured = ("gap/k3_kl" in row, "policy/entropy" in row, "time/learner_logp" in row)
        assert measured == (checked, checked, checked)  # what was not measured is not logged
    one, other = (load_model(run.policy_path).state_dict() for run in (every, some))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert "Exactly 0 at the 2 of 4 steps where it was measured" in some.report_path.read_text()
    assert all(row["learner_logp"] is None for row in some.read_rollouts(2))
    assert all(row["learner_logp"] == row["rollout_logp"] for row in some.read_rollouts(4))


# Mutations: one side is given an operation that is correct, and not the other's


class Silu(ExactKernels):
    def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
        return F.silu(gate_NE) * up_NE


class Flash(ExactKernels):
    def cached_attention(self, q_BHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, length_B: Tensor) -> Tensor:
        seen_BS = torch.arange(k_BKSD.shape[2]) < length_B.unsqueeze(1)
        mask = seen_BS[:, None, None, :]
        return F.scaled_dot_product_attention(q_BHD.unsqueeze(2), k_BKSD, v_BKSD, mask, enable_gqa=True).squeeze(2)


class PerTensor(ExactKernels):
    def linear(self, x_NE: Tensor, weight_FE: Any, bias_F: Tensor | None = None, layer: str = "") -> Tensor:
        assert self.fp8 is not None
        if not self.fp8.quantizes(layer):
            return super().linear(x_NE, weight_FE, bias_F, layer)
        scale = x_NE.abs().amax() / E4M3.largest  # of everybody in the batch
        values = round_to_format(x_NE / scale, E4M3) * scale
        return round_to_format(self.product(values, weight_FE, bias_F), self.format)


def half_head(kernels: ExactKernels) -> ExactKernels:
    kernels.logits_format = BF16
    return kernels


def mutated(kind: Any) -> Callable[..., Kernels]:
    made = assemble.rollout_kernels

    def build(precision: Any, plan: Any = None) -> Kernels:
        kernels = made(precision, plan)
        assert isinstance(kernels, ExactKernels)
        if kind is half_head:
            return half_head(kernels)
        kernels.__class__ = kind
        return kernels

    return build


MUTATIONS = [
    (Silu, "fp32", r"swiglu after model\.layers\.0\.mlp\.up_proj"),
    (Flash, "fp32", r"attention before model\.layers\.0\.self_attn\.o_proj"),
    (PerTensor, "fp8", r"model\.layers\.0\.self_attn\.[qkv]_proj"),
    (half_head, "fp16", r"logits"),
]


@pytest.mark.parametrize(("kind", "precision", "said"), MUTATIONS, ids=lambda value: getattr(value, "__name__", None))
def test_what_differs_on_one_side_is_caught_named_and_replayed(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, precision: str, said: str
) -> None:
    monkeypatch.setattr(assemble, "rollout_kernels", mutated(kind))
    if kind is PerTensor:
        with pytest.raises(MantissaError, match="fp8 is not active in the PerTensor on cpu"):
            train(*EXACT, f"precision={precision}")  # the probe sees it first
        monkeypatch.setattr(assemble, "prove", lambda *given: {})
    with pytest.raises(MantissaError) as caught:
        train(*EXACT, f"precision={precision}")
    message = str(caught.value)
    assert message.startswith("step 1: exact kernels, and yet ")
    found = __import__("re").search(rf"they part in {said} at position \d+: \d+ of \d+ numbers differ", message)
    assert found, message
    (file,) = tmp_path.glob("run-*/mismatch-step-1.safetensors")
    assert f"mantissa replay {file}" in message

    healthy = CliRunner().invoke(app, ["replay", str(file), "--device", "cpu"])  # kernels without the mutation
    assert (healthy.exit_code, "every operation gives both sides the same numbers" in healthy.output) == (0, True)
    monkeypatch.setattr(replay, "rollout_kernels", mutated(kind))
    ill = CliRunner().invoke(app, ["replay", str(file), "--device", "cpu"])
    assert ill.exit_code == 1
    assert found.group() in ill.output.replace("\n", " ")
    assert message.partition("; replay it")[0] in ill.output.replace("\n", " ")
    assert read_case(file).policy.kernels == "exact"


def test_a_warning_goes_on_and_counts(train: Train, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "rollout_kernels", mutated(Silu))
    rows = train(*EXACT, "precision=fp32", "precision.on_mismatch=warn").read_metrics()
    assert len(rows) == 2
    assert all(0 < row["exact/mismatched_tokens"] <= row["exact/checked_tokens"] for row in rows)
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("warning: step") == 2
    assert "they part in swiglu" in out


def test_a_log_prob_taken_differently_is_not_blamed_on_an_operation(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mantissa.rollout import generation

    drawn = generation.sample

    def off_by_one(*arguments: Any) -> tuple[Tensor, Tensor]:
        tokens, logp = drawn(*arguments)
        return tokens, torch.nextafter(logp, torch.tensor(-math.inf))

    monkeypatch.setattr(generation, "sample", off_by_one)
    with pytest.raises(MantissaError, match="every operation agrees: either the log-prob itself is taken differently"):
        train(*EXACT)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", None])
def test_a_file_that_is_no_case(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "mismatch.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MantissaError, match=r"expected the file that a run with precision\.kernels=exact wrote"):
        read_case(path)


def test_a_lag_is_refused(configure: Callable[..., Any]) -> None:
    with pytest.raises(MantissaError, match=r"precision\.kernels=exact with rollout\.max_policy_lag=4"):
        configure("precision.kernels=exact", "rollout.max_policy_lag=4")


class Shaky(ExactKernels):
    """Another library's path, which the probe did not meet, until the kernels compute in tiles of one size."""

    def product(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        out_NF = super().product(x_NE, weight_FE, bias_F)
        small = weight_FE.shape == (8, 8)  # the probe of the format
        return out_NF if small or self.plan.way != "tiles" else torch.nextafter(out_NF, torch.full_like(out_NF, math.inf))


def test_a_first_difference_moves_to_the_safer_plan_before_anything_is_learned(
    train: Train, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "rollout_kernels", mutated(Shaky))
    recipe = (*EXACT, "precision=fp32", "checkpoint.every=1", "checkpoint.keep=9")
    run = train(*recipe)
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("from here on all kernels compute by one tile, and step 1 is sampled again") == 1
    rows = run.read_metrics()
    assert [(row["exact/replans"], row["exact/mismatched_tokens"]) for row in rows] == [(1, 0), (1, 0)]

    monkeypatch.setattr(assemble, "plan_exact", lambda *given: plan_exact(*given[:3], "one tile"))
    safe = train(*recipe)  # from the beginning: the same prompts and uniforms, so the same weights in the end
    assert [row["exact/replans"] for row in safe.read_metrics()] == [0, 0]
    one, other = (load_model(each.policy_path).state_dict() for each in (run, safe))
    assert all(torch.equal(one[name], other[name]) for name in one)

    monkeypatch.undo()
    monkeypatch.setattr(assemble, "rollout_kernels", mutated(Shaky))
    shutil.rmtree(run.checkpoint_path(2))
    session.resume(run.path)  # from step 1, with the plan that was then in use
    assert [row["exact/replans"] for row in run.read_metrics()] == [1, 1]
    again = load_model(run.policy_path).state_dict()
    assert all(torch.equal(again[name], other[name]) for name in again)


def test_no_second_plan_where_it_is_not_asked_for_or_something_was_learned(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "rollout_kernels", mutated(Shaky))
    with pytest.raises(MantissaError, match=r"step 1: .* log-probs differ"):
        train(*EXACT, "precision=fp32", "precision.on_mismatch=stop")
    check = Exactness.check
    monkeypatch.setattr(Exactness, "check", lambda self, step, batch: {} if step == 1 else check(self, step, batch))
    with pytest.raises(MantissaError, match=r"step 3: .* log-probs differ"):  # after step 2, which nobody compared
        train(*EXACT, "steps=3", "precision=fp32", "precision.check_every=2")
