"""Which engine a recipe gets, what vLLM is refused, and a run's parts on a stand-in for it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from fake_vllm import LLM, Fault, install
from mantissa.errors import MantissaError
from mantissa.precision import PrecisionPolicy, resolve
from mantissa.rl.assemble import Parts, on_vllm
from mantissa.rl.config import RunConfig
from mantissa.rl.sources import SyncSource
from mantissa.rollout import NativeEngine, VllmEngine, VllmStart

VLLM = "rollout.engine=vllm"


def test_native_is_the_default(configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts]) -> None:
    plain, said = parts_of(configure()), parts_of(configure("rollout.engine=native"))
    for parts in (plain, said):
        assert isinstance(parts.sampler.engine, NativeEngine)
        assert (parts.sampler.engine.slots, parts.sampler.engine.max_length) == (16, 64)
    assert plain.precision.rows() == said.precision.rows()
    assert plain.evidence == said.evidence


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["precision={preset: fp16, kernels: exact}"], r"precision\.kernels=exact: vLLM's kernels add in another"),
        (
            ["precision={preset: fp8-rollout, kv_cache: fp16, fp8: {base: fp16}, logits: bf16}"],
            r"precision\.logits=bf16: vLLM holds logits in fp32 or in the rollout's fp16",
        ),
        (["precision={preset: fp16, kv_cache: bf16}"], r"precision\.kv_cache=bf16: vLLM's cache is kept in .* fp16"),
        (["precision={preset: fp16, logits: bf16}"], r"precision\.logits=bf16: vLLM holds logits in fp32 or .* fp16"),
        (["precision={preset: fp16, backend: simulated}"], r"precision\.backend=simulated: vLLM computes in fp16"),
        (["rollout.temperature=0.005"], r"rollout\.temperature=0\.005: vLLM would sample at 0\.01"),
    ],
)
def test_what_vllm_is_refused(configure: Callable[..., RunConfig], overrides: list[str], message: str) -> None:
    configure(*overrides)  # good without vLLM
    with pytest.raises(MantissaError, match=rf"rollout\.engine=vllm with {message}.*or set rollout\.engine=native"):
        configure(*overrides, VLLM)


def test_it_cannot_sleep_while_it_samples_ahead(configure: Callable[..., RunConfig]) -> None:
    configure(VLLM, "precision=bf16", "rollout.vllm.sleep=true")
    with pytest.raises(MantissaError, match=r"sleep=true and rollout\.max_policy_lag=4: it samples while the learner"):
        configure(VLLM, "precision=bf16", "rollout.vllm.sleep=true", "rollout.max_policy_lag=4")


@pytest.mark.parametrize("more", [["nproc=2"], ["nproc=2", "parallel=fsdp2"], ["rollout.max_policy_lag=4"]])
def test_several_processes_and_sampling_ahead_are_accepted(
    configure: Callable[..., RunConfig], more: list[str]
) -> None:
    assert configure("precision=bf16", VLLM, *more).rollout.engine == "vllm"
    with pytest.raises(MantissaError, match=r"max_policy_lag=4 with nproc=2: sampling beside learning is for one"):
        configure("precision=bf16", VLLM, "nproc=2", "rollout.max_policy_lag=4")


@pytest.mark.parametrize(
    "precision",
    [
        "fp32",
        "{preset: fp16, kv_cache: fp16, logits: fp16}",
        "{preset: bf16, kv_cache: fp8}",
        "{preset: fp8-rollout, kv_cache: bf16}",
    ],
)
def test_what_vllm_can_is_accepted(configure: Callable[..., RunConfig], precision: str) -> None:
    assert configure(f"precision={precision}", VLLM).rollout.engine == "vllm"


def test_the_precision_table_says_who_computes() -> None:
    plain = resolve(PrecisionPolicy.parse("bf16"), "cpu")
    rows = {row["role"]: row for row in on_vllm(plain).rows()}
    before = {row["role"]: row for row in plain.rows()}
    for role in ("rollout", "logits", "kv_cache"):
        assert "vLLM" in rows[role]["reason"]
        assert rows[role]["kernels"] == "native"
        assert (rows[role]["requested"], rows[role]["active"]) == (before[role]["requested"], before[role]["active"])
    assert {role: rows[role] for role in ("learner", "master")} == {r: before[r] for r in ("learner", "master")}
    in_fp8 = on_vllm(resolve(PrecisionPolicy.parse("fp8-rollout"), "cpu")).rollout
    assert (in_fp8.name, in_fp8.backend) == ("fp8 on bf16", "native")
    assert in_fp8.reason == (
        "vLLM's own fp8 kernels: products of e4m3 in blocks of 128, base bf16; weights of our quantising"
    )
    cache = on_vllm(resolve(PrecisionPolicy.parse({"preset": "bf16", "kv_cache": "fp8"}), "cpu")).kv_cache
    assert (cache.active.name, cache.backend) == ("e4m3", "native")
    assert cache.reason == "asked for: vLLM's e4m3 cache without scales, so beyond 448 saturated; " + (
        "digits cut off, not rounded"
    )


def test_the_parts_of_a_run_on_vllm(
    configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    parts = parts_of(configure(VLLM, "precision=bf16"))
    engine, options = parts.sampler.engine, LLM.made[-1].options
    assert isinstance(engine, VllmEngine)
    assert (options["max_num_seqs"], options["max_model_len"], options["dtype"]) == (16, 64, "bfloat16")
    assert parts.evidence["rollout"] == engine.evidence
    assert "bfloat16, head float32" in engine.evidence
    engine.sync(parts.learner.weights, parts.learner.version)
    assert engine.version == parts.learner.version
    parts.close()
    assert LLM.made[-1].closed


def test_keys_of_vllm_that_would_do_nothing(configure: Callable[..., RunConfig]) -> None:
    for override in ("rollout.vllm.server=http://x:1", "rollout.vllm.sleep=true"):
        with pytest.raises(MantissaError, match=r"rollout: vllm does nothing with engine=native; leave it out"):
            configure(override)
    with pytest.raises(MantissaError, match=r"rollout\.vllm: timeout_s does nothing without a server; leave it out"):
        configure(VLLM, "rollout.vllm.timeout_s=60")
    whole = configure(VLLM, "rollout.vllm.server=http://x:1", "rollout.vllm.timeout_s=60").model_dump(mode="json")
    assert RunConfig(**whole).model_dump(mode="json") == whole  # as a resume reads it


def test_an_engine_that_sleeps_rests_between_the_batch_and_the_new_weights(
    configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(VllmStart, "__post_init__", lambda self: None)  # what a CPU's would ignore, the stand-in does
    parts = parts_of(configure(VLLM, "rollout.vllm.sleep=true"))
    engine, llm, weights = parts.sampler.engine, LLM.made[-1], parts.learner.weights
    collector = SimpleNamespace(collect=lambda step, version: (step, version, set(llm.awake)))
    source = SyncSource(collector, engine)
    assert "asleep it gives" in parts.evidence["rollout"]
    llm.slept.clear()
    source.start(0, weights, 0, [])
    assert source.take(1) == (1, 0, {"weights", "kv_cache"})
    assert (llm.awake, engine.version) == (set(), -1)  # the learner's turn
    source.hand_over(1, weights, 0)  # a step that was skipped makes no version, and still it must wake
    source.hand_over(1, weights, 0)
    assert llm.slept == ["wake weights", "wake kv_cache", "sleep 2", "wake weights", "wake kv_cache"]
    parts.close()


def test_a_recipe_that_fails_later_leaves_no_vllm_running(
    configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    with pytest.raises(MantissaError, match="no held-out problems"):
        parts_of(configure(VLLM, "precision=bf16", "task.heldout_size=0"))
    assert [llm.closed for llm in LLM.made] == [True]
    install(monkeypatch, Fault(fails="no such head size"))
    with pytest.raises(MantissaError, match=r"vLLM 0\.32\.0 did not start: no such head size"):
        parts_of(configure(VLLM, "precision=bf16"))
