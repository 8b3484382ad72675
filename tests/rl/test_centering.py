"""Score centering in a run: what the engine keeps, the whole gradient against float64, micro-batches, resume, rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiences import dry_update, gradients, hugging_face, of_samples
from mantissa.base.errors import MantissaError
from mantissa.rl.ahead import pack, unpack
from mantissa.rl.assemble import Parts
from mantissa.rl.batch import Batch
from mantissa.rl.experience import Scored
from mantissa.rollout.support import MostProbable
from mantissa.runs.directory import RunDirectory
from small_run import configure

Train = Callable[..., RunDirectory]
FP32 = ("precision=fp32", "warm_start=null", "optimizer.updates_per_batch=1")
CENTRED = "algorithm={loss: {kind: reinforce, centering: 4}, advantage: dr_grpo, correction: token_tis}"


def drawn(parts: Parts, top_p: float = 1.0, seed: int = 3) -> Scored:
    """Completions whose sampler was off: its log-probs, of the tokens and of the most probable ones, are moved."""
    train = parts.task.split("train", 5)
    params = replace(parts.sampler.params(6, 1.0, top_p=top_p), most_probable=4)
    result = parts.sampler.sample(train, 4, params, 0, 0, "test")
    draw = torch.Generator().manual_seed(seed)
    moved = []
    for sample in result:
        top = sample.completion.most_probable
        assert top is not None
        noise = 0.3 * torch.randn(top.logp_TK.shape, generator=draw)
        completion = replace(sample.completion, most_probable=replace(top, logp_TK=top.logp_TK - noise.abs() - 0.02))
        moved.append(replace(sample, completion=completion))
    experience = of_samples(moved, [float(number % 3 == 0) for number in range(len(result))])
    off = torch.where(experience.mask_BR, experience.rollout_logp_BR - 0.1, 0.0)
    experience = replace(experience, rollout_logp_BR=off)
    return experience.with_learner(*parts.learner.score(experience))


def test_the_engine_keeps_the_most_probable_tokens(made: Callable[..., Parts], tmp_path: Path) -> None:
    parts = made(*FP32)
    oracle = hugging_face(parts, tmp_path / "hf")
    params = replace(parts.sampler.params(6, 0.7, top_k=3), most_probable=4)
    for sample in parts.sampler.sample(parts.task.split("train", 3), 2, params, 0, 0, "test"):
        top = sample.completion.most_probable
        assert top is not None
        tokens = torch.tensor([[*sample.prompt, *sample.completion.tokens]])
        with torch.no_grad():
            logits = oracle(tokens).logits[0, len(sample.prompt) - 1 : -1] / 0.7
        best = logits.topk(3, -1)
        assert torch.equal(top.ids_TK[:, :3].long(), best.indices)
        np.testing.assert_allclose(top.logp_TK[:, :3].double(), best.values.log_softmax(-1), atol=1e-5)
        assert bool(top.logp_TK[:, 3].isneginf().all())


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_the_gradient_is_that_of_float64(made: Callable[..., Parts], tmp_path: Path, top_p: float) -> None:
    parts = made(*FP32, CENTRED)
    experience = drawn(parts, top_p)
    found = gradients(parts.learner, experience)
    oracle: Any = hugging_face(parts, tmp_path / "hf")
    total, tokens = torch.zeros((), dtype=torch.float64), int(experience.mask_BR.sum())
    for row in range(len(experience)):
        prompt, length = int(experience.prompt_length_B[row]), int(experience.length_B[row])
        whole = experience.tokens_BT[row, :length]
        group = experience.reward_B[row // 4 * 4 : row // 4 * 4 + 4].double()
        advantage = float(experience.reward_B[row].double() - group.mean())
        logits = oracle(whole[None]).logits[0]
        for place in range(length - prompt):
            at = logits[prompt - 1 + place]
            if experience.support:
                kept = experience.support[row].mask(place, place + 1, len(at))[0]
                at = torch.where(kept, at, -torch.inf)
            logp = at.log_softmax(-1)
            token, rollout = int(whole[prompt + place]), float(experience.rollout_logp_BR[row, place])
            weight = min((logp[token] - rollout).exp().item(), 2.0)
            top = MostProbable(*(experience.column(f"top_{name}_BRK")[row] for name in ("ids", "logp")))
            head = [
                (int(v), float(q))
                for v, q in zip(top.ids_TK[place], top.logp_TK[place].double().exp(), strict=True)
                if q > 0
            ]
            p = logp.detach().exp()
            beyond = (max(1 - sum(q for _, q in head), 1e-6), max(1 - sum(p[v].item() for v, _ in head), 1e-6))
            rho = beyond[0] / beyond[1]
            alpha = rho * min(1 / rho, 2.0)
            held = [(v, q * min(float(p[v]) / q, 2.0) - alpha * float(p[v])) for v, q in head]
            drift = sum(c * logp[v] for v, c in held)
            total = total - advantage * (weight * logp[token] - drift) / tokens
    total.backward()
    for name, parameter in oracle.named_parameters():
        if name in found and parameter.grad is not None:
            np.testing.assert_allclose(found[name].double(), parameter.grad, atol=3e-6, rtol=1e-3, err_msg=name)


def test_the_split_into_micro_batches_does_not_show(made: Callable[..., Parts]) -> None:
    one = made(*FP32, CENTRED)
    whole, update = dry_update(one.learner, drawn(one))
    other = made(*FP32, CENTRED, "optimizer.micro_batch_tokens=20")
    found, again = dry_update(other.learner, drawn(other))
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, whole[name], atol=1e-6, rtol=1e-4, err_msg=name)
    one_size, other_size = (float(each.tallies["policy/centering"].value()) for each in (update, again))
    assert abs(one_size - other_size) < 1e-6
    assert one_size > 1e-3


def test_what_was_sampled_ahead_keeps_them(made: Callable[..., Parts]) -> None:
    parts = made(*FP32, CENTRED)
    train = parts.task.split("train", 4)
    params = replace(parts.sampler.params(6, 1.0), most_probable=4)
    samples = parts.sampler.sample(train, 2, params, 0, 0, "test")
    batch = Batch(3, 0, 4, list(range(4)), samples, parts.sampler.grade(samples), {}, {})
    tensors, plain = pack([batch])
    (again,) = unpack(tensors, plain, train, parts.sampler, parts.model.config.vocab_size)
    one, other = (each.experience(torch.device("cpu")) for each in (batch, again))
    for name in ("top_ids_BRK", "top_logp_BRK"):
        assert torch.equal(one.column(name), other.column(name))
    tensors["ahead/3/top_ids"][0, 0] = -1
    with pytest.raises(MantissaError, match="most probable tokens"):
        unpack(tensors, plain, train, parts.sampler, parts.model.config.vocab_size)


def test_equal_policies_learn_as_without_it(train: Train) -> None:
    """Where the engine's numbers are the learner's there is no drift, and exact kernels say so."""
    quick = ("steps=2", "warm_start.steps=6", "warm_start.evaluate_every=6", "task.reward=prefix", "evaluation=null")
    quick += ("precision=fp32", "precision.kernels=exact", "optimizer.updates_per_batch=1")
    rows = train(*quick, "algorithm={loss: {kind: reinforce, centering: 32}}").metrics.read()
    plain = train(*quick, "algorithm={loss: reinforce}").metrics.read()
    for row, other in zip(rows, plain, strict=True):
        assert row["exact/mismatched_tokens"] == 0
        assert row["policy/centering"] < 1e-5
        assert abs(row["optim/grad_norm"] - other["optim/grad_norm"]) < 1e-4 * other["optim/grad_norm"]


def test_what_it_does_not_go_with_is_refused() -> None:
    with pytest.raises(MantissaError, match=r"centering with correction\.level=sequence"):
        configure("algorithm={loss: {kind: reinforce, centering: 4}, correction: sequence_tis}")
    configure("rollout.engine=vllm", "precision=bf16", CENTRED)
    with pytest.raises(MantissaError, match=r"centering=300: vLLM tells at most 256 tokens"):
        configure("rollout.engine=vllm", "precision=bf16", CENTRED.replace("centering: 4", "centering: 300"))
