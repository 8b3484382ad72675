"""Copies of a policy that only samples: projections of one input as one product, and int8 codes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mantissa.base.errors import MantissaError
from mantissa.kernels import (
    ModelShapes,
    NativeKernels,
    SimulatedKernels,
    cpu,
    learner_kernels,
    plan_exact,
    probe,
    resolve,
    rollout_kernels,
)
from mantissa.kernels.interface import Kernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import BF16, FP16, FP32, PrecisionPolicy, Quantized
from mantissa.rollout import CopiedPolicy

WIDE = ModelConfig("qwen2", 64, 512, 384, 1, 4, 2, 128, qkv_bias=True, tie_word_embeddings=True)
NORMED = dataclasses.replace(WIDE, family="qwen3", qkv_bias=False, qk_norm=True)
INT8 = Quantized(scheme="int8")
KERNELS: dict[str, Kernels] = {
    "fp32": NativeKernels(FP32),
    "fp16": SimulatedKernels(FP16, weights_on_grid=True),
    "bf16": NativeKernels(BF16),
    "int8": NativeKernels(BF16, fp8=INT8),
}


@pytest.fixture(autouse=True)
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined whatever the processor: of bf16 where its library has such products."""
    own = cpu.measured().ratio < float("inf")
    monkeypatch.setattr(cpu, "products", lambda: cpu.CpuProducts(0.5 if own else 1.0, 0.5))


def masters(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(p.shape, generator=generator) / 16 for name, p in Decoder(config).named_parameters()}


def copy(config: ModelConfig, kernels: Kernels, pack: bool) -> CopiedPolicy:
    return CopiedPolicy(config, kernels, "cpu", "sync", pack=pack)


@pytest.mark.parametrize("config", [WIDE, NORMED])
@pytest.mark.parametrize("name", KERNELS)
@torch.no_grad()
def test_joined_projections_hold_and_give_what_each_alone_does(config: ModelConfig, name: str) -> None:
    kernels, weights = KERNELS[name], masters(config)
    alone, joined = copy(config, kernels, False), copy(config, kernels, True)
    for policy in (alone, joined):
        policy.take(weights)
    laid = kernels.dtype is torch.float32 or "bf16" in cpu.products().own
    if torch.backends.mkldnn.is_available() and laid:
        layer = joined.decoder.model.layers[0]
        assert layer.self_attn.joined is not None
        assert layer.self_attn.joined.widths == (512, 256, 256)
        assert (layer.self_attn.joined.bias is None) == (config is NORMED)
        assert layer.mlp.joined is not None
    kept, expected = joined.weights, alone.weights
    assert kept.keys() == expected.keys()
    for key, value in kept.items():
        assert torch.equal(value, expected[key].to(value.dtype)), key
    tokens = torch.arange(12).view(2, 6)
    outs = [policy.decoder(tokens, kernels).float() for policy in (alone, joined)]
    assert outs[0].abs().max() > 0.2
    assert (outs[0] - outs[1]).abs().max() <= 16 * kernels.format.epsilon * outs[0].abs().max()


@pytest.mark.parametrize("backend", ["simulated", "auto"])
@torch.no_grad()
def test_exact_kernels_multiply_the_learners_shapes_and_no_joined_one(backend: str) -> None:
    """Only those were proven; of packed weights too, where the plan is of oneDNN's products."""
    precision = resolve(PrecisionPolicy.parse({"preset": "bf16", "kernels": "exact", "backend": backend}), "cpu")
    weights = masters(NORMED)
    plan = plan_exact(ModelShapes.of(weights, 4, 2, 128, 64, 64), precision.learner, "cpu")
    laid = copy(NORMED, rollout_kernels(precision, plan), True)
    laid.take(weights)
    assert laid.decoder.model.layers[0].self_attn.joined is None
    if backend == "auto" and "bf16" in cpu.products().own:
        weight = laid.decoder.model.layers[0].self_attn.q_proj.weight
        assert (weight.is_mkldnn, weight.dtype) == (True, torch.bfloat16)
    learner = Decoder(NORMED)
    learner.load_state_dict(weights)
    tokens_BT = torch.randint(0, 64, (2, 9))
    assert torch.equal(laid.decoder(tokens_BT, laid.kernels), learner(tokens_BT, learner_kernels(precision, plan)))


@pytest.mark.parametrize("name", KERNELS)
def test_a_copy_that_failed_holds_nothing_and_can_be_made_again(name: str) -> None:
    policy, weights = copy(WIDE, KERNELS[name], True), masters(WIDE)
    policy.take(weights)
    bad = weights | {"model.layers.0.self_attn.v_proj.weight": torch.full((256, 512), float("nan"))}
    with pytest.raises(MantissaError, match=r"v_proj\.weight holds nan"):
        policy.take(bad)
    with pytest.raises(MantissaError, match="is missing"):
        policy.take({name: weights[name] for name in list(weights)[:-1]})
    kept, weight = policy.weights, "model.layers.0.self_attn.q_proj.weight"
    assert kept.get(f"{weight}.scales", kept[weight]).isnan().all()  # codes that are integers are told by their scales
    policy.take(weights)
    assert policy.weights["model.norm.weight"].isfinite().all()


def test_bf16_logits_are_the_processors_own_product() -> None:
    """One rounding of an fp32 sum, as of the widened product, but two bytes a weight."""
    weights = masters(dataclasses.replace(WIDE, vocab_size=256))
    x = (torch.randn(5, 512, generator=torch.Generator().manual_seed(0))).bfloat16()
    logits = {}
    for fmt in (FP32, BF16):
        kernels = NativeKernels(BF16, logits_format=fmt)
        policy = copy(dataclasses.replace(WIDE, vocab_size=256), kernels, True)
        policy.take(weights)
        logits[fmt.name] = policy.decoder.logits(x, kernels)
        if policy.decoder.packed_head is not None and "bf16" in cpu.products().own:
            assert policy.decoder.packed_head.dtype is (torch.float32 if fmt is FP32 else torch.bfloat16)
    oracle = x.double() @ weights["model.embed_tokens.weight"].bfloat16().double().t()
    assert (logits["fp32"].double() - oracle).abs().max() < 1e-5 * oracle.abs().max()
    assert logits["bf16"].dtype is torch.float32
    assert (logits["bf16"].double() - oracle).abs().max() <= 2**-8 * oracle.abs().max()
    assert torch.equal(logits["bf16"], logits["bf16"].bfloat16().float())


def test_int8_codes_are_proved_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu.measured().int8_ratio < float("inf"):
        assert "adds 256 of its largest products" in probe(KERNELS["int8"], "cpu")
    saturated = torch.full((128, 256), 2**15, dtype=torch.int32)
    monkeypatch.setattr(torch, "_int_mm", lambda x, w: saturated)
    with pytest.raises(MantissaError, match="int8 is not active"):
        probe(KERNELS["int8"], "cpu")


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_no_copy_is_ever_trained(name: str, pack: bool) -> None:
    """Before weights lie in it and after, in whatever layout: a copy that took gradients would keep graphs alive."""
    policy = copy(WIDE, KERNELS[name], pack)
    for _ in range(2):
        policy.take(masters(WIDE))
        assert [name for name, each in policy.decoder.named_parameters() if each.requires_grad] == []
