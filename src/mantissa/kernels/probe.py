"""Proof that a precision is active: run a kernel family on numbers that only its format treats as it must.

A policy that says fp16 while something computes in fp32 (or fp32 that is silently TF32) is the field's commonest
silent substitution. A dozen products with known answers tell them apart; ``probe`` returns what it saw, or raises.
They are products of 8 by 8: what a library chooses for other sizes (a sum split over blocks, say) they cannot see.

Proof that fp8 is active: products of 128 or 256 terms that come out right only with 8-bit operands in blocks.

Each check reads one element of a product in which one operand's row or column holds 448, e4m3's largest, so that its
block's scale is exactly 1 (fp32 or power of two alike) and its neighbours show their codes: 1 + 1/16 lies half-way
between 1 and 1 + 1/8 in e4m3, is nearest 1 in e5m2, and is a value of every base.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mantissa.errors import MantissaError
from mantissa.kernels.interface import Kernels
from mantissa.precision import FP32, BlockScaled, Fp8Policy, round_to_format

Check = tuple[str, float, float]  # what it shows, the value it gave, the value it must give

_HALF_WAY = 1 + 1 / 16
_ROWS, _SIZE = 128, 256
WEIGHT: tuple[int, ...] = (_SIZE, _SIZE)  # the shape of every weight that is multiplied here


def fp8_checks(kernels: Kernels, fp8: Fp8Policy, device: torch.device | str) -> list[Check]:
    """What the probe asks of a family with fp8 products; ``fp8`` is the policy it says it follows.

    Forward: e4m3 rounding of x and of the weight, the weight from its fp32 master, a scale for each row and each 128
    values and no fewer, of the policy's kind, and layers outside the policy untouched. Backward, where weights are
    masters: the gradient's format in both products, the direction of the blocks, and an overflow that stays one.
    """
    layer = _quantized_layer(fp8)
    checks = _fp8_forward_checks(_Products(kernels, device), fp8, layer)
    if not getattr(kernels, "weights_on_grid", False):  # a rollout's copy, which has no gradient
        checks += _fp8_gradient_checks(_Products(kernels, device), fp8, layer)
    return checks


Entries = dict[tuple[int, int], float]


class _Products:
    """Products of matrices that are zero but for a few entries."""

    def __init__(self, kernels: Kernels, device: torch.device | str) -> None:
        self.kernels, self.device = kernels, device
        self.on_grid = getattr(kernels, "weights_on_grid", False)

    def forward(self, layer: str, x: Entries, w: Entries, copy: bool = False) -> Tensor:
        with torch.no_grad():
            return self.kernels.linear(self._x(x), self._weight(layer, w, copy), None, layer)

    def grad_x(self, layer: str, grad: Entries, w: Entries) -> Tensor:
        x = self._x({}).requires_grad_()
        out = self.kernels.linear(x, self._filled(w, torch.float32), None, layer)
        return torch.autograd.grad(out, x, self._filled(grad, out.dtype, _ROWS))[0]

    def grad_weight(self, layer: str, grad: Entries, x: Entries) -> Tensor:
        master = self._filled({}, torch.float32).requires_grad_()
        out = self.kernels.linear(self._x(x), master, None, layer)
        return torch.autograd.grad(out, master, self._filled(grad, out.dtype, _ROWS))[0]

    def _x(self, entries: Entries) -> Tensor:
        return self._filled(entries, self.kernels.dtype, _ROWS)

    def _weight(self, layer: str, entries: Entries, copy: bool) -> Tensor | BlockScaled:
        master = self._filled(entries, torch.float32)
        return self.kernels.copied(master, layer) if self.on_grid or copy else master

    def _filled(self, entries: Entries, dtype: torch.dtype, rows: int = _SIZE) -> Tensor:
        filled = torch.zeros(rows, _SIZE, dtype=torch.float32)
        for (row, column), value in entries.items():
            filled[row, column] = value
        return filled.to(self.device, dtype)


def _fp8_forward_checks(products: _Products, fp8: Fp8Policy, layer: str) -> list[Check]:
    def first(x: Entries, w: Entries, layer: str = layer, copy: bool = False) -> float:
        return products.forward(layer, x, w, copy)[0, 0].item()

    largest = fp8.forward_format.largest
    kept, half_way = {(0, 0): 1.0}, {(0, 0): _HALF_WAY}
    beside = {(0, 128): largest, (128, 0): largest}
    near, far_x, far_w = {(0, 1): largest}, {(0, 127): largest}, {(127, 127): largest}  # meet nothing that is read
    tiny, tinier = 2.0**-12, 2.0**-20
    kind = "a power of two" if fp8.power_of_two else "its largest value"
    outside = {"what has no name": "", **{pattern: f"layers.{pattern}" for pattern in fp8.exclude}}
    return [
        ("rounds an input of 1+1/16 to 1", first({**half_way, **near}, kept), 1.0),
        ("keeps an input of 1+1/8", first({(0, 0): 1.125, **near}, kept), 1.125),
        ("rounds a weight of 1+1/16 to 1", first(kept, {**half_way, **near}), 1.0),
        # a little more than half-way, which no base can hold: it is lost where the weight's half copy is quantised
        ("quantises the fp32 master", first(kept, {(0, 0): _HALF_WAY + 2.0**-14, **near}), 1.125),
        ("multiplies a copy as its master", first({(0, 0): 3.0}, {**half_way, **near}, copy=True), 3.0),
        ("shares a scale among 128 inputs", first({(0, 0): tiny, **far_x}, kept), 0.0),
        ("shares a scale among 128 by 128 weights", first(kept, {(0, 0): tiny, **far_w}), 0.0),
        ("gives 128 other inputs another", first({(0, 128): tinier, **far_x}, {(0, 128): 1.0}), tinier),
        ("gives another row's inputs another", first({(0, 0): tinier, (1, 0): largest}, kept), tinier),
        ("gives 128 other weights another", first(kept, {(0, 0): tinier, **beside}), tinier),
        # 300 is no e4m3 value: a scale of 300/448 makes it 448, a scale of 1 makes it 288
        (f"scales by {kind}", first({(0, 0): 300.0}, kept), 288.0 if fp8.power_of_two else 300.0),
        *(
            (f"leaves {what} in the base", first({**half_way, **near}, kept, name), _HALF_WAY)
            for what, name in outside.items()
        ),
    ]


def _fp8_gradient_checks(products: _Products, fp8: Fp8Policy, layer: str) -> list[Check]:
    fmt = fp8.backward_format
    # 448 is a power of two times e5m2's largest too, so the scale changes no digit there either
    in_format = {"e4m3": (1.0, 1.125), "e5m2": (1.0, 1.0), "high": (_HALF_WAY, 1.125)}[fp8.backward]
    digits = f"{fmt or fp8.base}'s digits"
    of_input = f"{fp8.base if fmt is None else fp8.forward_format}'s digits"
    checks: list[Check] = []
    for value, expected in zip((_HALF_WAY, 1.125), in_format, strict=True):
        # grad x[0, 0] = sum over f of grad[0, f] w[f, 0]: f = 0 is read, f = 1 sets the scale
        got = products.grad_x(layer, {(0, 0): value, (0, 1): 448.0}, {(0, 0): 1.0})[0, 0].item()
        checks.append((f"gives a gradient of {value:g} {digits}", got, expected))
        # grad W[0, 0] = sum over n of grad[n, 0] x[n, 0]: the scale is set by another token
        got = products.grad_weight(layer, {(0, 0): value, (1, 0): 448.0}, {(0, 0): 1.0, (2, 0): 448.0})[0, 0].item()
        checks.append((f"gives a weight's gradient of {value:g} {digits}", got, expected))
        got = products.grad_weight(layer, {(0, 0): 1.0, (2, 0): 448.0}, {(0, 0): value, (1, 0): 448.0})[0, 0].item()
        operand = value if fmt is None else (1.0 if value == _HALF_WAY else value)
        checks.append((f"gives the input beside it, {value:g}, {of_input}", got, operand))
    lost = products.grad_x(layer, {(0, 0): math.inf, (0, 1): 1.0}, {(0, 0): 1.0, (1, 0): 1.0})[0, 0]
    checks.append(("passes an overflowed gradient on", float(lost.isfinite().item()), 0.0))
    lost = products.grad_weight(layer, {(0, 0): math.inf}, {(0, 0): 1.0})[0, 0]
    checks.append(("passes it on to the weight's", float(lost.isfinite().item()), 0.0))
    return checks


def _quantized_layer(fp8: Fp8Policy) -> str:
    """The name of a layer that the policy quantises, whatever it excludes by number."""
    for index in range(len(fp8.exclude) + 1):
        name = f"layers.{index}.proved"
        if fp8.quantizes(name):
            return name
    raise MantissaError("precision.fp8.exclude leaves no layer in fp8; exclude less, or ask for the base format")


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
