"""RL with top-k and top-p: the learner renormalises over what each token was drawn from, and nothing is lost of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from experiences import dry_update, experience_of, gradients, hugging_face, of_samples
from mantissa.base.errors import MantissaError
from mantissa.doctor.dump import Dump, Scored, Settings
from mantissa.doctor.examine import examine
from mantissa.doctor.sides import Scores, Side
from mantissa.doctor.substitution import declared, hypotheses, substitute
from mantissa.launch import LaunchOptions
from mantissa.launch.export import export
from mantissa.rl import experience as batches
from mantissa.rl.ahead import pack, unpack
from mantissa.rl.assemble import Parts
from mantissa.rl.batch import Batch
from mantissa.rl.probes import KeptMass
from mantissa.rollout import NativeEngine, Request
from mantissa.runs.directory import RunDirectory
from small_run import configure

Train = Callable[..., RunDirectory]
NUCLEUS = "rollout.top_p=0.8"
FP32 = ("precision=fp32", "warm_start=null", NUCLEUS)


def drawn(parts: Parts, problems: int = 5, samples: int = 4) -> batches.Scored:
    """Scored completions with made-up rewards."""
    train = parts.task.split("train", problems)
    params = parts.sampler.params(6, 1.0, top_p=0.8)
    result = parts.sampler.sample(train, samples, params, 0, 0, "test")
    experience = of_samples(result, [float(number % 3 == 0) for number in range(len(result))])
    return experience.with_learner(*parts.learner.score(experience))


def naive(model: Any, experience: batches.Scored) -> tuple[Tensor, list[Tensor]]:
    """In float64, a sequence at a time by transformers: log-probs over sets of tokens, and those over everything."""
    whole, truncated = [], []
    for row in range(len(experience)):
        assert experience.support
        prompt, length = int(experience.prompt_length_B[row]), int(experience.length_B[row])
        tokens = experience.tokens_BT[row, :length]
        logits = model(tokens[None]).logits[0, :, :]
        for place in range(length - prompt):
            at = logits[prompt - 1 + place]
            kept = experience.support[row].mask(place, place + 1, len(at))[0].nonzero().flatten().tolist()
            token = int(tokens[prompt + place])
            truncated.append(at[token] - torch.stack([at[v] for v in kept]).exp().sum().log())
            whole.append(at[token] - at.exp().sum().log())
    return torch.stack(truncated), whole


def test_log_probs_mass_and_gradient_are_those_of_float64(made: Callable[..., Parts], tmp_path: Path) -> None:
    parts = made(*FP32, "algorithm={loss: reinforce, advantage: dr_grpo}", "optimizer.updates_per_batch=1")
    experience = drawn(parts)
    oracle = hugging_face(parts, tmp_path / "hf")
    truncated, whole = naive(oracle, experience)
    mask = experience.mask_BR
    np.testing.assert_allclose(experience.old_logp_BR[mask].double(), truncated.detach(), atol=2e-6)
    np.testing.assert_allclose(experience.rollout_logp_BR[mask].double(), truncated.detach(), atol=2e-6)

    probe = KeptMass(parts.learner)
    scored = experience.with_learner(*parts.learner.score(experience, probe.look(experience)))
    row = probe.observe(1, scored)
    mass = torch.stack(whole).detach() - truncated.detach()
    assert math.log(0.8) - 1e-6 <= float(mass.min()) < -0.01
    assert abs(row["support/log_mass"] - float(mass.mean())) < 1e-6
    assert abs(row["support/log_mass_min"] - float(mass.min())) < 2e-6

    found = gradients(parts.learner, experience)
    reward = experience.reward_B.double().view(5, 4)
    advantage = (reward - reward.mean(1, keepdim=True)).flatten()
    (-(advantage[mask.nonzero()[:, 0]] * truncated).sum() / int(mask.sum())).backward()
    for name, parameter in oracle.named_parameters():
        if name in found and parameter.grad is not None:
            np.testing.assert_allclose(found[name].double(), parameter.grad, atol=2e-6, rtol=1e-4, err_msg=name)


def test_the_split_into_micro_batches_does_not_show(made: Callable[..., Parts]) -> None:
    one = made(*FP32, "optimizer.updates_per_batch=1")
    whole = dry_update(one.learner, drawn(one))[0]
    other = made(*FP32, "optimizer.updates_per_batch=1", "optimizer.micro_batch_tokens=20")
    for name, gradient in dry_update(other.learner, drawn(other))[0].items():
        np.testing.assert_allclose(gradient, whole[name], atol=1e-6, rtol=1e-4, err_msg=name)


def test_logits_in_parts_have_their_own_supports(made: Callable[..., Parts], monkeypatch: pytest.MonkeyPatch) -> None:
    parts = made(*FP32)
    experience = drawn(parts)
    monkeypatch.setattr("mantissa.rl.score._LOGITS_AT_ONCE", 100)
    logp_BR, entropy_BR = parts.learner.score(experience)
    np.testing.assert_allclose(logp_BR, experience.old_logp_BR, atol=1e-6)
    np.testing.assert_allclose(entropy_BR, experience.column("entropy_BR"), atol=1e-6)


@pytest.mark.parametrize(
    "more",
    [
        ("precision=bf16", NUCLEUS, "rollout.slots=5", "optimizer.micro_batch_tokens=40"),
        ("precision=fp32", "rollout.top_k=4", "rollout.temperature=1.3", "algorithm={reference: {}, correction: none}"),
        ("precision=fp8", "rollout.top_k=5", "rollout.top_p=0.9"),
    ],
    ids=["bf16 top-p", "fp32 top-k with a reference", "fp8 both"],
)
def test_exact_kernels_give_both_sides_the_same_bits(train: Train, more: tuple[str, ...]) -> None:
    quick = ("steps=2", "warm_start.steps=6", "warm_start.evaluate_every=6", "task.reward=prefix", "evaluation=null")
    for row in train(*quick, "precision.kernels=exact", *more).metrics.read():
        assert row["exact/mismatched_tokens"] == row["exact/update_mismatched_tokens"] == 0
        assert row["exact/misdrawn_tokens"] == 0
        assert row["exact/checked_tokens"] > 50
        assert row["support/log_mass"] < -0.01
        assert 1 <= row["support/tokens"] < 14


def test_a_reference_of_the_same_weights_is_at_no_distance(made: Callable[..., Parts]) -> None:
    parts = made(*FP32, "algorithm={reference: {}, correction: none}")
    experience = drawn(parts)
    assert parts.reference is not None
    assert torch.equal(parts.reference.score(experience), experience.old_logp_BR)


def test_a_resumed_run_learns_the_same_from_what_was_sampled_ahead(made: Callable[..., Parts]) -> None:
    parts = made(*FP32)
    train = parts.task.split("train", 4)
    samples = parts.sampler.sample(train, 2, parts.sampler.params(6, 1.0, top_p=0.8), 0, 0, "test")
    rewards = parts.sampler.grade(samples)
    batch = Batch(3, 0, 4, list(range(4)), samples, rewards, {}, {})
    tensors, plain = pack([batch])
    vocabulary = parts.model.config.vocab_size
    (again,) = unpack(tensors, plain, train, parts.sampler, vocabulary)
    one, other = (each.experience(torch.device("cpu")) for each in (batch, again))
    assert torch.equal(parts.learner.score(one)[0], parts.learner.score(other)[0])
    tensors["ahead/3/support_counts"][0] += 1
    with pytest.raises(MantissaError, match="support"):
        unpack(tensors, plain, train, parts.sampler, vocabulary)


def dump_of(experience: batches.Scored, learner_BR: Tensor, path: Path) -> Dump:
    """What a trainer would save: the engine's processed log-probs, and those of a learner."""
    sequences = []
    for row in range(len(experience)):
        prompt, length = int(experience.prompt_length_B[row]), int(experience.length_B[row])
        sides = (side[row, : length - prompt].double().numpy() for side in (experience.rollout_logp_BR, learner_BR))
        mask = np.ones(length - prompt, dtype=bool)
        sequences.append(
            Scored(experience.tokens_BT[row, :length].numpy(), prompt, *sides, mask, 0, 0, int(experience.group_B[row]))
        )
    settings = Settings(1.0, 0, 0.8, "processed_logprobs", "fp32", "fp32")
    return Dump("plain", path, sequences, settings)


def test_the_doctor_measures_the_bias_that_ignoring_the_supports_would_cause(
    made: Callable[..., Parts], tmp_path: Path
) -> None:
    """The gap of a learner over the whole vocabulary is the log of the kept mass, and the doctor names the filter."""
    parts = made(*FP32)
    experience = drawn(parts, 24, 4)
    probe = KeptMass(parts.learner)
    scored = experience.with_learner(*parts.learner.score(experience, probe.look(experience)))
    bias = probe.observe(1, scored)["support/log_mass"]
    ignoring_BR, _ = parts.learner.score(replace(experience, support=()))
    dump = dump_of(experience, ignoring_BR, tmp_path)
    figures = examine(dump).figures
    assert abs(figures["d_mean"] - bias) < 1e-6

    scores = Scores(parts.model, dump.sequences, {})
    assert declared(scores, dump.settings) == (Side("fp32"), Side("fp32", top_p=0.8))
    assert declared(scores, replace(dump.settings, renormalised=True)) == (Side("fp32", top_p=0.8),) * 2
    silent = replace(dump.settings, logprobs_mode=None)  # it does not say whose log-probs they are
    base = declared(scores, silent)
    result = substitute(scores, base, hypotheses(scores, *base, silent))
    assert result.causes[0].name == "top-k and top-p in the rollout"
    assert result.explained > 0.999
    whole, cut = scores.all([Side("fp32"), Side("fp32", top_p=0.8)])
    assert abs(float((whole - cut).mean()) - bias) < 1e-6

    healthy = dump_of(experience, experience.old_logp_BR, tmp_path)
    assert abs(examine(healthy).figures["d_mean"]) < 1e-6


def test_what_cannot_keep_the_supports_is_refused_with_the_size_of_the_bias() -> None:
    with pytest.raises(MantissaError, match=r"rollout\.top_p=0\.9 alone: .* top_k too.* up to 0\.105 nats a token"):
        configure("rollout.engine=vllm", "precision=bf16", "rollout.top_p=0.9")
    with pytest.raises(MantissaError, match=r"rollout\.top_k=300: it tells at most 248.* log of the kept mass"):
        configure("rollout.engine=vllm", "precision=bf16", "rollout.top_k=300")
    configure("rollout.engine=vllm", "precision=bf16", "rollout.top_k=20", "rollout.top_p=0.9")
    with pytest.raises(MantissaError, match=r"verl's learner over the whole vocabulary .* up to 0\.223 nats a token"):
        export(configure(NUCLEUS, "precision=bf16"), LaunchOptions())


def test_ignoring_the_supports_is_off_by_the_kept_mass(train: Train) -> None:
    """The same first batch, with the bias in the gap; and where it cannot be, it is refused."""
    quick = ("steps=1", "warm_start.steps=6", "warm_start.evaluate_every=6", "precision=fp32", "evaluation=null")
    (kept,) = train(*quick, NUCLEUS).metrics.read()
    (ignored,) = train(*quick, NUCLEUS, "rollout.support=ignored").metrics.read()
    assert abs(kept["gap/kl"]) < 1e-6
    assert abs(ignored["gap/kl"] + kept["support/log_mass"]) < 1e-6
    assert "support/log_mass" not in ignored
    with pytest.raises(MantissaError, match="support=ignored does nothing without top_k or top_p"):
        configure("rollout.support=ignored")
    with pytest.raises(MantissaError, match=r"kernels=exact with rollout\.support=ignored"):
        configure(NUCLEUS, "rollout.support=ignored", "precision.kernels=exact")


def test_a_response_that_an_abort_left_empty_takes_no_support_from_the_others(made: Callable[..., Parts]) -> None:
    """Interrupted before its first token, of a batch with the most probable tokens too: the others are scored by what
    they were drawn from, and the kept mass is that of the batch without it."""
    parts = made(*FP32, "rollout.slots=3")
    engine, prompts = parts.sampler.engine, [(2, 3), (2, 3), (4,)]
    assert isinstance(engine, NativeEngine)
    params = parts.sampler.params(6, 1.0, top_p=0.8)
    params = replace(params, most_probable=2, stop_token_ids=())
    requests = [Request(prompt, number, 2) for number, prompt in enumerate(prompts)]
    asked = [0]

    def interrupted() -> bool:
        asked[0] += 1
        return asked[0] > 3

    engine.interrupted = interrupted
    groups = engine.generate(requests, params, 0)
    flat = [(number, completion) for number, group in enumerate(groups) for completion in group]
    assert {bool(completion.tokens) for _, completion in flat} == {True, False}
    assert {completion.finish_reason for _, completion in flat} <= {"abort", "length"}
    experience = experience_of(prompts, groups, [float(number % 2) for number in range(6)])
    assert experience.support
    probe = KeptMass(parts.learner)
    scored = experience.with_learner(*parts.learner.score(experience, probe.look(experience)))
    np.testing.assert_allclose(scored.old_logp_BR, experience.rollout_logp_BR, atol=2e-6)
    mass = probe.observe(1, scored)

    rest = experience.select(torch.tensor([row for row, (_, completion) in enumerate(flat) if completion.tokens]))
    again = KeptMass(parts.learner)
    alone = rest.with_learner(*parts.learner.score(rest, again.look(rest)))
    assert mass == pytest.approx(again.observe(1, alone), rel=1e-4)
    none = experience.select(torch.tensor([row for row, (_, completion) in enumerate(flat) if not completion.tokens]))
    empty = none.with_learner(*parts.learner.score(none, probe.look(none)))
    assert probe.observe(1, empty) == {}
