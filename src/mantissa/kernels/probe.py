"""Proof that a precision is active: run a kernel family on numbers that only its format treats as it must.

A policy that says fp16 while something computes in fp32 (or fp32 that is silently TF32) is the field's commonest
silent substitution. Four products with known answers tell them apart; ``probe`` returns what it saw, or raises.
"""

from __future__ import annotations

import torch

from mantissa.errors import MantissaError
from mantissa.kernels.interface import Kernels


def probe(kernels: Kernels, device: torch.device | str) -> str:
    """Check rounding, accumulation, overflow and the gradient's rounding of ``kernels``; return one line of evidence.

    With u = 2^-mantissa_bits (the distance from 1 to the next value):
    1 + u stays and 1 + u/4 becomes 1, forward; 2/u + 1 + 1 becomes 2/u + 2 (it stays 2/u where the accumulator is
    rounded to the format after each addition); a gradient of 1 + u/4 becomes 1; and in fp16 a gradient of
    60000 * 2 becomes inf. For fp32 the first pair is what TF32 would fail: 1 + 2^-23 must stay.
    Raises ``MantissaError`` naming the check that failed.
    """
    fmt = kernels.format
    u = fmt.epsilon

    def product(x: list[float], w: list[float]) -> float:
        operands = torch.zeros(8, 8, dtype=kernels.dtype, device=device)  # padded: some kernels need multiples of 8
        weights = torch.zeros(8, 8, dtype=torch.float32, device=device)
        operands[0, : len(x)] = torch.tensor(x, dtype=kernels.dtype, device=device)
        weights[0, : len(w)] = torch.tensor(w, dtype=torch.float32, device=device)
        return kernels.linear(operands, weights)[0, 0].item()

    def gradient(grad: float, w: float) -> float:
        x = torch.zeros(8, 8, dtype=kernels.dtype, device=device, requires_grad=True)
        weights = torch.zeros(8, 8, dtype=torch.float32, device=device)
        weights[0, 0] = w
        out = kernels.linear(x, weights)
        seed = torch.zeros_like(out)
        seed[0, 0] = grad
        (grad_x,) = torch.autograd.grad(out, x, seed)
        return grad_x[0, 0].item()

    checks = [
        ("keeps 1+u", product([1.0], [1.0 + u]), 1.0 + u),
        ("rounds 1+u/4 to 1", product([1.0, u / 4], [1.0, 1.0]), 1.0),
        ("accumulates wider than it stores", product([2 / u, 1.0, 1.0], [1.0, 1.0, 1.0]), 2 / u + 2),
        ("keeps a gradient of 1+u", gradient(1.0, 1.0 + u), 1.0 + u),
    ]
    if fmt.name == "fp32":
        # The accumulator is no wider than the format here: of the last two additions each is a tie.
        checks = [check for check in checks if check[0] != "accumulates wider than it stores"]
    if fmt.name == "fp16":
        checks.append(("overflows a gradient of 120000", gradient(60000.0, 2.0), float("inf")))
        checks.append(("flushes a gradient of 2^-26", gradient(2.0**-13, 2.0**-13), 0.0))
    for what, got, expected in checks:
        if got != expected:
            raise MantissaError(
                f"precision: {fmt.name} is not active in the {type(kernels).__name__} on {device}: it should show that "
                f"it {what} (expected {expected!r}, got {got!r}); check TF32 settings and the torch build"
            )
    return "; ".join(what for what, _, _ in checks)
