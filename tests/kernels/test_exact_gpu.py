"""The exact family on a GPU: decoded log-probs are the trained ones bit by bit; fp8 layers; gradients; the probe.

On a GPU, or interpreted on a CPU with TRITON_INTERPRET=1: there ``dot`` is numpy's, so equality shows that nothing but
a row and its prefix enters a row's masks and places, and not how a tensor core sums.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from mantissa.base.errors import MantissaError
from mantissa.kernels import ModelShapes, NativeKernels, check_invariance, probe
from mantissa.kernels import exact_probe as probe_module
from mantissa.kernels.exact.gpu import ExactGpuKernels
from mantissa.model import Decoder, ModelConfig
from mantissa.model.decoder import Projection
from mantissa.precision import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    BF16,
    E4M3,
    FP16,
    FP32,
    SQUARE,
    BlockScaled,
    Fp8Policy,
    NumberFormat,
    dequantize,
    quantize,
    round_cached,
)
from mantissa.rollout.engine import NativeEngine
from mantissa.rollout.sampling import Request, SamplingParams
from triton_interpreter import DEVICE, INTERPRETED, needs_a_device

pytestmark = needs_a_device
formats = pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=str)
LAYER = "model.layers.0.mlp.up_proj"


def model_of(family: str = "qwen3") -> Decoder:
    config = ModelConfig(
        family,  # type: ignore[arg-type]
        vocab_size=50,
        hidden_size=48,
        intermediate_size=136,  # more than one block of 128, and no multiple of it
        num_hidden_layers=1 if INTERPRETED else 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        initializer_range=0.3,
    )
    return Decoder(config).initialize(torch.Generator().manual_seed(2)).to(DEVICE)


def copy_of(model: Decoder, kernels: ExactGpuKernels) -> Decoder:
    """What a rollout holds: each master rounded once, or quantised once into codes and scales."""
    copy = Decoder(model.config).requires_grad_(False)
    for (name, module), source in zip(copy.named_modules(), model.modules(), strict=True):
        for leaf, master in source.named_parameters(recurse=False):
            named = name if isinstance(module, Projection) and leaf == "weight" else ""
            held = kernels.copied(master, named)
            if isinstance(held, BlockScaled):
                module.scales, held = held.scales, held.codes
            setattr(module, leaf, nn.Parameter(held.to(DEVICE), requires_grad=False))
    return copy


class Rows:
    """Sequences that are decoded over caches of their own, some at a time, in any order."""

    def __init__(self, model: Decoder, kernels: ExactGpuKernels, rows: int, capacity: int) -> None:
        config = model.config
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, capacity, config.head_dim)
        self.model, self.kernels = model, kernels
        self.keys, self.values = (torch.zeros(shape, dtype=kernels.dtype, device=DEVICE) for _ in range(2))
        self.length = torch.zeros(rows, dtype=torch.int64)

    def step(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Logits after the next token of each of ``rows``."""
        length, positions = self.length[rows] + 1, self.length[rows].to(DEVICE)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for held, new in ((self.keys, k), (self.values, v)):
                held[layer, rows, :, self.length[rows]] = round_cached(new[:, :, 0], self.kernels.kv_format)
            used = int(length.max())
            k, v = self.keys[layer, rows, :, :used], self.values[layer, rows, :, :used]
            return self.kernels.cached_attention(q[:, :, 0], k, v, length.to(DEVICE)).unsqueeze(2)

        hidden = self.model.hidden(tokens.to(DEVICE).unsqueeze(1), self.kernels, positions.unsqueeze(1), attend)
        self.length[rows] += 1
        return self.model.logits(hidden[:, 0], self.kernels)


CASES: dict[str, tuple[NumberFormat, dict[str, Any], str]] = {
    "fp32": (FP32, {}, "qwen3"),
    "bf16": (BF16, {}, "qwen2"),
    "fp16": (FP16, {}, "llama"),
    "fp16, bf16 cache": (FP16, {"kv_format": BF16}, "qwen3"),
    "fp8": (BF16, {"fp8": Fp8Policy()}, "qwen2"),
    "fp8, powers of two": (FP16, {"fp8": Fp8Policy(base="fp16", scale="power_of_two")}, "qwen3"),
    "fp8 and fp8 cache": (BF16, {"fp8": Fp8Policy(exclude=("down_proj",)), "kv_format": E4M3}, "qwen3"),
}


@pytest.mark.parametrize("case", CASES)
def test_decoded_logits_are_the_learner_s(case: str) -> None:
    """Every position of every sequence, decoded in ever other company, against one forward with autograd on."""
    fmt, options, family = CASES[case]
    kernels, model = ExactGpuKernels(fmt, **options), model_of(family)
    rows, length = (3, 6) if INTERPRETED else (12, 90)
    tokens = torch.randint(0, 50, (rows, length))
    trained = model.logits(model(tokens.to(DEVICE), kernels), kernels)
    assert trained.requires_grad
    policy = Rows(copy_of(model, kernels), kernels, rows, length)
    generator, compared = torch.Generator().manual_seed(3), 0
    with torch.no_grad():
        while int(policy.length.min()) < length:
            waiting = (policy.length < length).nonzero().squeeze(1)
            order = torch.randperm(len(waiting), generator=generator)
            chosen = waiting[order[: int(torch.randint(1, len(waiting) + 1, (), generator=generator))]]
            at = policy.length[chosen]
            decoded = policy.step(chosen, tokens[chosen, at])
            assert torch.equal(decoded, trained[chosen, at].detach())
            compared += len(chosen)
    assert compared == rows * length


@pytest.mark.parametrize("change", ["gate", "attention", "norm", "head"])
def test_one_operation_of_another_family_is_noticed(change: str) -> None:
    """The comparison can fail: one operation of the fast family on one side only, in fp32."""
    model, exact = model_of(), ExactGpuKernels(FP32)
    tokens = torch.randint(0, 50, (3, 12)).to(DEVICE)
    other, fast = ExactGpuKernels(FP32), NativeKernels(FP32)
    replaced = {
        "gate": ("swiglu", fast.swiglu),
        "attention": ("causal_attention", fast.causal_attention),
        "norm": ("rms_norm", fast.rms_norm),
        "head": ("logits", lambda x, w: NativeKernels(BF16).logits(x.bfloat16(), w)),
    }
    setattr(other, *replaced[change])
    with torch.no_grad():
        ours, theirs = (model.logits(model(tokens, family), family) for family in (exact, other))
    assert not torch.equal(ours, theirs)
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.2)  # and it is the same model


@pytest.mark.parametrize("fmt", [FP32, BF16], ids=str)
def test_the_engine_s_log_probs_are_the_learner_s(fmt: NumberFormat) -> None:
    """Continuous batching: ragged prompts, shared prefill, fewer slots than samples."""
    kernels, model = ExactGpuKernels(fmt), model_of()
    engine = NativeEngine(model.config, kernels, kv_format=fmt, slots=3, max_length=40, device=DEVICE)
    engine.sync(dict(model.named_parameters()), version=0)
    requests = [Request(prompt, seed=i, samples=2) for i, prompt in enumerate([(3, 4, 5), (7,), (9, 8, 7, 6, 5, 4)])]
    results = engine.generate(requests, SamplingParams(max_tokens=4, temperature=0.8), version=0)
    compared = 0
    for request, completions in zip(requests, results, strict=True):
        for completion in completions:
            tokens = torch.tensor([[*request.prompt_tokens, *completion.tokens]], device=DEVICE)
            with torch.no_grad():
                logits = model.logits(model(tokens, kernels)[0], kernels)
            start = len(request.prompt_tokens)
            logp = kernels.token_logprob(logits[start - 1 : -1], tokens[0, start:], 0.8).cpu()
            assert torch.equal(logp, completion.logp_T)
            compared += len(logp)
    assert compared == 3 * 2 * 4


SHAPES = ModelShapes((("q_proj", 48, 64), ("lm_head", 48, 50)), 4, 2, 16, 50, length=70, rows=64)


@pytest.mark.parametrize("fault", ["", "linear", "logits", "rms_norm", "swiglu", "token_logprob", "attention"])
def test_the_invariance_probe(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes the family, and names each operation that looks at how many rows there are."""
    if INTERPRETED:
        monkeypatch.setattr(probe_module, "ROWS", (1, 5))
    kernels = ExactGpuKernels(FP32)
    name = "cached_attention" if fault == "attention" else fault
    if fault:
        sound = getattr(kernels, name)

        def by_rows(x: Tensor, *others: Any) -> Tensor:
            out = sound(x, *others)
            few = fault == "attention" or len(x) < 4
            return torch.nextafter(out, out + 1) if few else out

        monkeypatch.setattr(kernels, name, by_rows)
    if not fault:
        assert check_invariance(kernels, SHAPES, DEVICE).startswith("row-invariant: q_proj 48x64, lm_head 48x50, rms")
        return
    said = {"linear": "q_proj 48x64", "logits": "lm_head 48x50"}.get(fault, fault)
    with pytest.raises(MantissaError, match=f"on this GPU {said}"):
        check_invariance(kernels, SHAPES, DEVICE)


@formats
def test_the_probe_accepts_the_family(fmt: NumberFormat) -> None:
    evidence = probe(ExactGpuKernels(fmt), DEVICE)
    assert "keeps 1+u" in evidence
    assert fmt is FP32 or "accumulates wider than it stores" in evidence


def test_keys_and_values_are_rounded_as_the_cache_rounds_them() -> None:
    """In a whole sequence too; the gradient passes straight through the rounding."""
    q, k, v = (torch.randn(1, h, 9, 16, device=DEVICE).half() for h in (4, 2, 2))
    rounded = [round_cached(x, E4M3) for x in (k, v)]
    assert not torch.equal(rounded[0], k)
    with_cache, without = ExactGpuKernels(FP16, kv_format=E4M3), ExactGpuKernels(FP16)
    assert torch.equal(with_cache.causal_attention(q, k, v), without.causal_attention(q, *rounded))
    leaves, plain = ([x.clone().requires_grad_() for x in xs] for xs in ((q, k, v), (q, *rounded)))
    ours = torch.autograd.grad(with_cache.causal_attention(*leaves).sum(), leaves)
    theirs = torch.autograd.grad(without.causal_attention(*plain).sum(), plain)
    slack = 0.0 if INTERPRETED else 4 * FP16.epsilon  # a GPU's flash backward adds up in any order
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=slack, atol=slack)


# ---- fp8


@pytest.mark.parametrize("scale", ["fp32", "power_of_two"])
@pytest.mark.parametrize("base", [BF16, FP16], ids=str)
def test_an_fp8_layer_against_float64(base: NumberFormat, scale: Any) -> None:
    """From the master and from the copy, which give the same bits; ragged in every dimension."""
    family = NativeKernels(base, fp8=Fp8Policy(base=base.name, scale=scale))  # type: ignore[arg-type]
    x, master, bias = torch.randn(3, 11, 200).to(base.dtype), torch.randn(140, 200), torch.randn(140)
    given = [t.to(DEVICE) for t in (x, master, bias)]
    out = family.linear(*given, LAYER)
    copy = family.copied(given[1], LAYER)
    assert isinstance(copy, BlockScaled)
    assert torch.equal(family.linear(given[0], copy, family.copied(given[2]), LAYER), out)
    power = scale == "power_of_two"
    operands = (quantize(x.reshape(33, 200), E4M3, ALONG_ROWS, power), quantize(master, E4M3, SQUARE, power))
    assert torch.equal(copy.codes.cpu().float(), operands[1].codes.float())
    a, w = (dequantize(q, block).double() for q, block in zip(operands, (ALONG_ROWS, SQUARE), strict=True))
    exact, terms = a @ w.t() + bias.to(base.dtype).double(), a.abs() @ w.abs().t()
    error = (out.cpu().double().view(33, 140) - exact).abs()
    assert bool((error <= base.epsilon / 2 * exact.abs() + 2.0 ** (-20 if INTERPRETED else -12) * (terms + 1)).all())
    unquantised = x.double().view(33, 200) @ master.double().t()
    assert (error < (unquantised - exact).abs()).double().mean() > 0.9  # the codes are what was multiplied


@pytest.mark.parametrize("backward", ["e4m3", "e5m2", "high"])
@pytest.mark.parametrize("base", [BF16, FP16], ids=str)
def test_fp8_gradients_against_float64(base: NumberFormat, backward: Any) -> None:
    fp8 = Fp8Policy(base=base.name, backward=backward)  # type: ignore[arg-type]
    x, master, bias = torch.randn(150, 200).to(base.dtype), torch.randn(140, 200), torch.randn(140)
    seed = torch.randn(150, 140).to(base.dtype)
    leaves = [t.to(DEVICE).requires_grad_() for t in (x, master, bias)]
    out = NativeKernels(base, fp8=fp8).linear(*leaves, LAYER)
    got = [g.cpu() for g in torch.autograd.grad(out, leaves, seed.to(DEVICE))]
    assert [g.dtype for g in got] == [base.dtype, torch.float32, torch.float32]
    weight = dequantize(quantize(master, E4M3, SQUARE), SQUARE)
    fmt = fp8.backward_format
    if fmt is None:
        by_row, by_column, x_wide, weight = seed.double(), seed.double(), x.double(), weight.to(base.dtype)
    else:
        by_row = dequantize(quantize(seed, fmt, ALONG_ROWS), ALONG_ROWS).double()
        by_column = dequantize(quantize(seed, fmt, ALONG_COLUMNS), ALONG_COLUMNS).double()
        x_wide = dequantize(quantize(x, E4M3, ALONG_COLUMNS), ALONG_COLUMNS).double()
    expected = [
        (by_row @ weight.double(), by_row.abs() @ weight.double().abs()),
        (by_column.t() @ x_wide, by_column.abs().t() @ x_wide.abs()),
        (seed.double().sum(0), seed.double().abs().sum(0)),
    ]
    for ours, (exact, terms) in zip(got, expected, strict=True):
        bound = base.epsilon * exact.abs() + (2.0**-18 if INTERPRETED else 2.0**-11) * terms
        if ours.dim() == 1:
            bound += base.epsilon * terms  # torch's own sum of halves
        assert bool(((ours.double() - exact).abs() <= bound).all())


def test_a_gradient_that_overflowed_never_looks_finite() -> None:
    """fp16: inf in one gradient makes its block of 128 NaN, and with it the row of dx and the column of dW."""
    family = NativeKernels(FP16, fp8=Fp8Policy(base="fp16"))
    x = torch.randn(4, 200).half().to(DEVICE).requires_grad_()
    master = torch.randn(300, 200).to(DEVICE).requires_grad_()
    seed = torch.ones(4, 300).half()
    seed[2, 5] = float("inf")
    grad_x, grad_w = torch.autograd.grad(family.linear(x, master, None, LAYER), (x, master), seed.to(DEVICE))
    assert grad_x.isnan().all(1).tolist() == [False, False, True, False]
    assert grad_w[5].isnan().all()
    assert int(grad_w.isnan().any(1).sum()) == 1
    assert int(grad_x.isfinite().all(1).sum()) == 3
