"""The measure of an engine's share: exact kernels on the weights that were sent, at the right steps, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from experiences import experience_of
from fake_vllm import install
from mantissa.errors import MantissaError
from mantissa.kernels import ExactKernels, NativeKernels
from mantissa.mismatch import ENGINE_METRICS
from mantissa.precision import Fp8Policy, PrecisionPolicy
from mantissa.rl.assemble import Parts, exact_policy
from mantissa.rl.config import RunConfig
from mantissa.rl.experience import Experience
from mantissa.rl.probes import EngineShare
from mantissa.rollout import Completion, NativeEngine, Request, SamplingParams, VllmEngine
from mantissa.runs.directory import RunDirectory

VLLM = "rollout.engine=vllm"
SHARE, ENGINE, OTHER, NONFINITE = (metric.name for metric in ENGINE_METRICS)
LARGE = "model.fresh.initializer_range=0.2"  # weights that have opinions
Build = Callable[..., Parts]


@pytest.fixture
def build(
    configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts], monkeypatch: pytest.MonkeyPatch
) -> Build:
    """A run's parts on a stand-in for vLLM, with the learner's weights in it as version 3."""

    def make(*overrides: str) -> Parts:
        install(monkeypatch)
        parts = parts_of(configure(VLLM, LARGE, *overrides))
        parts.sampler.engine.sync(parts.learner.weights, 3)
        return parts

    return make


def share_of(parts: Parts) -> EngineShare:
    assert parts.twin is not None
    assert isinstance(parts.sampler.engine, VllmEngine)
    return EngineShare(parts.sampler.engine, parts.twin, parts.learner.temperature, 40)


def sampled_natively(parts: Parts, temperature: float) -> Experience:
    """What the native engine with the twin's exact kernels samples from the same masters, scored by the learner."""
    kernels = share_of(parts).twin.kernels
    assert isinstance(kernels, ExactKernels)
    kv_format = parts.precision.kv_cache.active
    engine = NativeEngine(parts.model.config, kernels, kv_format=kv_format, slots=5, max_length=64)
    engine.sync(parts.learner.weights, 3)
    prompts = [tuple(range(1, 2 + n)) for n in (1, 4, 2, 7)]
    groups = engine.generate(
        [Request(prompt, seed=n, samples=3) for n, prompt in enumerate(prompts)], SamplingParams(9, temperature), 3
    )
    experience = experience_of(prompts, groups, [0.0] * 12)
    return experience.with_learner(*parts.learner.score(experience))


@pytest.mark.parametrize(
    ("precision", "temperature"),
    [
        ("fp32", 1.0),
        ("bf16", 0.7),
        ("{preset: fp16, logits: fp16}", 1.3),
        ("{train: fp16, rollout: bf16}", 1.0),
        ("{train: bf16, rollout: fp32}", 1.0),
        ("{preset: fp16, kv_cache: fp8}", 1.0),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_it_scores_what_the_native_exact_engine_delivers_bit_for_bit(
    build: Build, precision: str, temperature: float, tied: bool
) -> None:
    parts = build(
        f"precision={precision}",
        f"rollout.temperature={temperature}",
        f"model.fresh.tie_embeddings={tied}",
        "model.fresh.head_dim=32",  # as an fp8 cache wants them
        "optimizer.micro_batch_tokens=40",  # several parts
    )
    experience = sampled_natively(parts, temperature)
    measured = share_of(parts).observe(1, experience)
    assert measured[ENGINE] == 0.0, "the engine's part of a gap that no other engine had a part in"
    assert measured[NONFINITE] == 0.0
    assert measured.get(SHARE, 0.0) == 0.0
    learner, rollout = parts.precision.learner.active, parts.precision.rollout.active
    rounded_alike = learner is rollout and parts.precision.kv_cache.active is rollout
    assert measured[OTHER] < 1e-5 if rounded_alike else 1e-4 < measured[OTHER] < 0.1


def test_what_an_engine_adds_is_its_part(build: Build) -> None:
    parts = build("precision=bf16")
    native = sampled_natively(parts, 1.0)
    mask, generator = native.mask_BR, torch.Generator().manual_seed(0)
    noise = torch.randn(mask.shape, generator=generator) / 64
    moved = replace(native, rollout_logp_BR=torch.where(mask, native.rollout_logp_BR + noise, 0.0))
    measured = share_of(parts).observe(1, moved)
    added = (moved.rollout_logp_BR.double() - native.rollout_logp_BR.double())[mask]
    assert measured[ENGINE] == pytest.approx(float(added.abs().mean()), rel=1e-12)
    assert measured[SHARE] == pytest.approx(1.0, abs=1e-3)  # the learner's fast kernels are within 1e-5 of exact


def test_weights_that_did_not_sample_are_not_measured_with(build: Build) -> None:
    parts = build("precision=bf16")
    experience = sampled_natively(parts, 1.0)
    parts.sampler.engine.sync(parts.learner.weights, 4)
    with pytest.raises(RuntimeError, match="version 4 was sent last and 3 sampled"):
        share_of(parts).observe(1, experience)


def test_the_copies_are_made_once_and_by_the_kernels_that_measure(build: Build) -> None:
    parts = build("precision=fp16")
    share = share_of(parts)
    kernels = share.twin.kernels
    assert isinstance(kernels, ExactKernels)
    assert share.engine.copies.kernels is kernels
    assert (kernels.format.name, kernels.kv_format.name, kernels.logits_format.name) == ("fp16", "fp16", "fp32")
    assert kernels.weights_on_grid
    assert share.twin.line == "engine's share of the gap: measured every step by exact simulated kernels in fp16"
    facts = share.twin.facts(share.engine)
    assert facts.pop("evidence").startswith("keeps 1+u; rounds 1+u/4 to 1")
    assert facts == {
        "engine": "vLLM 0.32.0",
        "format": "fp16",
        "every": 1,
        "measured": True,
        "kernels": "exact simulated kernels in fp16",
    }


@pytest.mark.parametrize(("every", "due"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 4, 7]), (0, [])])
def test_the_steps_that_are_measured(build: Build, every: int, due: list[int]) -> None:
    share = share_of(build("precision=bf16", f"rollout.vllm.share_every={every}"))
    assert [step for step in range(1, 8) if share.due(step)] == due
    if every == 0:
        assert isinstance(share.engine.copies.kernels, NativeKernels)
        assert share.twin.line == "engine's share of the gap: not measured, rollout.vllm.share_every=0"


def test_where_there_are_no_exact_kernels_none_stand_in(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise MantissaError("precision.kernels=exact: no way (a; b), in bf16; choose kernels=fast, or another torch")

    monkeypatch.setattr("mantissa.rl.assemble.plan_exact", refuse)
    share = share_of(build("precision=bf16"))
    assert share.twin.kernels is None
    assert not share.due(1)
    reason = "precision.kernels=exact: no way (a; b), in bf16"
    assert share.twin.line == f"engine's share of the gap: not measured, {reason}"
    assert share.twin.facts(share.engine) == {
        "engine": "vLLM 0.32.0", "format": "bf16", "every": 1, "measured": False, "reason": reason,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="no exact kernels"):
        share.observe(1, experience_of([(1,)], [[_completion()]], [0.0]))


def test_of_a_rollout_in_fp8_nothing_is_measured_on_a_cpu(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact kernels hold values there, and vLLM is sent codes."""
    monkeypatch.setattr("mantissa.rollout.vllm.worker.device_problem", lambda device: None)
    sizes = [f"model.fresh.{name}=128" for name in ("hidden_size", "head_dim", "intermediate_size")]
    share = share_of(build("precision={preset: fp8-rollout, fp8: {base: fp16}}", *sizes))
    assert share.twin.kernels is None
    facts = share.twin.facts(share.engine)
    assert (facts["format"], facts["measured"]) == ("fp8 on fp16", False)
    assert facts["reason"].startswith("a rollout in fp8 is sent as codes")


def _completion() -> Completion:
    return Completion((1,), torch.zeros(1), "stop", 3)


@pytest.mark.parametrize(
    "policy",
    [
        PrecisionPolicy(train="fp16", rollout="bf16", reference="fp32"),
        PrecisionPolicy(train="fp8", rollout="bf16", logits="bf16"),
        PrecisionPolicy(train="bf16", rollout="fp16", kv_cache="fp16", backend="native", fallback="warn"),
    ],
)
def test_the_exact_policy_is_the_rollouts(policy: PrecisionPolicy) -> None:
    exact = exact_policy(policy)
    assert (exact.train, exact.rollout, exact.kernels) == (policy.rollout, policy.rollout, "exact")
    assert (exact.logits, exact.kv_cache) == (policy.logits, policy.kv_cache)
    assert (exact.fp8, exact.reference, exact.backend, exact.fallback) == (None, None, "auto", "error")


def test_the_exact_policy_of_a_rollout_in_fp8_has_the_same_layers_in_it() -> None:
    fp8 = Fp8Policy(base="fp16", exclude=("down_proj",))
    assert exact_policy(PrecisionPolicy(train="bf16", rollout="fp8", fp8=fp8)).fp8 == fp8


def test_the_section_is_vllms_alone(configure: Callable[..., RunConfig]) -> None:
    with pytest.raises(MantissaError, match="vllm does nothing with engine=native; leave it out"):
        configure("rollout.vllm.share_every=2")
    with pytest.raises(MantissaError, match="share_every"):
        configure(VLLM, "rollout.vllm.share_every=-1")
    with pytest.raises(MantissaError, match="share_evry"):
        configure(VLLM, "rollout.vllm.share_evry=2")
    assert configure(VLLM).rollout.vllm.share_every == 1


QUICK = ("warm_start.steps=4", "warm_start.evaluate_every=4", "precision=bf16", "rollout.stop=[]", VLLM)


@pytest.mark.usefixtures("with_report")
def test_a_run_measures_at_its_steps_and_says_so(
    train: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch)
    run = train(*QUICK, "steps=4", "rollout.vllm.share_every=3")
    rows = run.read_metrics()
    names = {SHARE, ENGINE, OTHER, NONFINITE, "time/engine_share"}
    assert [names <= row.keys() for row in rows] == [True, False, False, True]
    assert not any(names & row.keys() for row in rows[1:3])
    for row in (rows[0], rows[3]):
        # The stand-in's log-probs are of another policy: nearly all of the gap is its own.
        assert row[SHARE] == pytest.approx(1.0, abs=0.01)
        assert row[ENGINE] == pytest.approx(row["gap/abs_logp_diff_mean"], rel=1e-3)
        assert 0 < row["time/engine_share"] < row["time/step"]
    assert run.environment["engine_share"]["kernels"] == "exact simulated kernels in bf16"
    out = capsys.readouterr().out
    assert "engine's share of the gap: measured every 3 steps by exact simulated kernels in bf16" in out
    assert "of the gap is the engine's: vLLM 0.32.0 and this package's exact kernels, both in bf16, differ by" in out
    assert "medians of 2 measured steps" in run.report_path.read_text()


@pytest.mark.usefixtures("with_report")
def test_a_run_that_measures_nothing_says_so_too(
    train: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch)
    run = train(*QUICK, "steps=1", "rollout.vllm.share_every=0")
    assert not {SHARE, ENGINE, "time/engine_share"} & run.read_metrics()[0].keys()
    said = "Which share of the gap is vLLM 0.32.0's was not measured: rollout.vllm.share_every=0."
    assert said in capsys.readouterr().out
    assert said.replace("'", "&#39;") in run.report_path.read_text()


def test_a_native_run_knows_nothing_of_it(train: Callable[..., RunDirectory]) -> None:
    run = train("warm_start=null", "steps=1", "evaluation=null")
    assert "engine_share" not in json.dumps(run.read_metrics()[0])
    assert "engine_share" not in run.environment
