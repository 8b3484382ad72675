"""The experts that a rollout's positions pass: noted beside every completion, whatever slots it stood in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mantissa.kernels import Kernels, ModelShapes, plan_exact, resolve, rollout_kernels
from mantissa.model import Decoder, ModelConfig, Recorded
from mantissa.model.config import ExpertsShape
from mantissa.precision import PrecisionPolicy
from mantissa.rollout import Completion, NativeEngine, Request, SamplingParams
from naive_engine import master_model, reference_generate

CONFIG = ModelConfig(
    "qwen2_moe", 40, 32, 56, 3, 4, 2, 8, qkv_bias=True, initializer_range=0.25,
    experts=ExpertsShape(6, 2, 24, True, mlp_only_layers=(1,), shared_expert_intermediate_size=20),
)  # fmt: skip
PARAMS = SamplingParams(max_tokens=12, stop_token_ids=(7,))


def engine_of(precision: object, slots: int, weights: bool = False) -> tuple[NativeEngine, Decoder]:
    resolved, master = resolve(PrecisionPolicy.parse(precision), "cpu"), master_model(CONFIG, 11)
    plan = None
    if resolved.rollout.exact:
        plan = plan_exact(ModelShapes.of(dict(master.named_parameters()), 4, 2, 8, 64, 128), resolved.rollout, "cpu")
    engine = NativeEngine(
        CONFIG, rollout_kernels(resolved, plan), kv_format=resolved.kv_cache.active, slots=slots, max_length=64,
        expert_weights=weights,
    )  # fmt: skip
    engine.sync(dict(master.named_parameters()), 1)
    return engine, master


def sampled(engine: NativeEngine, requests: list[Request]) -> list[tuple[Request, Completion]]:
    groups = engine.generate(requests, PARAMS, 1)
    return [(request, completion) for request, group in zip(requests, groups, strict=True) for completion in group]


def routes_of(model: Decoder, kernels: Kernels, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What one forward of the whole sequence chooses."""
    note = Recorded(with_weights=True)
    positions_1T = torch.arange(len(tokens)).unsqueeze(0)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return kernels.causal_attention(q, k, v)

    with torch.no_grad():
        model.hidden(torch.tensor([tokens]), kernels, positions_1T, attend, note)
    experts, weights = note.take()
    assert weights is not None
    return experts, weights


def test_a_mixture_samples_as_the_naive_engine_does(requests: list[Request]) -> None:
    engine, _ = engine_of("fp32", slots=5)
    expected = reference_generate(engine.model, engine.kernels, engine.kv_format, requests, PARAMS, 1)
    for (_, got), want in zip(sampled(engine, requests), [c for group in expected for c in group], strict=True):
        assert got.tokens == want.tokens
        torch.testing.assert_close(got.logp_T, want.logp_T, atol=2e-5, rtol=0)


@pytest.mark.parametrize("slots", [2, 5, 64])  # samples wait for slots, move between them, or never
def test_exact_kernels_note_what_the_whole_sequence_chooses(requests: list[Request], slots: int) -> None:
    engine, _ = engine_of({"preset": "bf16", "kernels": "exact"}, slots, weights=True)
    for request, completion in sampled(engine, requests):
        positions = [*request.prompt_tokens, *completion.tokens][:-1]
        experts_SLK, weights_SLK = routes_of(engine.model, engine.kernels, positions)
        assert completion.experts_SLK is not None
        assert completion.expert_weights_SLK is not None
        assert completion.experts_SLK.shape == (len(positions), 2, 2)  # one of three layers is dense
        assert torch.equal(completion.experts_SLK, experts_SLK)
        assert torch.equal(completion.expert_weights_SLK, weights_SLK)


def test_what_is_not_asked_for_or_not_there_is_none(build: Callable[..., tuple], requests: list[Request]) -> None:
    engine, _ = engine_of("fp16", slots=8)
    assert all(c.experts_SLK is not None and c.expert_weights_SLK is None for _, c in sampled(engine, requests))
    assert all(c.experts_SLK is None for _, c in sampled(build("qwen3")[0], requests))


def test_an_interrupted_call_says_what_it_had(requests: list[Request]) -> None:
    engine, _ = engine_of("fp32", slots=4)
    steps = iter(range(100))
    engine.interrupted = lambda: next(steps) >= 3
    for request, completion in sampled(engine, requests):
        if completion.tokens:
            assert completion.experts_SLK is not None
            assert len(completion.experts_SLK) == len(request.prompt_tokens) + len(completion.tokens) - 1
        else:
            assert completion.experts_SLK is None
