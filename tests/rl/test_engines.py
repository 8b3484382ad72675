"""Another engine in a run, on a stand-in for vLLM: its parts, its share of the gap, and sampling ahead with it.

The real one is in ``tests/rollout/real_vllm``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiences import experience_of
from fake_vllm import LLM, Fault, install
from mantissa.base.errors import MantissaError
from mantissa.kernels import Planned, resolve
from mantissa.mismatch.tables import ENGINE_METRICS
from mantissa.precision import Fp8Policy, PrecisionPolicy
from mantissa.rl.assemble import Parts, exact_policy
from mantissa.rl.batch import SyncSource
from mantissa.rl.config.run import RunConfig
from mantissa.rl.engines import on_vllm
from mantissa.rl.experience import Scored
from mantissa.rl.probes import EngineShare
from mantissa.rl.session import resume
from mantissa.rollout import Completion, NativeEngine, Request, SamplingParams, VllmEngine, VllmStart
from mantissa.rollout.vllm.worker import digest
from mantissa.runs.directory import RunDirectory
from mantissa.training import load_checkpoint
from small_run import QUICK, rows_of, stopped

Train = Callable[..., RunDirectory]
Build = Callable[..., Parts]
VLLM = "rollout.engine=vllm"
SHARE, ENGINE, OTHER, NONFINITE = (metric.name for metric in ENGINE_METRICS)


@pytest.fixture
def on_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


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
    with pytest.raises(MantissaError, match="the task has no warm_start problems"):
        parts_of(configure(VLLM, "precision=bf16", "warm_start={steps: 1}", "task.warm_start_size=0"))
    assert [llm.closed for llm in LLM.made] == [True]
    install(monkeypatch, Fault(fails="no such head size"))
    with pytest.raises(MantissaError, match=r"vLLM 0\.32\.0 did not start: no such head size"):
        parts_of(configure(VLLM, "precision=bf16"))


# Its share of the gap: exact kernels on the weights that were sent, at the right steps, or not at all


@pytest.fixture
def build(made: Build, on_stand_in: None) -> Build:
    """A run's parts on the stand-in, with the learner's weights in it as version 3."""

    def with_version(*overrides: str) -> Parts:
        parts = made(VLLM, *overrides)
        parts.sampler.engine.sync(parts.learner.weights, 3)
        return parts

    return with_version


def share_of(parts: Parts) -> EngineShare:
    assert parts.twin is not None
    assert isinstance(parts.sampler.engine, VllmEngine)
    return EngineShare(parts.sampler.engine, parts.twin, parts.learner.temperature, 40)


def sampled_natively(parts: Parts, temperature: float) -> Scored:
    """What the native engine with the twin's exact kernels samples from the same masters, scored by the learner."""
    kernels = share_of(parts).twin.kernels
    assert isinstance(kernels, Planned)
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
    ("precision", "temperature", "tied"),
    [
        ("fp32", 1.0, True),
        ("bf16", 0.7, False),
        ("{preset: fp16, logits: fp16}", 1.3, True),
        ("{train: fp16, rollout: bf16}", 1.0, False),
        ("{train: bf16, rollout: fp32}", 1.0, True),
        ("{preset: fp16, kv_cache: fp8}", 1.0, False),
    ],
)
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
    # Formats alike: the order of sums is left, and of logits that are rounded a few may round otherwise.
    assert measured[OTHER] < 1e-4 if rounded_alike else 1e-3 < measured[OTHER] < 0.1


def test_weights_that_did_not_sample_are_not_measured_with(build: Build) -> None:
    parts = build("precision=bf16")
    experience = sampled_natively(parts, 1.0)
    parts.sampler.engine.sync(parts.learner.weights, 4)
    with pytest.raises(RuntimeError, match="version 4 was sent last and 3 sampled"):
        share_of(parts).observe(1, experience)


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


def test_the_exact_policy_of_a_rollout_in_fp8_has_the_same_layers_in_it() -> None:
    fp8 = Fp8Policy(base="fp16", exclude=("down_proj",))
    assert exact_policy(PrecisionPolicy(train="bf16", rollout="fp8", fp8=fp8)).fp8 == fp8


SHORT = (*QUICK, "precision=bf16", VLLM, "evaluation=null")


@pytest.mark.usefixtures("bf16_is_simulated")
@pytest.mark.usefixtures("on_stand_in", "with_report")
def test_a_run_measures_at_its_steps_and_says_so(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(*SHORT, "steps=4", "rollout.vllm.share_every=3")
    rows = run.metrics.read()
    names = {SHARE, ENGINE, OTHER, NONFINITE, "time/engine_share"}
    assert [names <= row.keys() for row in rows] == [True, False, False, True]
    assert not any(names & row.keys() for row in rows[1:3])
    for row in (rows[0], rows[3]):
        # The stand-in's log-probs are of another policy: nearly all of the gap is its own.
        assert row[SHARE] == pytest.approx(1.0, abs=0.01)
        assert row[ENGINE] == pytest.approx(row["gap/abs_logp_diff_mean"], rel=1e-3)
        assert 0 < row["time/engine_share"] < row["time/step"]
    facts = run.environment["engine_share"]
    assert facts.pop("evidence").startswith("keeps 1+u; rounds 1+u/4 to 1")
    assert facts == {
        "engine": "vLLM 0.32.0", "format": "bf16", "every": 3, "measured": True,
        "kernels": "exact simulated kernels in bf16",
    }  # fmt: skip
    out = capsys.readouterr().out
    assert "engine's share of the gap: measured every 3 steps by exact simulated kernels in bf16" in out
    assert "of the gap is the engine's: vLLM 0.32.0 and this package's exact kernels, both in bf16, differ by" in out
    assert "medians of 2 measured steps" in run.report_path.read_text()


@pytest.mark.usefixtures("on_stand_in")
def test_a_run_that_measures_nothing_says_so_and_a_native_one_knows_nothing_of_it(
    train: Train, finished: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(*SHORT, "steps=1", "rollout.vllm.share_every=0")
    assert not {SHARE, ENGINE, "time/engine_share"} & run.metrics.read()[0].keys()
    said = "Which share of the gap is vLLM 0.32.0's was not measured: rollout.vllm.share_every=0."
    assert said in capsys.readouterr().out
    native = finished(*QUICK)
    assert "engine_share" not in json.dumps(native.metrics.read()[0])
    assert "engine_share" not in native.environment


# Sampling ahead: who uses it when, with which weights, and a run that goes on

LATE = (VLLM, "rollout.max_policy_lag=4", "steps=6", "precision=fp32", "task.reward=prefix")
LATE += ("warm_start=null", "checkpoint={every: 1, keep: 9}")


class Watched(LLM):
    """Notes by which thread, and from which weights, it is asked; and whether two ask at once."""

    seen: list[tuple[str, str, float]] = []  # noqa: RUF012 - the tests' window
    one_user = threading.Lock()

    @contextmanager
    def used(self) -> Iterator[None]:
        assert self.one_user.acquire(blocking=False), "two threads at once"
        try:
            yield
        finally:
            self.one_user.release()

    def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        with self.used():
            return super().collective_rpc(method, kwargs)

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        with self.used():
            weights = dict(self.worker.mantissa_weights())
            self.seen.append((threading.current_thread().name, weights["lm_head.weight"], params[0].temperature))
            return super().generate(prompts, params, use_tqdm)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, on_stand_in: None) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "LLM", Watched)
    monkeypatch.setattr(Watched, "seen", [])


@pytest.mark.usefixtures("watched")
def test_two_threads_use_it_in_turn_each_with_its_own_weights_and_so_does_what_is_resumed(
    train: Train, tmp_path: Path
) -> None:
    run = train(*LATE)
    rows = run.metrics.read()
    made = {step: load_checkpoint(run.checkpoints, step) for step in range(7)}
    head = {step: str(digest(saved.policy["model.embed_tokens.weight"])) for step, saved in made.items()}
    assert len(set(head.values())) >= 6  # it learned in nearly every step
    sampler = [weights for name, weights, _ in Watched.seen if name == "rollout"]
    assert sampler == [head[max(0, step - 3)] for step in range(1, 7)]  # two steps behind
    greedy = [weights for name, weights, t in Watched.seen if name == "MainThread" and t == 0]
    assert greedy == [head[2], head[4], head[6]]  # evaluation, every second step, by the newest
    after = [0, *(int(row["optim/updates"]) for row in rows)]  # a step without a gradient makes no version
    assert [row["rollout/lag_max"] for row in rows] == [
        after[step - 1] - after[max(0, step - 3)] for step in range(1, 7)
    ]
    assert max(row["rollout/lag_max"] for row in rows) == 4
    share = run.environment["engine_share"]
    assert not share["measured"]
    assert "newer weights than sampled a batch are held" in share["reason"]
    assert len(LLM.made) == 1
    assert LLM.made[0].closed
    for stop in (0, 3):
        before = len(Watched.seen)
        resume(path := stopped(run.path, stop, tmp_path / f"stopped-{stop}"))
        resumed = RunDirectory.open(path)
        assert rows_of(path) == rows_of(run.path)
        assert all(resumed.read_rollouts(step) == run.read_rollouts(step) for step in range(1, 7))
        asked = [name for name, _, _ in Watched.seen[before:]].count("rollout")
        assert asked == 6 - stop - (2 if stop else 0)  # the others lay in the checkpoint


@pytest.mark.usefixtures("on_stand_in")
def test_beside_the_learner_it_has_a_share_of_the_threads(
    configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str | None] = []
    real = LLM.__init__

    def begin(llm: LLM, **options: Any) -> None:
        given.append(os.environ.get("OMP_NUM_THREADS"))
        real(llm, **options)

    monkeypatch.setattr(LLM, "__init__", begin)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        parts_of(configure("rollout.engine=vllm", "precision=fp32"))
        parts_of(configure("rollout.engine=vllm", "precision=fp32", "rollout.max_policy_lag=2"))
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        parts_of(configure("rollout.engine=vllm", "precision=fp32"))
    finally:
        torch.set_num_threads(before)
    assert given == ["6", "2", "5"]


@pytest.mark.usefixtures("watched")
def test_its_failure_while_sampling_ahead_stops_the_run(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM.fault, "breaks", "core died")
    threads = threading.active_count()
    with pytest.raises(
        MantissaError, match=r"vLLM 0\.32\.0 failed: core died; its own messages above say more .*; res"
    ):
        train(*LATE)
    assert threading.active_count() == threads
    assert LLM.made[0].closed
