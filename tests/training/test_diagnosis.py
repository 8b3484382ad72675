"""Naming the first non-finite value, and counting gradients that a format flushes to zero."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mantissa.kernels import NativeKernels, SimulatedKernels
from mantissa.precision import FP16, FP32
from mantissa.training import flushed_fraction, gradients_of, where_nonfinite
from mantissa.training.nonfinite import NonfiniteValue, Seen


class Multiply(nn.Module):
    """x times a constant, with a gradient that can be made to overflow."""

    def __init__(self, factor: float, gradient_factor: float = 1.0) -> None:
        super().__init__()
        self.factor, self.gradient_factor = factor, gradient_factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gradient_factor != 1.0:
            x = x * self.gradient_factor - (x * (self.gradient_factor - 1)).detach()
        return x * self.factor


def run(model: nn.Module):
    x = torch.ones(2, 2, requires_grad=True)
    return lambda: model(x).sum().backward()


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (
            nn.Sequential(Multiply(2.0), nn.Sequential(Multiply(1e38), Multiply(1e3)), Multiply(1.0)),
            (Seen.OUTPUT, "1.1"),
        ),
        (nn.Sequential(Multiply(1.0), Multiply(1.0, 1e38), Multiply(1.0, 1e38)), (Seen.OUTPUT_GRADIENT, "0")),
    ],
)
def test_names_the_first_value_that_overflows(model: nn.Module, named: tuple[Seen, str]) -> None:
    assert where_nonfinite(model, run(model)) == NonfiniteValue(*named, 4, 4)


def test_names_a_parameter_when_only_its_gradient_overflows() -> None:
    model = nn.Linear(2, 2, bias=False)
    work = lambda: ((model.weight * torch.full((2, 2), 3e38)).sum() * 4).backward()  # noqa: E731 (the pass itself)
    assert str(where_nonfinite(model, work)) == "the gradient of weight (4 of 4 values)"


def test_says_so_when_nothing_is_wrong_and_removes_its_hooks() -> None:
    model = nn.Sequential(Multiply(2.0))
    assert where_nonfinite(model, run(model)).seen is Seen.NOWHERE
    assert not model[0]._forward_hooks


def test_flushed_fraction_counts_what_fp16_loses() -> None:
    """Four gradients of 2^-23, 2^-25, 2^-26 and 0: fp16 keeps the first (2^-25 is a tie that goes to even, zero)."""
    weight = nn.Parameter(torch.zeros(1, 4))
    holder = nn.Module()
    holder.weight = weight
    x = torch.tensor([[2.0**-13, 2.0**-15, 2.0**-16, 0.0]])

    def work(kernels):
        return lambda: (kernels.linear(x, weight) * 2.0**-10).sum().backward()

    low = gradients_of(holder, work(SimulatedKernels(FP16)))
    exact = gradients_of(holder, work(NativeKernels(FP32)))
    assert flushed_fraction(low, exact) == pytest.approx(2 / 3)
    assert flushed_fraction(exact, exact) == 0.0
    assert flushed_fraction(exact, {"weight": torch.zeros(1, 4)}) == 0.0  # of nothing
    assert weight.grad is None
