"""Simulated against native half kernels: bit for bit where an operation works element by element, else to one ulp."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mantissa.kernels import Kernels, NativeKernels, SimulatedKernels
from mantissa.precision import BF16, FP16, NumberFormat, round_to_format

halves = pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)
Run = Callable[[Kernels, list[Tensor]], Tensor]


def angles(*shape: int) -> tuple[Tensor, Tensor]:
    a = torch.rand(*shape) * 6
    return torch.cat((a, a), -1).cos(), torch.cat((a, a), -1).sin()


COS, SIN = (x.contiguous() for x in angles(2, 7, 16))
ELEMENTWISE: dict[str, tuple[str, list[tuple[int, ...]], Run]] = {
    "weight": ("m", [(64, 64)], lambda f, x: f.weight(x[0])),
    "rms_norm": ("am", [(6, 5, 64), (64,)], lambda f, x: f.rms_norm(*x, 1e-6)),
    "swiglu": ("aa", [(6, 128), (6, 128)], lambda f, x: f.swiglu(*x)),
    "rotate": ("a", [(2, 3, 7, 32)], lambda f, x: f.rotate(x[0], COS, SIN)),
    "add": ("aa", [(6, 128), (6, 128)], lambda f, x: f.add(*x)),
}
PRODUCTS: dict[str, tuple[str, list[tuple[int, ...]], Run]] = {
    "linear": ("amm", [(4, 6, 64), (32, 64), (32,)], lambda f, x: f.linear(*x)),
    "logits": ("am", [(4, 6, 64), (96, 64)], lambda f, x: f.logits(*x)),
}


def both(
    fmt: NumberFormat, kinds: str, shapes: list[tuple[int, ...]], run: Run, scale: float = 1.0
) -> list[list[Tensor]]:
    """[output, gradients...] of the native and of the simulated kernels on the same operands, as fp32."""
    values = [torch.randn(*shape) * scale for shape in shapes]
    results, seed = [], None
    for kernels in (NativeKernels(fmt), SimulatedKernels(fmt)):
        given = [
            (x.clone() if kind == "m" else round_to_format(x, fmt).to(kernels.dtype)).requires_grad_()
            for kind, x in zip(kinds, values, strict=True)
        ]
        out = run(kernels, given)
        seed = round_to_format(torch.randn(out.shape), fmt) if seed is None else seed
        gradients = torch.autograd.grad(out, given, seed.to(out.dtype))
        results.append([x.detach().float() for x in (out, *gradients)])
    return results


def ulps_apart(a: Tensor, b: Tensor, fmt: NumberFormat) -> Tensor:
    """How many values of the format lie between, as a count of steps: bit patterns made into ordered integers."""

    def ordered(x: Tensor) -> Tensor:
        bits = x.to(fmt.dtype).view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (ordered(a) - ordered(b)).abs()


@halves
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_outputs_are_bit_equal_and_gradients_within_an_ulp(name: str, fmt: NumberFormat) -> None:
    native, simulated = both(fmt, *ELEMENTWISE[name])
    assert torch.equal(native[0], simulated[0])
    for ours, theirs in zip(simulated[1:], native[1:], strict=True):
        apart = ulps_apart(ours, theirs, fmt)
        if name == "rms_norm":  # two fp32 derivations of one formula: a few roundings fall on the other side
            assert apart.max() <= 1
            assert (apart > 0).float().mean() < 0.02
        else:
            assert torch.equal(ours, theirs)


# ---- the ends of the range


@pytest.mark.parametrize("factor", [2.0**12, 2.0**-12])
def test_every_operation_overflows_and_flushes_where_native_does(factor: float) -> None:
    for name, (kinds, shapes, run) in {**ELEMENTWISE, **PRODUCTS}.items():
        native, simulated = both(FP16, kinds, shapes, run, factor)
        for ours, theirs in zip(simulated, native, strict=True):
            assert torch.equal(ours.isinf(), theirs.isinf()), name
            assert torch.equal(ours.isnan(), theirs.isnan()), name
            zero = (ours == 0) != (theirs == 0)
            assert zero.float().mean() <= 0.001, name  # the sum's order decides at the very threshold


def test_an_overflow_in_the_residual_stream_becomes_inf_when_it_is_read() -> None:
    """Two branches of 40000 each: a half tensor's sum is inf, and so is ours after the next operation reads it."""
    kernels = SimulatedKernels(FP16)
    x, y = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    stream = kernels.add(x, y)
    loss = (stream * 40000.0).sum() + (stream * 40000.0).sum()
    for gradient in torch.autograd.grad(loss, (x, y)):
        assert gradient.tolist() == [math.inf] * 4


def test_gradients_stop_where_none_is_needed() -> None:
    kernels = SimulatedKernels(FP16)
    x, master = round_to_format(torch.randn(3, 8), FP16), torch.randn(4, 8, requires_grad=True)
    kernels.linear(x, master).sum().backward()
    expected = x.sum(0).expand(4, 8)
    torch.testing.assert_close(master.grad, expected, rtol=FP16.epsilon, atol=1e-6)
    frozen, leaf = torch.randn(4, 8), x.clone().requires_grad_()
    kernels.linear(leaf, frozen).sum().backward()
    torch.testing.assert_close(leaf.grad, round_to_format(frozen, FP16).sum(0).expand(3, 8), rtol=1e-3, atol=2e-3)
