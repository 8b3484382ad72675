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
from typing import Any

import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.kernels import cpu
from mantissa.kernels.compiled import Laid
from mantissa.kernels.cpu import Products
from mantissa.kernels.interface import Kernels
from mantissa.kernels.native import NativeKernels
from mantissa.kernels.simulated import SimulatedKernels
from mantissa.precision import (
    E4M3,
    FP16,
    FP32,
    SCHEMES,
    BlockScaled,
    Fp8Policy,
    NumberFormat,
    Quantized,
    format_named,
    round_to_format,
)

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
    if isinstance(fp8, Quantized):
        return _scheme_checks(_Products(kernels, device), fp8, layer)
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
        if not self.on_grid and not copy:
            return master
        made = self.kernels.copied(master, layer)
        if isinstance(made, Tensor):
            return made
        return BlockScaled(self.kernels.laid(made, layer), made.scales)  # as a rollout keeps codes

    def _filled(self, entries: Entries, dtype: torch.dtype, rows: int = _SIZE) -> Tensor:
        filled = torch.zeros(rows, _SIZE, dtype=torch.float32)
        for (row, column), value in entries.items():
            filled[row, column] = value
        return filled.to(self.device, dtype)


def _fp8_forward_checks(products: _Products, fp8: Fp8Policy, layer: str) -> list[Check]:
    def first(x: Entries, w: Entries, layer: str = layer, copy: bool = False) -> float:
        return products.forward(layer, x, w, copy)[0, 0].item()

    largest = E4M3.largest
    kept, half_way = {(0, 0): 1.0}, {(0, 0): _HALF_WAY}
    beside = {(0, 128): largest, (128, 0): largest}
    near, far_x, far_w = {(0, 1): largest}, {(0, 127): largest}, {(127, 127): largest}  # meet nothing that is read
    tiny, tinier = 2.0**-12, 2.0**-20
    kind = "a power of two" if fp8.power_of_two else "its largest value"
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
            for what, name in _outside(fp8).items()
        ),
    ]


def _fp8_gradient_checks(products: _Products, fp8: Fp8Policy, layer: str) -> list[Check]:
    fmt = fp8.backward_format
    # 448 is a power of two times e5m2's largest too, so the scale changes no digit there either
    in_format = {"e4m3": (1.0, 1.125), "e5m2": (1.0, 1.0), "high": (_HALF_WAY, 1.125)}[fp8.backward]
    digits = f"{fmt or fp8.base}'s digits"
    of_input = f"{fp8.base if fmt is None else E4M3}'s digits"
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


# What 0.3 becomes beside 6 in a block, as a weight: computed by hand from the table of schemes.
_BESIDE_SIX = {"mxfp8": 0.3125, "mxfp4": 0.5, "nvfp4": 0.5, "int8": 6 * 6 / 127.5, "int4": 0.0, "int4-32": 0.0}
_OF_SIX = {"int4": 7 * 0.8, "int4-32": 7 * 0.8, "int8": 127 * 6 / 127.5}


def _scheme_checks(products: _Products, quantized: Quantized, layer: str) -> list[Check]:
    """A weight of 6 and 0.3 in one block, read one by one; a layer outside of the policy; both operands or one."""
    weight: Entries = {(0, 0): 6.0, (0, 1): 0.3}
    base, copy = format_named(quantized.base), products.on_grid

    def read(column: int, name: str = layer, value: float = 1.0) -> float:
        return products.forward(name, {(0, column): value}, weight, copy=copy)[0, 0].item()

    def in_base(value: float) -> float:
        return round_to_format(torch.tensor(value, dtype=torch.float32), base).item()

    one = float(SCHEMES[quantized.scheme].activation(torch.ones(1, 1))[0, 0])
    sums: list[Check] = []
    if quantized.scheme == "int8":  # products of 127 * 127 that older processors add in 16 bits, and cut off
        full: Entries = {(0, column): 1.0 for column in range(_SIZE)}
        got = products.forward(layer, full, full, copy=copy)[0, 0].item()
        sums.append((f"adds {_SIZE} of its largest products", got, in_base(_SIZE * one * one)))
    return [
        *sums,
        (f"quantises a weight of 6 to {quantized.scheme}", read(0), in_base(_OF_SIX.get(quantized.scheme, 6.0) * one)),
        ("quantises 0.3 beside 6 by their block's scale", read(1), in_base(_BESIDE_SIX[quantized.scheme] * one)),
        *(
            (f"leaves {what} in the base", read(1, name), in_base(in_base(0.3)))
            for what, name in _outside(quantized).items()
        ),
    ]


def _quantized_layer(fp8: Fp8Policy) -> str:
    """The name of a layer that the policy quantises, whatever it excludes by number."""
    for index in range(len(fp8.exclude) + 1):
        for pattern in fp8.only or ("proved",):
            name = pattern if "layers" in pattern.split(".") else f"layers.{index}.{pattern}"
            if fp8.quantizes(name):
                return name
    raise MantissaError(f"{fp8.called}.exclude leaves no layer in {fp8.kind}; exclude less, or ask for the base format")


def _outside(fp8: Fp8Policy) -> dict[str, str]:
    """Names of layers that the policy leaves in the base, by what they stand for."""
    excluded = {pattern: f"layers.{pattern}" for pattern in fp8.exclude}
    other = "layers.other"  # than those that it names
    return {"what has no name": "", **excluded, **({} if fp8.quantizes(other) else {"other layers": other})}


def probe(kernels: Kernels, device: torch.device | str) -> str:
    """Check rounding, accumulation, overflow and the gradients' rounding of ``kernels``; return one line of evidence.

    The products' checks are those of ``product_checks``, and a master weight of 1 + u/4 becomes 1, unless the weights
    given are already on the grid. Logits of 1 + u/4 are rounded to the logits' format only. Where some products have
    fp8 operands those of ``fp8_checks`` follow; the others prove the base. Raises ``MantissaError`` naming the check
    that failed.
    """
    on_grid, fp8 = getattr(kernels, "weights_on_grid", False), getattr(kernels, "fp8", None)
    u, logits_format = kernels.format.epsilon, kernels.logits_format

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return kernels.linear(x.to(kernels.dtype), weight)

    checks = product_checks(kernels.format, linear, device, torch.autograd.grad, of_weight=not on_grid)
    if isinstance(kernels, NativeKernels | SimulatedKernels) and torch.device(device).type == "cpu":
        checks += [*way_checks(kernels.products), *laid_checks(kernels), *compiled_checks(kernels)]
    logits = kernels.logits(first_row([1.0, u / 4], device).to(kernels.dtype), first_row([1.0, 1.0], device))
    exact = torch.tensor(1 + u / 4, dtype=torch.float64)
    expected = round_to_format(exact, logits_format).item()
    checks.append((f"holds logits in {logits_format}", logits[0, 0].item(), expected))
    if not on_grid:
        weight = kernels.weight(torch.full((8, 8), 1 + u / 4, dtype=torch.float32, device=device))
        checks.append(("rounds a weight of 1+u/4 to 1", weight[0, 0].item(), 1.0))
    where = f"in the {type(kernels).__name__} on {device}"
    evidence = proved(checks, kernels.format.name, where)
    return evidence if fp8 is None else f"{evidence}; {proved(fp8_checks(kernels, fp8, device), fp8.kind, where)}"


def way_checks(products: Products) -> list[Check]:
    """What each library beside torch's own must show, in the smallest product that it has of each side: sums of
    integers that fp32 holds are exact, and operands keep all the digits that they may have (24 bits, or bf16's 8)."""
    checks: list[Check] = []
    generator, table, operands = torch.Generator().manual_seed(0), products.table or cpu.products(), products.operands
    digits = 1 + 2.0**-7 if operands == "bf16" else 1 + 2.0**-23
    sides: tuple[cpu.Side, ...] = ("forward", "input", "weight", "heads")
    for side in sides:
        call = cpu.heads if side == "heads" else cpu.multiply
        for way, name, (rows, inner, outer) in table.smallest(operands, side):
            x, y = cpu.operands_of(side, rows, inner, outer, generator)
            exact = x.double() @ (y if side == "heads" else y.t()).double()
            one = torch.zeros_like(y)
            one[..., 0, 0] = 1.0
            kept = call(way, torch.full_like(x, digits), one)[..., 0]
            wrong = (call(way, x, y).double() != exact).sum() + (kept != digits).sum()
            checks.append((f"multiplies exactly by {name} ({side})", float(wrong), 0.0))
    return checks


def laid_checks(kernels: Kernels) -> list[Check]:
    """What the compiled products must show, where this family's copies are laid out for them: sums of integers that
    fp32 holds are exact, and the copy keeps all the digits of the format."""
    weight, x = cpu.operands_of("forward", 7, 256, 256, torch.Generator().manual_seed(0))[::-1]
    weight[0] = 0.0
    weight[0, 0] = digits = 1 + kernels.format.epsilon
    copy = kernels.copied(weight, "lm_head")  # which is never quantised
    laid = kernels.laid(copy, "lm_head") if isinstance(copy, Tensor) else copy
    if not isinstance(laid, Laid):
        return []
    wrong = (laid.product(x)[:, 1:].double() != x.double() @ weight[1:].double().t()).sum()
    kept = laid.product(torch.eye(256)[:1])[0, 0].item()
    return [(f"multiplies copies exactly by compiled products ({laid.kind})", float(wrong) + abs(kept - digits), 0.0)]


def compiled_checks(kernels: NativeKernels | SimulatedKernels) -> list[Check]:
    """What compiled attention and rows must show where this family computes by them: each keeps the format's digits,
    and a row attends to what it sees alone."""
    fmt, checks = kernels.format, list[Check]()
    digits = 1 + fmt.epsilon
    with torch.no_grad():
        q_BHD = torch.zeros(2, 2, 64).to(kernels.dtype)
        keys = torch.zeros(2, 1, 8, 64).to(kernels.dtype)  # which all score alike: of four, a quarter is each one's
        if kernels.compiles(q_BHD, part="attention"):
            got = kernels.cached_attention(q_BHD, keys, keys + digits, torch.full((2,), 4)).double()
            values = (keys + digits).masked_fill(torch.arange(8).view(8, 1) >= 4, 0.0)
            seen = kernels.cached_attention(q_BHD, keys, values, torch.full((2,), 4)).double()
            wrong = (got - digits).abs().sum() + (seen - got).abs().sum()
            checks.append(("attends exactly by compiled code", float(wrong), 0.0))
        ones = torch.ones(3, 64).to(kernels.dtype)
        if kernels.compiles(ones):
            norm = kernels.rms_norm(ones, ones[0] * digits, 0.0).double() - digits
            gated = kernels.swiglu(ones * 32, ones * digits).double() - 32 * digits  # e^-32 is nothing beside 1
            angles = torch.ones(1, 1, 64), torch.zeros(1, 1, 64)
            turned = kernels.rotate(ones.view(1, 3, 1, 64) * digits, *angles).double()
            wrong = norm.abs().sum() + gated.abs().sum() + (turned - digits).abs().sum()
            checks.append(("computes rows exactly by compiled code", float(wrong), 0.0))
    return checks


def proved(checks: list[Check], name: str, where: str, also: str = "") -> str:
    """What was shown, on one line. ``MantissaError`` where a check gave another value than it must."""
    for what, got, expected in checks:
        if got != expected:
            raise MantissaError(
                f"precision: {name} is not active {where}: it should show that it {what} (expected {expected!r}, got "
                f"{got!r}); check TF32 settings{also} and the torch build"
            )
    return "; ".join(what for what, _, _ in checks)


Linear = Callable[[Tensor, Tensor], Tensor]  # x and a master weight, both fp32


def product_checks(
    fmt: NumberFormat, linear: Linear, device: torch.device | str, grad: Callable[..., Any], of_weight: bool = True
) -> list[Check]:
    """What the products of ``linear`` must show in ``fmt``, forward and, by ``grad``, in both gradients.

    With u = 2^-mantissa_bits (the distance from 1 to the next value): 1 + u stays; 1 + u/4 becomes 1; 2/u + 1 + 1
    becomes 2/u + 2 (it stays 2/u where the accumulator is rounded to the format after each addition). With 5 exponent
    bits 32768 * 4 becomes inf and 2^-13 * 2^-13 becomes 0. For fp32 the first check is what TF32 would fail: 1 + 2^-23
    must stay. ``of_weight``: whether the weight has a gradient.
    """
    u = fmt.epsilon
    cases = [("keeps {}1+u", [1.0], [1.0 + u], 1.0 + u), ("rounds {}1+u/4 to 1", [1.0, u / 4], [1.0, 1.0], 1.0)]
    if fmt is not FP32:  # whose accumulator is no wider than itself
        cases.append(("accumulates {}wider than it stores", [2 / u, 1.0, 1.0], [1.0, 1.0, 1.0], 2 / u + 2))
    if fmt.exponent_bits == FP16.exponent_bits:
        cases.append(("overflows {}131072 to inf", [32768.0], [4.0], math.inf))
        cases.append(("flushes {}2^-26 to 0", [2.0**-13], [2.0**-13], 0.0))

    def gradient(a: Tensor, b: Tensor, wanted: int) -> float:
        """sum_i a_i b_i as the gradient of x (0), whose weight is b, or of a weight (1), whose input is b."""
        leaves = [torch.zeros_like(b), b.t().contiguous()]
        leaf = leaves[0].requires_grad_()
        with torch.enable_grad():
            out = linear(*(leaves if wanted == 0 else reversed(leaves)))
        seed = (a if wanted == 0 else a.t().contiguous()).to(out.dtype)
        return grad(out, leaf, seed)[0][0, 0].item()

    checks: list[Check] = []
    for name in ("", "a gradient of ", "a weight's gradient of ")[: 3 if of_weight else 2]:
        for says, a, b, expected in cases:
            row_a, row_b = first_row(a, device), first_row(b, device)
            if name:
                got = gradient(row_a, row_b, wanted=int("weight" in name))
            else:
                with torch.no_grad():
                    got = linear(row_a, row_b)[0, 0].item()
            named = name.removesuffix("of ") if says.startswith("accumulates") else name
            checks.append((says.format(named), got, expected))
    return checks


def first_row(values: list[float], device: torch.device | str) -> Tensor:
    """``values`` as the start of the first row of zeros, 8 by 8, fp32: some kernels need multiples of 8."""
    rows = torch.zeros(8, 8, dtype=torch.float32, device=device)
    rows[0, : len(values)] = torch.tensor(values, dtype=torch.float32, device=device)
    return rows
