"""Triton's norm, gated unit, rotation and log-prob against float64, torch's operations, and rows among other rows.

On a GPU, or interpreted on a CPU with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from mantissa.kernels import NativeKernels
from mantissa.kernels.simulated import rotate_fp32
from mantissa.precision import BF16, FP16, FP32, NumberFormat, token_logprob
from triton_interpreter import DEVICE, needs_a_device

pytestmark = needs_a_device
formats = pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=str)


def family(fmt: NumberFormat) -> NativeKernels:
    from mantissa.kernels.exact.gpu import ExactGpuKernels

    return ExactGpuKernels(fmt)


def on_device(*values: Tensor) -> list[Tensor]:
    return [x.to(DEVICE) for x in values]


def rms_norm(x: Tensor, weight: Tensor, fmt: NumberFormat) -> Tensor:
    return family(fmt).rms_norm(*on_device(x, weight), 1e-6).cpu()


def swiglu(gate: Tensor, up: Tensor, fmt: NumberFormat) -> Tensor:
    return family(fmt).swiglu(*on_device(gate, up)).cpu()


def logprob(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    from mantissa.kernels.triton import rows as triton_rows

    return triton_rows.token_logprob(*on_device(logits, tokens), temperature)


def ulps(fmt: NumberFormat, count: int, exact: Tensor) -> Tensor:
    return count * fmt.epsilon * exact.abs() + fmt.smallest_subnormal


@formats
@pytest.mark.parametrize("size", [1, 16, 70, 1024])
def test_norm_against_float64(size: int, fmt: NumberFormat) -> None:
    """Two roundings to the format, each half an ulp, and a few in fp32."""
    x, weight = (torch.randn(9, 3, size) * 300).to(fmt.dtype), torch.rand(size) + 0.5
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.to(fmt.dtype).double()
    out = rms_norm(x, weight, fmt)
    assert bool(((out.double() - exact).abs() <= ulps(fmt, 2 if fmt is not FP32 else 8, exact)).all())


@formats
def test_gated_unit_against_float64(fmt: NumberFormat) -> None:
    gate = torch.cat((torch.linspace(-110, 110, 3001), torch.randn(1000) * 1e-3)).to(fmt.dtype)
    up = torch.randn(4001).to(fmt.dtype)
    wide = gate.double()
    exact = wide * torch.sigmoid(wide) * up.double()
    out = swiglu(gate, up, fmt)
    bound = ulps(fmt, 2 if fmt is not FP32 else 6, exact) + fmt.smallest_subnormal * up.double().abs()
    if fmt is not FP16:
        bound += 3e-37 * up.double().abs()  # below -88.7 e^-g is beyond fp32, and the quotient 0: as torch's
    assert bool(((out.double() - exact).abs() <= bound).all())


@formats
def test_gated_unit_at_the_ends(fmt: NumberFormat) -> None:
    """As torch's: silu(-inf) = -inf / inf is NaN, silu(inf) is inf, NaN stays; a large negative gate gives zero."""
    gate = torch.tensor([float("inf"), float("-inf"), float("nan"), -60000.0, 60000.0, 0.0, -0.0]).to(fmt.dtype)
    out, torch_s = swiglu(gate, torch.ones_like(gate), fmt), F.silu(gate)
    assert torch.equal(out.isnan(), torch_s.isnan())
    assert torch.equal(out.nan_to_num(7.0), torch_s.nan_to_num(7.0))


@formats
@pytest.mark.parametrize("shape", [(2, 3, 7, 16), (1, 5, 4, 80), (3, 1, 1, 2)], ids=str)
def test_rotation_is_torch_s_to_the_bit(shape: tuple[int, ...], fmt: NumberFormat) -> None:
    """From the transposed view that a projection leaves, with angles of each row or shared; and its gradient."""
    rows, heads, length, size = shape
    x = torch.randn(rows, length, heads, size).to(fmt.dtype).transpose(1, 2)
    for angle_rows in (1, rows):
        half = torch.rand(angle_rows, length, size // 2) * 6
        angle = torch.cat((half, half), -1)
        given, cos, sin = on_device(x, angle.cos(), angle.sin())
        given.requires_grad_()
        out = family(fmt).rotate(given, cos, sin)
        assert torch.equal(out.cpu(), rotate_fp32(x.detach().float(), angle.cos(), angle.sin()).to(fmt.dtype))
        (grad,) = torch.autograd.grad(out, given, out.detach())
        back = rotate_fp32(out.detach().float().cpu(), angle.cos(), -angle.sin()).to(fmt.dtype)
        assert torch.equal(grad.cpu(), back)


@formats
def test_gradients_against_float64(fmt: NumberFormat) -> None:
    x, weight = torch.randn(30, 64).to(fmt.dtype), torch.rand(64).to(fmt.dtype) + 0.5
    gate, up, seed = torch.randn(3, 30, 64).to(fmt.dtype)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w

    def gated(g: Tensor, u: Tensor) -> Tensor:
        return F.silu(g) * u

    exact_family = family(fmt)
    cases = [
        (norm, lambda a, b: exact_family.rms_norm(a, b, 1e-6), (x, weight)),
        (gated, exact_family.swiglu, (gate, up)),
    ]
    for wide, ours, operands in cases:
        doubles = [t.double().requires_grad_() for t in operands]
        expected = torch.autograd.grad(wide(*doubles), doubles, seed.double())
        leaves = [t.to(DEVICE).requires_grad_() for t in operands]
        got = torch.autograd.grad(ours(*leaves), leaves, seed.to(DEVICE))
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == fmt.dtype
            assert bool(((a.cpu().double() - b).abs() <= 8 * fmt.epsilon * b.abs().amax()).all())


# ---- log-probs


@pytest.mark.parametrize("words", [1, 33, 1000, 5001, 9000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_against_float64(temperature: float, words: int) -> None:
    logits, tokens = torch.randn(3, 4, words) * 20, torch.randint(0, words, (3, 4))
    exact = torch.log_softmax(logits.double() / temperature, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(logprob(logits, tokens, temperature).cpu().double(), exact, rtol=2.0**-22, atol=2.0**-20)


def test_log_prob_gradients_are_torch_s() -> None:
    logits, tokens, seed = torch.randn(6, 300) * 3, torch.randint(0, 300, (6,)), torch.randn(6)
    for temperature in (1.0, 2.0):
        leaf, ours = logits.clone().requires_grad_(), logits.to(DEVICE).requires_grad_()
        (expected,) = torch.autograd.grad(token_logprob(leaf, tokens, temperature), leaf, seed)
        (got,) = torch.autograd.grad(logprob(ours, tokens, temperature), ours, seed.to(DEVICE))
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-7)


def test_logits_that_are_not_finite_show() -> None:
    rows = torch.zeros(5, 8)
    rows[0, 3], rows[1, 3], rows[2, 3], rows[3] = float("nan"), float("inf"), float("-inf"), float("-inf")
    tokens = torch.zeros(5, dtype=torch.int64)
    got, expected = logprob(rows, tokens).cpu(), token_logprob(rows, tokens)
    assert torch.equal(got.isfinite(), expected.isfinite())
    assert torch.equal(got.isfinite(), torch.tensor([False, False, True, False, True]))
    torch.testing.assert_close(got[[2, 4]], expected[[2, 4]])
    with pytest.raises(TypeError, match="fp32"):
        logprob(rows.half(), tokens)
    with pytest.raises(ValueError, match="positive"):
        logprob(rows, tokens, 0.0)
