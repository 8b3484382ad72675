"""A rollout in fp8 on the real vLLM: our codes through its loader, its products held to the native engine's.

On a CPU its own kernels have no such product, so a plain one is lent to it (``vllm_fp8_worker.py``); its quantiser of
activations is its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mantissa.base.errors import MantissaError
from mantissa.kernels import Kernels, SimulatedKernels, resolve, rollout_kernels
from mantissa.model import Decoder
from mantissa.precision import FP16, FP32, PrecisionPolicy
from mantissa.rollout import Completion, CopiedPolicy, Request, SamplingParams, VllmEngine, VllmStart
from naive_engine import reference_gaps, reference_logp

pytestmark = pytest.mark.vllm
PARAMS = SamplingParams(max_tokens=20, temperature=0.7, stop_token_ids=(3,))
ON_FP16 = {"rollout": "fp8", "fp8": {"base": "fp16"}}
PART = {"rollout": "fp8", "kv_cache": "fp8", "fp8": {"base": "bf16", "exclude": ["layers.0.mlp", "o_proj"]}}
HALF = SimulatedKernels(FP16, FP32, weights_on_grid=True)  # the weights' fp8 values by activations in half


def policy(pair: Any, kernels: Kernels, model: Decoder) -> Any:
    """``model`` by ``kernels``, as an engine of this policy."""
    return SimpleNamespace(model=model, kernels=kernels, kv_format=pair.native.kv_format)


def gap(pair: Any, kernels: Kernels, model: Decoder, requests: list[Request], groups: list[list[Completion]]) -> float:
    """Mean |vLLM's log-prob less that of ``model``, computed by ``kernels``|."""
    return float(reference_gaps(policy(pair, kernels, model), requests, groups, PARAMS.temperature).abs().mean())


def test_a_policy_in_fp8_is_loaded_again_and_again(pair_of: Callable[..., Any], requests: list[Request]) -> None:
    """Codes and scales are read back at every sync; the log-probs are those of the last one's products."""
    pair = pair_of("llama-blocks", ON_FP16)
    assert "float16, products of e4m3 in 1x128 and e4m3 in 128x128 by PlainProduct, head" in pair.vllm.evidence
    assert "; 35 tensors read back as sent" in pair.vllm.evidence  # 14 matrices and their scales, 5 norms, 2 of tokens
    for seed in (5, 6):
        pair.sync(seed)
        groups = pair.vllm.generate(requests, PARAMS, pair.version)
        unquantised = CopiedPolicy(pair.native.config, HALF, "cpu", "half")
        unquantised.take(pair.masters(seed))
        native, kernels = pair.native.model, pair.native.kernels
        in_fp8, weights_alone, in_half = (
            gap(pair, by, of, requests, groups)
            for by, of in ((kernels, native), (HALF, native), (HALF, unquantised.decoder))
        )
        # Seen: 0.050, 0.079, 0.116. The first is what half an ulp of fp16 does to a policy whose activations are
        # rounded to e4m3: 0.04 where the embedding is moved by that much.
        assert 0.005 < in_fp8 < 0.85 * weights_alone < 0.85 * 0.95 * in_half < 0.5


def test_greedy_tokens_are_the_native_policys(pair_of: Callable[..., Any], requests: list[Request]) -> None:
    """After vLLM's own tokens; two that are as likely as each other may change places."""
    pair = pair_of("llama-blocks", ON_FP16)
    pair.sync(4)
    theirs = pair.vllm.generate(requests, dataclasses.replace(PARAMS, temperature=0.0), pair.version)
    behind = []
    for request, (sample, *_) in zip(requests, theirs, strict=True):
        logp_TV = reference_logp(pair.native, request.prompt_tokens, sample.tokens, PARAMS.temperature)
        picked = logp_TV.gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]
        behind.append(logp_TV.amax(-1) - picked)
    behind_N = torch.cat(behind)
    assert (behind_N == 0).double().mean() > 0.9
    assert behind_N.max() < 0.4


def test_each_product_is_the_native_kernels(pair_of: Callable[..., Any]) -> None:
    """Of the same activations: equal but for the order of a sum, so nearly always to the bit."""
    pair = pair_of("llama-blocks", ON_FP16)
    pair.sync(7)
    generator = torch.Generator().manual_seed(1)
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        parent, _, last = f"model.layers.1.{name}".rpartition(".")
        names = [f"{parent}.{part}" for part in fused.get(last, [last])]
        layers = {name: pair.native.model.get_submodule(name) for name in names}
        inputs = next(iter(layers.values())).weight.shape[1]
        x_NE = torch.randn(24, inputs, generator=generator) * torch.logspace(-2, 2, 24)[:, None]
        x_NE = x_NE.half().float()
        found = torch.tensor(pair.vllm._link.call("product", layer=f"{parent}.{last}", rows=x_NE.tolist()))
        by_fp8, by_half = (
            torch.cat([kernels.linear(x_NE, module.weight, None, part) for part, module in layers.items()], -1)
            for kernels in (pair.native.kernels, HALF)
        )
        apart = (found - by_fp8).abs() / by_fp8.abs().amax(-1, keepdim=True)
        assert (apart > 0).float().mean() < 0.02, name
        assert apart.max() < 2.0**-10
        assert ((found - by_half).abs() / by_half.abs().amax(-1, keepdim=True)).mean() > 2.0**-9


def test_what_is_left_out_of_fp8_and_a_cache_in_it(pair_of: Callable[..., Any], requests: list[Request]) -> None:
    """Biases, a tied head, layers in the base, and the cache as well."""
    pair = pair_of("qwen2-blocks", PART)
    assert "cache fp8_e4m3 of scale 1" in pair.vllm.evidence
    assert "; 36 tensors read back as sent" in pair.vllm.evidence  # 5 matrices fewer have scales than qwen2's 41
    for seed in (8, 9):
        pair.sync(seed)
        groups = pair.vllm.generate(requests, PARAMS, pair.version)
        assert gap(pair, pair.native.kernels, pair.native.model, requests, groups) < 0.5


def test_products_by_activations_in_half_are_refused(
    pair_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's own kernel for AMX has them: another computation than was asked for."""
    resolved = resolve(PrecisionPolicy.parse(ON_FP16), "cpu")
    config = pair_of("llama-blocks", ON_FP16).native.config
    start = VllmStart(config, FP16, FP32, 4, 64, torch.device("cpu"), fp8=resolved.rollout.fp8)
    with pytest.raises(MantissaError, match=r"precision\.rollout=fp8 .* on a CPU vLLM leaves activations in half"):
        VllmEngine(start, rollout_kernels(resolved))
    monkeypatch.setenv("MANTISSA_TEST_HALF_PRODUCTS", "1")
    monkeypatch.setattr("mantissa.rollout.vllm.server.EXTENSION", "vllm_fp8_worker.WithProducts")
    monkeypatch.setattr("mantissa.rollout.vllm.worker.device_problem", lambda device: None)
    with pytest.raises(MantissaError, match="runs with HalfProduct, which takes activations in half"):
        VllmEngine(dataclasses.replace(start), rollout_kernels(resolved))
