"""Proof that an ``Autocast`` computes in its format: a linear layer and a convolution with known answers.

The checks are those of ``probe``, which see the same things in a kernel family; here they go through autocast, the
dispatcher and autograd, as a user's module does. Inputs and weights are fp32 masters, and so are the gradients.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.errors import MantissaError
from mantissa.kernels.autocast import Autocast
from mantissa.kernels.probe import Check
from mantissa.precision import FP32


def probe_autocast(autocast: Autocast, device: torch.device | str) -> str:
    """Check rounding, accumulation, overflow and the gradients' rounding of modules; return one line of evidence.

    With u = 2^-mantissa_bits, for the output, the input's gradient and the weight's gradient of a product: 1 + u stays;
    1 + u/4 becomes 1; 2/u + 1 + 1 becomes 2/u + 2. An operand of 1 + u/4 becomes 1. In fp16, 60000 * 2 becomes inf and
    2^-13 * 2^-13 becomes 0. The output and a convolution's have the format's dtype. For fp32 the first check is what
    TF32 and an autocast left on would fail. Raises ``MantissaError`` naming the check that failed.
    """
    checks = _checks(autocast, device)
    for what, got, expected in checks:
        if got != expected:
            raise MantissaError(
                f"precision: {autocast.format} is not active under {autocast} on {device}: it should show that it "
                f"{what} (expected {expected!r}, got {got!r}); check TF32 settings, an autocast around the caller, "
                "and the torch build"
            )
    return "; ".join(what for what, _, _ in checks)


def _checks(autocast: Autocast, device: torch.device | str) -> list[Check]:
    fmt, u = autocast.format, autocast.format.epsilon
    cases = [("keeps {} of 1+u", [1.0], [1.0 + u], 1.0 + u), ("rounds {} of 1+u/4 to 1", [1.0, u / 4], [1.0, 1.0], 1.0)]
    if fmt != FP32:  # whose accumulator is no wider than itself
        cases.append(("accumulates {} wider than it stores", [2 / u, 1.0, 1.0], [1.0, 1.0, 1.0], 2 / u + 2))
    if fmt.name == "fp16":
        cases.append(("overflows {} of 120000 to inf", [60000.0], [2.0], math.inf))
        cases.append(("flushes {} of 2^-26 to 0", [2.0**-13], [2.0**-13], 0.0))
    checks: list[Check] = []
    for says, a, b, expected in cases:
        out, grad_x, grad_weight = _products(autocast, device, a, b)
        for name, got in (("an output", out), ("a gradient", grad_x), ("a weight's gradient", grad_weight)):
            checks.append((says.format(name), got, expected))
    operand = _products(autocast, device, [1 + u / 4], [1.0])[0]
    checks.append(("rounds a master of 1+u/4 to 1", operand, 1.0) if fmt != FP32 else ("keeps 1+u/4", operand, 1.0))
    bits = torch.finfo(fmt.dtype).bits
    with autocast.forward(), torch.no_grad():
        image, kernel = torch.ones(1, 8, 8, 8, device=device), torch.ones(8, 8, 3, 3, device=device)
        checks.append(("holds a convolution in the format", torch.finfo(F.conv2d(image, kernel).dtype).bits, bits))
    return checks


def _products(autocast: Autocast, device: torch.device | str, a: list[float], b: list[float]) -> list[float]:
    """sum_i a_i b_i as an output, as the gradient of an input (a the gradients), and of a weight (a the gradients)."""
    row_a, row_b = _row(a, device), _row(b, device)
    with autocast.forward(), torch.no_grad():
        out = F.linear(row_a, row_b)
    results = [out[0, 0].item()]
    x, weight = torch.zeros(8, 8, device=device), row_b.t().contiguous()
    results.append(_gradient(autocast, x, weight, row_a, of_weight=False))
    results.append(
        _gradient(autocast, row_b.t().contiguous(), torch.zeros(8, 8, device=device), row_a.t(), of_weight=True)
    )
    return results


def _gradient(autocast: Autocast, x: Tensor, weight: Tensor, seed: Tensor, of_weight: bool) -> float:
    """The first element of a gradient of ``F.linear(x, weight)`` from ``seed``, which is rounded to the format."""
    leaf = (weight if of_weight else x).requires_grad_()
    with torch.enable_grad(), autocast.forward():
        out = F.linear(x, weight)
    with autocast.backward():
        return torch.autograd.grad(out, leaf, seed.to(out.dtype).contiguous())[0][0, 0].item()


def _row(values: list[float], device: torch.device | str) -> Tensor:
    """``values`` as the start of the first row of zeros, 8 by 8: some kernels need multiples of 8."""
    rows = torch.zeros(8, 8, device=device)
    rows[0, : len(values)] = torch.tensor(values, device=device)
    return rows
