"""One llama by our decoder and by transformers' own code: both engines and both forwards say the same of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mantissa.adopted import adopt
from mantissa.kernels import NativeKernels, ResolvedRole, resolve
from mantissa.model import Decoder, ModelConfig, byte_tokenizer, load_model, save_model
from mantissa.precision import FP32, PrecisionPolicy
from mantissa.rl.experience import Sequences
from mantissa.rl.score import forward, forward_transformers
from mantissa.rollout import Completion, NativeEngine, Request, SamplingParams
from mantissa.rollout.transformers import (
    PolicyEngine,
    TransformersEngine,
    TransformersPolicy,
    in_role,
    load_transformers,
)

CONFIG = ModelConfig("llama", 258, 32, 56, 2, 4, 2, 8, max_position_embeddings=64, initializer_range=0.25)
REQUESTS = [Request((65, 66, 67), 1, 3), Request((70,), 2, 2), Request(tuple(range(80, 92)), 3, 2)]
TEMPERATURE = 0.8


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """Not here: transformers' own code mixes dtypes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "policy"
    save_model(Decoder(CONFIG).initialize(torch.Generator().manual_seed(5)), byte_tokenizer(), path)
    return path


def sampled(engine: Any, requests: list[Request], params: SamplingParams, version: int = 0) -> list[Completion]:
    groups = engine.generate(requests, params, version)
    assert [len(group) for group in groups] == [request.samples for request in requests]
    return [each for group in groups for each in group]


def role_of(precision: str) -> ResolvedRole:
    return resolve(PrecisionPolicy.parse(precision), "cpu").rollout


def same(one: list[Completion], two: list[Completion]) -> bool:
    pairs = zip(one, two, strict=True)
    return all(a.tokens == b.tokens and torch.equal(a.logp_T, b.logp_T) for a, b in pairs)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "exact bf16"])
@pytest.mark.parametrize("slots", [2, 16])
def test_both_engines_sample_the_same_from_the_same_seeds(folder: Path, precision: str, slots: int) -> None:
    """A learner's policy that the run's engine copies, and the model as a user gives it to the engine by itself."""
    model, role = load_transformers(folder), role_of(precision.removeprefix("exact "))
    adopted = adopt(model, role.active.name, length=64) if precision.startswith("exact") else None
    policy = TransformersPolicy(model, role.active, adopted)
    alone = model if adopted is not None else in_role(copy.deepcopy(model), role)
    params = SamplingParams(12, TEMPERATURE, top_p=0.95, stop_token_ids=(257,))
    plain = TransformersEngine(alone, adopted, slots)
    engine = PolicyEngine(policy, role, slots)
    engine.sync({name: weight.detach() for name, weight in policy.named_parameters()}, 7)
    own = sampled(engine, REQUESTS, params, 7)
    assert same(sampled(plain, REQUESTS, params), own)
    assert {each.policy_version for each in own} == {7}
    assert not same(sampled(plain, [Request((65, 66, 67), 9, 3)], params), own[:3])  # another seed


def test_our_own_engine_samples_the_same_tokens(folder: Path) -> None:
    """In fp32, from the same seeds: sums in another order move a log-prob by rounding, and so hardly ever a token."""
    params = SamplingParams(12, TEMPERATURE, stop_token_ids=(257,))
    theirs = sampled(TransformersEngine(load_transformers(folder)), REQUESTS, params)
    decoder = load_model(folder)
    ours = NativeEngine(decoder.config, NativeKernels(FP32), kv_format=FP32, slots=8, max_length=64)
    ours.sync(dict(decoder.named_parameters()), 0)
    pairs = list(zip(theirs, sampled(ours, REQUESTS, params), strict=True))
    alike = [(one, two) for one, two in pairs if one.tokens == two.tokens]
    assert len(alike) >= len(pairs) - 1
    for one, two in alike:
        assert torch.allclose(one.logp_T, two.logp_T, rtol=0, atol=2e-5)


def scored(logp_N: Tensor, parameters: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and the gradient of their sum by parameter."""
    grads = torch.autograd.grad(logp_N.sum(), list(parameters.values()))
    return logp_N.detach().double(), {name: grad.double() for name, grad in zip(parameters, grads, strict=True)}


def test_both_forwards_are_near_to_float64_and_to_each_other(folder: Path) -> None:
    """Log-probs within 1e-5, their gradients within 1e-5 of the gradient's length, by prompts that are shared too."""
    draw = torch.Generator().manual_seed(1)
    prompts = [[65, 66, 67], [65, 66, 67], [70], list(range(80, 92))]
    answers = [torch.randint(0, 256, (n,), generator=draw).tolist() for n in (5, 9, 1, 7)]
    sequences = Sequences.build(prompts, answers, torch.device("cpu"))
    decoder, model = load_model(folder), load_transformers(folder)
    ours = forward(decoder, NativeKernels(FP32), sequences, TEMPERATURE, entropies=True)
    theirs = forward_transformers(model, sequences, TEMPERATURE, entropies=True)
    assert ours.entropy_N is not None
    assert theirs.entropy_N is not None

    oracle, logps, entropies = copy.deepcopy(model).double(), [], []
    for prompt, answer in zip(prompts, answers, strict=True):  # each alone, without padding
        logits = oracle(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        law = torch.log_softmax(logits / TEMPERATURE, -1)
        logps.append(law.gather(1, torch.tensor(answer)[:, None])[:, 0])
        entropies.append(-(law.exp() * law).sum(-1).detach())
    exact, exact_grads = scored(torch.cat(logps), dict(oracle.named_parameters()))
    found = [
        scored(ours.logp_N, dict(decoder.named_parameters())),
        scored(theirs.logp_N, dict(model.named_parameters())),
    ]
    for logp, grads in found:
        assert torch.allclose(logp, exact, rtol=0, atol=1e-5)
        assert grads.keys() == exact_grads.keys()
        for name, grad in grads.items():
            assert float((grad - exact_grads[name]).norm()) < 1e-5 * float(exact_grads[name].norm()), name
    for forwarded in (ours, theirs):
        assert torch.allclose(forwarded.entropy_N.double(), torch.cat(entropies), rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_a_half_format_both_forwards_are_as_near_to_float64(folder: Path, precision: str) -> None:
    """The error of either is that format's, and neither's is more than twice the other's."""
    sequences = Sequences.build([[65, 66, 67], [70]], [list(range(90, 130)), list(range(20, 60))], torch.device("cpu"))
    decoder, model, role = load_model(folder), load_transformers(folder), role_of(precision)
    with torch.no_grad():
        exact = forward_transformers(copy.deepcopy(model).double(), sequences, TEMPERATURE).logp_N
        ours = forward(decoder, NativeKernels(role.active), sequences, TEMPERATURE).logp_N
        theirs = forward(TransformersPolicy(model, role.active), NativeKernels(role.active), sequences, TEMPERATURE)
    one, two = (float((logp - exact).square().mean().sqrt()) for logp in (ours, theirs.logp_N))
    assert 1e-4 < one < 0.1
    assert 0.5 < one / two < 2
