"""Scaled formats: codes, scales and values by scalar float64 arithmetic, torchao's own to the bit, and what learns."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.kernels import learner_kernels, resolve, rollout_kernels
from mantissa.kernels.probe import probe
from mantissa.kernels.simulated import SimulatedKernels
from mantissa.precision import BF16, FP32, SCHEMES, PrecisionPolicy, Quantized, round_to_format

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def make(seed: int, columns: int = 300) -> Tensor:
    """Rows of very different sizes; one of zeros, and one block of zeros. The last block is short."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(12, columns, generator=draw) * torch.exp(2 * torch.randn(12, columns, generator=draw))
    x *= torch.exp(4 * torch.randn(12, 1, generator=draw))
    x[3], x[5, :128] = 0.0, 0.0
    return x


def nearest(y: float, grid: list[float]) -> float:
    """The nearest number of an ascending grid; of two, the one of even index."""
    sign, y = math.copysign(1.0, y), min(abs(y), grid[-1])
    best = min(range(len(grid)), key=lambda i: (abs(grid[i] - y), i % 2))
    return sign * grid[best]


def e4m3_grid() -> list[float]:
    bits = torch.arange(127, dtype=torch.uint8)
    return bits.view(torch.float8_e4m3fn).float().tolist()


def by_hand(name: str, row: list[float], amax_of_all: float) -> list[float]:
    """The values of one row, block by block. Float64, but for what the definition itself rounds to fp32 or e4m3."""

    def fp32(x: float) -> float:
        return torch.tensor(x, dtype=torch.float64).float().item()

    size = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16, "int8": len(row), "int4": 128, "int4-32": 32}[name]
    out: list[float] = []
    for start in range(0, len(row), size):
        block = row[start : start + size]
        amax = max(map(abs, block))
        if amax == 0:
            out += [0.0] * len(block)
        elif name.startswith("mx"):
            grid, power = (e4m3_grid(), 8) if name == "mxfp8" else (list(E2M1), 2)
            scale = 2.0 ** (math.frexp(amax)[1] - 1 - power)
            out += [nearest(x / scale, grid) * scale for x in block]
        elif name == "nvfp4":
            total = fp32(amax_of_all / 2688)
            scale = nearest(min(max(fp32(fp32(amax / 6) / total), 2.0**-6), 448.0), e4m3_grid())
            factor = fp32(fp32(1 / total) / scale)
            out += [fp32(nearest(fp32(x * factor), list(E2M1)) * fp32(scale * total)) for x in block]
        else:
            low, high = (-128, 127) if name == "int8" else (-8, 7)
            scale = fp32(amax / ((high - low) / 2))
            inverse = fp32(1 / scale)
            out += [fp32(min(max(round(fp32(x * inverse)), low), high) * scale) for x in block]
    return out


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("seed", range(3))
def test_values_are_those_of_scalar_arithmetic(name: str, seed: int) -> None:
    x = make(seed)
    found = SCHEMES[name].weight(x)
    wanted = torch.tensor([by_hand(name, row, float(x.abs().max())) for row in x.tolist()], dtype=torch.float64).float()
    assert torch.equal(found, wanted)
    assert not torch.equal(found, x)


@pytest.mark.parametrize("name", [n for n, scheme in SCHEMES.items() if scheme.activations])
def test_a_tokens_numbers_do_not_depend_on_the_tokens_beside_it(name: str) -> None:
    x = make(1)
    together = SCHEMES[name].activation(x.view(3, 4, -1)).view(12, -1)
    alone = torch.cat([SCHEMES[name].activation(row[None]) for row in x])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_not_finite_is_refused_in_a_weight_and_shows_in_an_activation(name: str) -> None:
    x = make(2)
    x[1, 7] = math.inf
    with pytest.raises(MantissaError, match=f"{name}: up_proj holds values that are not finite"):
        SCHEMES[name].weight(x, "up_proj")
    if SCHEMES[name].activations:
        found = SCHEMES[name].activation(x)
        assert found[1, 7].isnan()
        assert bool(found[0].isfinite().all())


def test_torchaos_codes_scales_and_values_are_ours_to_the_bit() -> None:
    """Where its library is; the definitions themselves are tested above without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mx: Any = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="pip install torchao to run it")
        from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
        from torchao.quantization.quant_primitives import (
            MappingType,
            choose_qparams_affine,
            dequantize_affine,
            quantize_affine,
        )
    for seed in range(3):
        x = make(seed, 256)
        for name, dtype in (("mxfp8", torch.float8_e4m3fn), ("mxfp4", torch.float4_e2m1fn_x2)):
            scales, data = mx.to_mx(x, dtype, 32)
            found = SCHEMES[name].encode(x, False)
            codes = data.float() if name == "mxfp8" else f4_unpacked_to_f32(unpack_uint4(data.view(torch.uint8)))
            assert torch.equal(scales.view(torch.uint8), found.scales)
            assert torch.equal(codes.view(x.shape), found.codes)
            values = mx.MXTensor.to_mx(x, dtype, 32).dequantize(torch.float32)
            assert torch.equal(values.view(x.shape), found.values)
        total = per_tensor_amax_to_scale(x.abs().max())
        scales, data = nvfp4_quantize(x, 16, total)[:2]
        found = SCHEMES["nvfp4"].encode(x, False)
        assert torch.equal(scales.float().view(found.scales.shape), found.scales.float())
        assert torch.equal(f4_unpacked_to_f32(unpack_uint4(data.view(torch.uint8))).view(x.shape), found.codes)
        for name, bits, size in (("int8", 8, 256), ("int4", 4, 128), ("int4-32", 4, 32)):
            low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
            scale, zero = choose_qparams_affine(x, MappingType.SYMMETRIC, (1, size), torch.int8, low, high)
            codes = quantize_affine(x, (1, size), scale, zero, torch.int8, low, high)
            found = SCHEMES[name].encode(x, False)
            assert torch.equal(scale.view(found.scales.shape), found.scales)
            assert torch.equal(codes.float(), found.codes)
            values = dequantize_affine(codes, (1, size), scale, zero, torch.int8, low, high, output_dtype=torch.float32)
            assert torch.equal(values, found.values)


@pytest.mark.usefixtures("bf16_is_simulated")
@pytest.mark.parametrize("name", SCHEMES)
def test_learner_and_rollout_multiply_the_same_numbers_and_prove_it(name: str) -> None:
    precision = resolve(PrecisionPolicy(preset=name), "cpu")
    learner, rollout = learner_kernels(precision), rollout_kernels(precision)
    assert precision.learner.name == f"{name} on bf16"
    for kernels in (learner, rollout):
        assert f"quantises a weight of 6 to {name}" in probe(kernels, "cpu")
    draw = torch.Generator().manual_seed(0)
    x = round_to_format(torch.randn(5, 96, generator=draw), BF16)
    master = torch.randn(40, 96, generator=draw)
    layer = "model.layers.0.mlp.up_proj"
    learned = learner.linear(x, master, None, layer)
    assert torch.equal(learned, rollout.linear(x, rollout.copied(master, layer), None, layer))
    exact = SCHEMES[name].activation(x).double() @ SCHEMES[name].weight(master).double().T
    torch.testing.assert_close(learned, round_to_format(exact, BF16).float(), rtol=2**-7, atol=1e-3)
    assert not torch.equal(learned, SimulatedKernels(BF16, FP32).linear(x, master, None, layer))


@pytest.mark.parametrize("name", SCHEMES)
def test_gradients_pass_straight_through(name: str) -> None:
    """In the base format: the gradient of x meets the weight's values, the weight's meets x as it is."""
    quantized = Quantized(scheme=name, base="bf16")
    kernels = SimulatedKernels(BF16, FP32, fp8=quantized)
    draw = torch.Generator().manual_seed(1)
    x = round_to_format(torch.randn(6, 64, generator=draw), BF16).requires_grad_()
    master = torch.randn(32, 64, generator=draw).requires_grad_()
    out = kernels.linear(x, master, None, "layers.0.mlp.up_proj")
    seed = round_to_format(torch.randn(6, 32, generator=draw), BF16)
    of_x, of_weight = torch.autograd.grad(out, (x, master), seed)
    values = SCHEMES[name].weight(master.detach()).double()
    wanted_x = round_to_format(seed.double() @ values, BF16).float()
    wanted_weight = round_to_format(seed.double().T @ x.detach().double(), BF16).float()
    torch.testing.assert_close(of_x, wanted_x, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(of_weight, wanted_weight, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"preset": "bf16", "quantized": {}}, "quantized does nothing where no role is one of mxfp8"),
        ({"train": "bf16", "rollout": "bf16", "kv_cache": "mxfp8"}, "a cache is never mxfp8"),
        ({"preset": "mxfp9"}, "unknown precision preset 'mxfp9'"),
        ({"preset": "nvfp4-rollout", "kernels": "exact"}, "train=bf16 and rollout=nvfp4 round to different numbers"),
        ({"preset": "int4", "logits": "int4"}, "unknown number format"),
    ],
)
def test_what_a_policy_may_not_ask(given: dict[str, Any], said: str) -> None:
    with pytest.raises(MantissaError, match=said):
        PrecisionPolicy(**given)


def test_layers_are_kept_in_the_base_by_name_and_a_name_that_is_none_is_refused() -> None:
    policy = PrecisionPolicy(preset="nvfp4", quantized={"exclude": ["down_proj", "layers.0"], "base": "fp16"})
    role = resolve(policy, "cpu").learner
    assert (role.name, role.backend) == ("nvfp4 on fp16", "simulated")
    assert role.fp8 is not None
    assert role.fp8.quantizes("model.layers.1.mlp.up_proj")
    assert not role.fp8.quantizes("model.layers.1.mlp.down_proj")
    assert not role.fp8.quantizes("model.layers.0.mlp.up_proj")
    assert not role.fp8.quantizes("lm_head")
    with pytest.raises(MantissaError, match=r"precision\.quantized\.exclude: 'down_prog' matches no layer"):
        Quantized(scheme="int4", exclude=("down_prog",)).check(["model.layers.0.mlp.down_proj"])
    with pytest.raises(MantissaError, match=r"backend=native: learner asked for nvfp4, which is simulated"):
        resolve(PrecisionPolicy(preset="nvfp4", backend="native"), "cpu")
