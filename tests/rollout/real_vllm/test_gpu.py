"""The real vLLM on a GPU, asleep and awake, and in fp8 where the GPU has it. Not yet run on one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mantissa.kernels import resolve, rollout_kernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import PrecisionPolicy
from mantissa.rollout import NativeEngine, Request, SamplingParams, VllmEngine, VllmStart

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]
CONFIG = ModelConfig(
    "qwen3", 512, 256, 512, 2, 4, 2, 64, qk_norm=True, max_position_embeddings=256, initializer_range=0.1
)
PARAMS = SamplingParams(max_tokens=24, temperature=0.8)
REQUESTS = [Request(tuple(range(3, 3 + n)), seed=n, samples=2) for n in (1, 5, 17, 40)]


def masters(seed: int) -> dict[str, Tensor]:
    model = Decoder(CONFIG).initialize(torch.Generator().manual_seed(seed)).to("cuda")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(params=["bf16", "fp16", "fp8-rollout"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[VllmEngine, NativeEngine]]:
    """vLLM that sleeps, and the native engine."""
    if request.param == "fp8-rollout" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("fp8 products in blocks need Hopper")
    device = torch.device("cuda", 0)
    resolved = resolve(PrecisionPolicy.parse(request.param), device)
    formats = (resolved.rollout.active, resolved.logits.active)
    start = VllmStart(
        CONFIG, *formats, 8, 256, device, sleeps=True, cache=resolved.kv_cache.active, fp8=resolved.rollout.fp8
    )
    kernels = rollout_kernels(resolved)
    vllm = VllmEngine(start, kernels)
    native = NativeEngine(CONFIG, kernels, kv_format=resolved.kv_cache.active, slots=8, max_length=256, device=device)
    yield vllm, native
    vllm.close()


def test_it_sleeps_and_wakes_with_the_weights_it_is_sent(engines: tuple[VllmEngine, NativeEngine]) -> None:
    """Asleep the device has more room; awake it samples from the new weights, as the native engine would."""
    vllm, _ = engines
    assert "asleep it gives" in vllm.evidence
    greedy = dataclasses.replace(PARAMS, temperature=0.0)
    first = []
    for version, seed in enumerate((1, 2, 1), 1):
        for engine in engines:
            engine.sync(masters(seed), version)
        awake = torch.cuda.mem_get_info()[0]
        sampled = vllm.generate(REQUESTS, PARAMS, version)
        assert all(sample.logp_T.isfinite().all() for group in sampled for sample in group)
        theirs, ours = (engine.generate(REQUESTS, greedy, version) for engine in engines)
        pairs = [(a.tokens, b.tokens) for x, y in zip(theirs, ours, strict=True) for a, b in zip(x, y, strict=True)]
        same = sum(a == b for left, right in pairs for a, b in zip(left, right, strict=False))
        assert same > 0.5 * sum(len(left) for left, _ in pairs)  # until rounding first turns one, all are equal
        first.append([left for left, _ in pairs])
        vllm.sleep()
        assert torch.cuda.mem_get_info()[0] > awake
    assert first[0] != first[1]
