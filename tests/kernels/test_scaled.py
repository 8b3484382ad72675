"""The simulated fp8 linear map against numpy's quantisation and float64's products, forward and backward."""

from __future__ import annotations

import dataclasses
import importlib.util
import re

import pytest
import torch
from torch import Tensor

import block_reference as reference
from mantissa.base.errors import MantissaError
from mantissa.kernels import NativeKernels, SimulatedKernels, cpu, learner_kernels, probe, resolve
from mantissa.model.config import ModelConfig
from mantissa.model.decoder import Decoder
from mantissa.precision import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    BF16,
    FP16,
    SQUARE,
    Fp8Policy,
    NumberFormat,
    PrecisionPolicy,
    Quantized,
    is_on_grid,
    round_to_format,
)

LAYER = "model.layers.1.mlp.up_proj"
bases = pytest.mark.parametrize("base", [BF16, FP16], ids=str)
scales = pytest.mark.parametrize("scale", ["fp32", "power_of_two"])
# Every pair of a base, a gradient's format and a kind of scale.
variants = pytest.mark.parametrize(
    ("base", "backward", "scale"),
    [
        (BF16, "e4m3", "fp32"), (FP16, "e4m3", "power_of_two"), (BF16, "e5m2", "power_of_two"), (FP16, "e5m2", "fp32"),
        (BF16, "high", "fp32"), (FP16, "high", "power_of_two"),
    ],
    ids=str,
)  # fmt: skip


def kernels_of(base: NumberFormat, **fields: object) -> SimulatedKernels:
    return SimulatedKernels(base, fp8=Fp8Policy(base=base.name, **fields))  # type: ignore[arg-type]


def values(x: Tensor, fmt: str, block: tuple[int, int], power_of_two: bool) -> Tensor:
    return torch.from_numpy(reference.values(x.detach().numpy(), fmt, block, power_of_two))


class Recording(SimulatedKernels):
    """Keeps the operands of the forward product."""

    operands: tuple[Tensor, Tensor]

    def product(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        self.operands = x_NE.clone(), weight_FE.clone()
        return super().product(x_NE, weight_FE, bias_F)


@scales
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [((256,), 128, 256), ((3, 7), 200, 130), ((2,), 64, 48)])
def test_forward_operands_are_the_references_codes(
    rows: tuple[int, ...], inputs: int, outputs: int, scale: str
) -> None:
    fp8 = Fp8Policy(scale=scale)  # type: ignore[arg-type]
    x, master = round_to_format(torch.randn(*rows, inputs), BF16), torch.randn(outputs, inputs) * 0.05
    learner, rollout = Recording(BF16, fp8=fp8), Recording(BF16, weights_on_grid=True, fp8=fp8)
    copy = rollout.copied(master, LAYER)
    assert isinstance(copy, Tensor)
    out = learner.linear(x, master, None, LAYER)
    assert torch.equal(rollout.linear(x, copy, None, LAYER), out)
    for x_operand, w_operand in (learner.operands, rollout.operands):
        assert torch.equal(x_operand, values(x, "e4m3", ALONG_ROWS, fp8.power_of_two))
        assert torch.equal(w_operand, values(master, "e4m3", SQUARE, fp8.power_of_two))
    assert bool(is_on_grid(out, BF16).all())


@variants
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [((2, 70), 200, 136), ((), 40, 300)], ids=str)
def test_the_three_products_against_float64(
    rows: tuple[int, ...], inputs: int, outputs: int, base: NumberFormat, backward: str, scale: str
) -> None:
    kernels, power_of_two = kernels_of(base, backward=backward, scale=scale), scale == "power_of_two"
    x = round_to_format(torch.randn(*rows, inputs), base).requires_grad_()
    master = (torch.randn(outputs, inputs) * 0.1).requires_grad_()
    bias = torch.randn(outputs, requires_grad=True)
    seed = torch.randn(*rows, outputs)  # off the grid: it is rounded before anything else

    out = kernels.linear(x, master, bias, LAYER)
    got = (out, *torch.autograd.grad(out, (x, master, bias), seed))

    flat_x, g = x.detach().reshape(-1, inputs), round_to_format(seed, base).reshape(-1, outputs)
    w = values(master, "e4m3", SQUARE, power_of_two).double()
    g_rows = g_columns = g
    x_columns = flat_x
    if backward != "high":
        g_rows = values(g, backward, ALONG_ROWS, power_of_two)
        g_columns = values(g, backward, ALONG_COLUMNS, power_of_two)
        x_columns = values(flat_x, "e4m3", ALONG_COLUMNS, power_of_two)
    x_rows = values(flat_x, "e4m3", ALONG_ROWS, power_of_two).double()
    b = round_to_format(bias.detach(), base).double()
    one = torch.ones(1, g.shape[0], dtype=torch.float64)
    pairs = [(x_rows, w.t()), (g_rows.double(), w), (g_columns.double().t(), x_columns.double()), (one, g.double())]
    for index, (result, (left, right)) in enumerate(zip(got, pairs, strict=True)):
        added = b if index == 0 else torch.zeros_like(right[0])
        exact = (left @ right + added).reshape(result.shape)
        terms = (left.abs() @ right.abs() + added.abs()).reshape(result.shape)
        error = (result.detach().double() - exact).abs()
        assert bool((error <= base.epsilon / 2 * exact.abs() + 2.0**-20 * terms + base.smallest_subnormal).all())
        assert bool(is_on_grid(result, base).all())
        assert result.dtype == torch.float32


@variants
def test_backward_operands_are_the_references_codes(base: NumberFormat, backward: str, scale: str) -> None:
    """A product with a multiple of the identity shows the other operand bit by bit."""
    kernels, power_of_two = kernels_of(base, backward=backward, scale=scale), scale == "power_of_two"
    identity = torch.eye(200) * 448  # a scale of 1 in each block
    seed = round_to_format(torch.randn(200, 200) * torch.exp2(torch.randint(-9, 9, (200, 1)).float()), base)
    x = round_to_format(torch.randn(200, 200), base)

    def expected(operand: Tensor) -> Tensor:
        return round_to_format(operand * 448, base)

    leaf = torch.zeros(200, 200, requires_grad=True)
    (grad_x,) = torch.autograd.grad(kernels.linear(leaf, identity, None, LAYER), leaf, seed)
    (grad_w,) = torch.autograd.grad(kernels.linear(identity, leaf, None, LAYER), leaf, seed)
    (x_seen,) = torch.autograd.grad(kernels.linear(x, leaf, None, LAYER), leaf, identity)
    if backward == "high":
        assert torch.equal(grad_x, expected(seed))
        assert torch.equal(grad_w, expected(seed.t()))
        assert torch.equal(x_seen, expected(x))
        return
    assert torch.equal(grad_x, expected(values(seed, backward, ALONG_ROWS, power_of_two)))
    assert torch.equal(grad_w, expected(values(seed, backward, ALONG_COLUMNS, power_of_two).t()))
    # The two directions have different scales: powers of two show it only where values fall below e4m3's normals.
    assert torch.equal(grad_w.t(), grad_x) == (backward == "e5m2" and power_of_two)
    assert torch.equal(x_seen, expected(values(x, "e4m3", ALONG_COLUMNS, power_of_two)))


# ---- overflow is never lost


@pytest.mark.parametrize(("backward", "scale"), [("e4m3", "fp32"), ("e5m2", "power_of_two"), ("high", "fp32")])
def test_a_gradient_beyond_fp16_is_not_finite_in_any_gradient_that_it_enters(backward: str, scale: str) -> None:
    kernels = kernels_of(FP16, backward=backward, scale=scale)
    x = round_to_format(torch.randn(200, 140), FP16).requires_grad_()
    master, bias = torch.randn(136, 140, requires_grad=True), torch.zeros(136, requires_grad=True)
    seed = torch.randn(200, 136)
    seed[150, 130] = 70000.0  # rounds to inf in fp16
    out = kernels.linear(x, master, bias, LAYER)
    grad_x, grad_w, grad_b = torch.autograd.grad(out, (x, master, bias), seed)
    assert not grad_x[150].isfinite().any()
    assert bool(grad_x[torch.arange(200) != 150].isfinite().all())
    assert not grad_w[130].isfinite().any()
    assert bool(grad_w[torch.arange(136) != 130].isfinite().all())
    assert grad_b[130].item() == float("inf")


# ---- which layers


@bases
@pytest.mark.parametrize("layer", ["", "lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"])
def test_what_the_policy_leaves_out_is_the_bases(layer: str, base: NumberFormat) -> None:
    kernels, plain = kernels_of(base, exclude=["down_proj"]), SimulatedKernels(base)
    x = round_to_format(torch.randn(6, 160), base).requires_grad_()
    master, bias = torch.randn(24, 160, requires_grad=True), torch.randn(24)
    results = []
    for family in (kernels, plain):
        out = family.linear(x, master, bias, layer)
        results.append(
            (out, *torch.autograd.grad(out, (x, master), torch.ones_like(out)), family.copied(master, layer))
        )
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(kernels.linear(x, master, bias, LAYER), results[0][0])


# ---- roles and the whole decoder


def test_native_fp8_is_not_quietly_the_base() -> None:
    """What a Hopper GPU resolves to: a family that knows its policy, and none where there is no triton."""
    precision = resolve(PrecisionPolicy.parse("fp8"), "cpu")
    native = dataclasses.replace(precision.learner, backend="native")
    kernels = learner_kernels(dataclasses.replace(precision, learner=native))
    assert isinstance(kernels, NativeKernels)
    assert kernels.fp8 == Fp8Policy()
    if importlib.util.find_spec("triton") is None:
        with pytest.raises(MantissaError, match=re.escape("the learner's fp8 products are Triton kernels, and triton")):
            learner_kernels(dataclasses.replace(precision, learner=native, device="cuda:0"))


def decoder() -> tuple[Decoder, Tensor]:
    config = ModelConfig("qwen3", 32, 96, 160, 2, 4, 2, 24, qk_norm=True)
    tokens = torch.randint(0, 32, (6, 40), generator=torch.Generator().manual_seed(1))
    return Decoder(config).initialize(torch.Generator().manual_seed(0)), tokens


@pytest.mark.parametrize(("base", "scale"), [(BF16, "fp32"), (FP16, "power_of_two")], ids=str)
def test_a_policy_of_copies_has_the_learners_log_probs_to_the_bit(base: NumberFormat, scale: str) -> None:
    """One forward of the same shape: what is left to differ is the kernels, and they are the same."""
    model, tokens = decoder()
    fp8 = Fp8Policy(base=base.name, scale=scale, exclude=("layers.1.mlp",))  # type: ignore[arg-type]
    learner, rollout = SimulatedKernels(base, fp8=fp8), SimulatedKernels(base, weights_on_grid=True, fp8=fp8)
    copy = Decoder(model.config)
    with torch.no_grad():
        for (name, master), kept in zip(model.named_parameters(), copy.parameters(), strict=True):
            kept.copy_(rollout.copied(master, name.removesuffix(".weight")))  # type: ignore[arg-type]
        expected = model.logits(model(tokens, learner), learner)
        assert torch.equal(copy.logits(copy(tokens, rollout), rollout), expected)
        plain = SimulatedKernels(base)
        assert not torch.equal(model.logits(model(tokens, plain), plain), expected)


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "mxfp4"])
def test_a_cpus_own_bf16_serves_codes_times_powers_of_two(name: str) -> None:
    """The values are bf16's, so the products are those of the simulated family but for a sum's order; and proven."""
    policy = Fp8Policy(scale="power_of_two") if name == "fp8" else Quantized(scheme=name)
    native = NativeKernels(BF16, fp8=policy, copies=True)
    simulated = SimulatedKernels(BF16, weights_on_grid=True, fp8=policy)
    generator, layer = torch.Generator().manual_seed(0), "model.layers.0.mlp.up_proj"
    w, x = torch.randn(200, 256, generator=generator), torch.randn(17, 256, generator=generator).bfloat16()
    kept = native.copied(w, layer)
    assert isinstance(kept, torch.Tensor)
    assert kept.dtype is torch.bfloat16
    assert torch.equal(kept.float(), simulated.copied(w, layer))
    with torch.no_grad():
        out, other = native.linear(x, kept, None, layer), simulated.linear(x.float(), kept.float(), None, layer)
    assert out.dtype is torch.bfloat16
    assert (out.float() != other).float().mean() < 0.02  # a rounding to bf16 that falls the other way
    assert (out.float() - other).abs().max() <= 2.0**-7 * other.abs().max()
    assert f"{'rounds an input of 1+1/16 to 1' if name == 'fp8' else f'to {name}'}" in probe(native, "cpu")


def test_which_rollouts_the_cpus_own_bf16_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels(own: bool, codes: bool = False, **policy: object) -> str:
        compiled = ("codes",) if codes else ()
        monkeypatch.setattr(cpu, "products", lambda: cpu.CpuProducts(0.5 if own else 1.0, compiled=compiled))
        return resolve(PrecisionPolicy.parse(policy), "cpu").rollout.kernels

    powers = {"scale": "power_of_two"}
    assert kernels(True, preset="fp8-rollout", fp8=powers) == "native"
    assert kernels(True, preset="fp8", fp8=powers) == "native"
    assert kernels(True, preset="mxfp8-rollout") == kernels(True, preset="mxfp4-rollout") == "native"
    assert kernels(False, preset="fp8-rollout", fp8=powers) == "simulated"
    assert kernels(True, preset="fp8-rollout") == "simulated"
    assert kernels(True, preset="fp8-rollout", fp8={**powers, "base": "fp16"}) == "simulated"
    assert kernels(True, preset="fp8-rollout", fp8=powers, backend="simulated") == "simulated"
    assert kernels(True, preset="nvfp4-rollout") == kernels(True, preset="int4-rollout") == "simulated"
    assert kernels(True, preset="fp8", fp8=powers, kernels="exact") == "exact simulated"
    for preset in ("fp8-rollout", "nvfp4-rollout", "int4-rollout", "mxfp8-rollout"):
        assert kernels(True, codes=True, preset=preset) == "native"
        assert kernels(False, codes=True, preset=preset) == "simulated"
    assert kernels(True, codes=True, preset="fp8-rollout", fp8={"base": "fp16"}) == "simulated"
    assert kernels(True, codes=True, preset="fp8-rollout", backend="simulated") == "simulated"
    assert kernels(True, codes=True, preset="fp8", kernels="exact") == "exact simulated"
    with pytest.raises(
        MantissaError, match="serves a rollout in fp8 with base=bf16, and AVX512-VBMI with a C compiler, or scale=power"
    ):
        kernels(True, train="bf16", rollout="fp8", backend="native")
