"""Proof that a precision is active: run a kernel family on numbers that only its format treats as it must.

A policy that says fp16 while something computes in fp32 (or fp32 that is silently TF32) is the field's commonest
silent substitution. A dozen products with known answers tell them apart; ``probe`` returns what it saw, or raises.
They are products of 8 by 8: what a library chooses for other sizes (a sum split over blocks, say) they cannot see.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mantissa.errors import MantissaError
from mantissa.kernels.interface import Kernels
from mantissa.kernels.probe_fp8 import Check, fp8_checks
from mantissa.precision import FP32, round_to_format


def probe(kernels: Kernels, device: torch.device | str) -> str:
    """Check rounding, accumulation, overflow and the gradients' rounding of ``kernels``; return one line of evidence.

    With u = 2^-mantissa_bits (the distance from 1 to the next value), for outputs and for both gradients of a product:
    1 + u stays; 1 + u/4 becomes 1; 2/u + 1 + 1 becomes 2/u + 2 (it stays 2/u where the accumulator is rounded to the
    format after each addition). A master weight of 1 + u/4 becomes 1, unless the weights given are already on the grid.
    Logits of 1 + u/4 are rounded to the logits' format only. In fp16, 60000 * 2 becomes inf and 2^-26 becomes 0.
    For fp32 the first check is what TF32 would fail: 1 + 2^-23 must stay. Where some products have fp8 operands those
    of ``fp8_checks`` follow; the others prove the base. Raises ``MantissaError`` naming the check that failed.
    """
    checks = {kernels.format.name: _forward_checks(kernels, device) + _gradient_checks(kernels, device)}
    fp8 = getattr(kernels, "fp8", None)
    if fp8 is not None:
        checks["fp8"] = fp8_checks(kernels, fp8, device)
    for name, asked in checks.items():
        for what, got, expected in asked:
            if got != expected:
                raise MantissaError(
                    f"precision: {name} is not active in the {type(kernels).__name__} on {device}: it should "
                    f"show that it {what} (expected {expected!r}, got {got!r}); check TF32 settings and the torch build"
                )
    return "; ".join(what for asked in checks.values() for what, _, _ in asked)


def _forward_checks(kernels: Kernels, device: torch.device | str) -> list[Check]:
    u, logits_format = kernels.format.epsilon, kernels.logits_format

    def product(x: list[float], w: list[float]) -> float:
        return kernels.linear(_row(x, kernels.dtype, device), _row(w, torch.float32, device))[0, 0].item()

    logit = kernels.logits(_row([1.0, u / 4], kernels.dtype, device), _row([1.0, 1.0], torch.float32, device))[0, 0]
    exact_logit = torch.tensor(1 + u / 4, dtype=torch.float64)
    checks = [
        ("keeps 1+u", product([1.0], [1.0 + u]), 1.0 + u),
        ("rounds 1+u/4 to 1", product([1.0, u / 4], [1.0, 1.0]), 1.0),
        (f"holds logits in {logits_format}", logit.item(), round_to_format(exact_logit, logits_format).item()),
    ]
    if kernels.format is not FP32:  # whose accumulator is no wider than itself
        checks.append(("accumulates wider than it stores", product([2 / u, 1.0, 1.0], [1.0, 1.0, 1.0]), 2 / u + 2))
    if kernels.format.name == "fp16":
        checks.append(("overflows 120000 to inf", product([60000.0], [2.0]), math.inf))
    if not getattr(kernels, "weights_on_grid", False):
        weight = torch.full((8, 8), 1 + u / 4, dtype=torch.float32, device=device)
        checks.append(("rounds a weight of 1+u/4 to 1", kernels.weight(weight)[0, 0].item(), 1.0))
    return checks


def _gradient_checks(kernels: Kernels, device: torch.device | str) -> list[Check]:
    u = kernels.format.epsilon

    def of_x(grad: list[float], w: list[float]) -> float:
        """The gradient sum_j grad_j w_j of the input of a product."""
        x = torch.zeros(8, 8, dtype=kernels.dtype, device=device, requires_grad=True)
        out = kernels.linear(x, _row(w, torch.float32, device).t().contiguous())
        return torch.autograd.grad(out, x, _row(grad, out.dtype, device))[0][0, 0].item()

    def of_weight(grad: list[float], x: list[float]) -> float:
        """The gradient sum_n grad_n x_n of a master weight."""
        master = torch.zeros(8, 8, dtype=torch.float32, device=device, requires_grad=True)
        out = kernels.linear(_row(x, kernels.dtype, device).t().contiguous(), master)
        seed = _row(grad, out.dtype, device).t().contiguous()
        return torch.autograd.grad(out, master, seed)[0][0, 0].item()

    gradients: list[tuple[str, Callable[[list[float], list[float]], float]]] = [("gradient", of_x)]
    if not getattr(kernels, "weights_on_grid", False):  # a rollout's copy, which has no gradient
        gradients.append(("weight's gradient", of_weight))
    checks: list[Check] = []
    for name, gradient in gradients:
        checks.append((f"keeps a {name} of 1+u", gradient([1.0], [1.0 + u]), 1.0 + u))
        checks.append((f"rounds a {name} of 1+u/4 to 1", gradient([1.0, u / 4], [1.0, 1.0]), 1.0))
        if kernels.format is not FP32:
            got = gradient([2 / u, 1.0, 1.0], [1.0, 1.0, 1.0])
            checks.append((f"accumulates a {name} wider than it stores", got, 2 / u + 2))
        if kernels.format.name == "fp16":
            checks.append((f"overflows a {name} of 120000 to inf", gradient([60000.0], [2.0]), math.inf))
            checks.append((f"flushes a {name} of 2^-26 to 0", gradient([2.0**-13], [2.0**-13]), 0.0))
    return checks


def _row(values: list[float], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """``values`` as the start of the first row of zeros, 8 by 8: some kernels need multiples of 8."""
    rows = torch.zeros(8, 8, dtype=dtype, device=device)
    rows[0, : len(values)] = torch.tensor(values, dtype=dtype, device=device)
    return rows
