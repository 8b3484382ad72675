"""The products of the fast families on a CPU: by the library that was measured to be the faster one for a shape.

What torch calls for ``x @ w^T`` packs the weight anew at each call, which for a few rows costs as much as the product:
16 rows of a 576 x 3072 weight run at 40 GFLOP/s on one core of an AMD EPYC (Zen 4, AVX-512) whose peak is 105. oneDNN,
which comes with torch, gives 48 there, and 73 where the weight was packed beforehand. On Zen 5 it takes less than half
of the other's time from 64 rows on, in all three products of a linear map (576 x 1536, one thread).

A weight that does not train is kept in the layout that its product reads fastest: for the compiled products
(``compiled.py``) where those were measured not to be the slower ones, else for oneDNN's. Its values are the same, and
``to_dense`` gives them back. In bf16, where the processor multiplies it itself, oneDNN's packed product takes half of
fp32's time from one row on (1 to 512 rows of 576 x 1536, AMD Zen 5): its weight has half the bytes.

Processors with AMX (Intel's servers from Sapphire Rapids on) or AVX512-BF16 (AMD from Zen 4 on, Intel's Cooper Lake)
multiply bf16 values exactly and add in fp32; on others the same call widens its operands and is no faster than fp32.
VNNI (AVX512-VNNI, AVX-VNNI, AMX) multiplies int8 and adds in int32, exactly. Torch comes with two libraries for fp32,
and which is faster depends on the processor and the shape: MKL behind ``torch.mm``, and oneDNN. oneDNN may also be told
that its fp32 operands hold values of bf16, which it then multiplies as such: the sum and the result stay fp32.

What a library makes of a processor cannot be read from its name: instructions may be held back
(``ONEDNN_MAX_CPU_ISA``). So each way is timed over a few shapes, and used only where its sums of integers are exact, as
fp32 has them. That takes a second or two, once a machine: the result is kept in the user's cache folder, by processor,
versions and held-back instructions, in a run's ``environment.json``, and held fixed by a resume.

Legend: N rows (any leading shape), E features in, F features out; the three products of a linear map are y = x W^T
(``forward``), the gradient of x, g W (``input``), and the gradient of W, g^T x (``weight``). ``heads``: products of
attention's heads.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.base.environ import CPU_MODEL
from mantissa.base.errors import MantissaError
from mantissa.base.readers.json import parse_json
from mantissa.kernels import compiled
from mantissa.kernels.compiled import FP8, FP8_BY_POWER_OF_TWO, KINDS, PARTS, Kind, Laid, Part
from mantissa.precision import (
    ALONG_ROWS,
    BLOCK,
    E4M3,
    FP32,
    SCHEMES,
    SQUARE,
    BlockScaled,
    Fp8Policy,
    NumberFormat,
    Quantized,
    formats,
    int8_codes,
    quantized,
    round_in_blocks,
)

Side = Literal["forward", "input", "weight", "heads"]
Operands = Literal["fp32", "bf16"]  # what fp32 tensors hold: any values, or values on bf16's grid
_SIDES: tuple[Side, ...] = ("forward", "input", "weight", "heads")
TORCH, ONEDNN, BF16 = "t", "o", "b"  # the ways: torch's own, oneDNN in fp32, oneDNN told that bf16 is enough
_NAMES = {TORCH: "torch", ONEDNN: "oneDNN", BF16: "oneDNN with bf16 allowed"}

_CLASSES = (1, 4, 16, 64, 256, 1024)  # of rows, and below of weights (features in, out): each stands for its like
_WEIGHTS = ((64, 64), (128, 256), (512, 512), (1024, 2048))
_LARGEST = 1 << 29  # multiplications that are timed; a larger class goes the way of its next smaller
_ROWS, _IN, _OUT = 256, 576, 1536  # a small model's projection, by which bf16 and int8 are told: 0.45 GFLOP
_ROUNDS = 4
# Of fp32's time: what is slower than this is not the processor's own. Seen: 0.5 where it is, 1 and more elsewhere.
_GAIN = 0.8
_WORTH = 0.95  # of torch's time: a way that gains less is not taken
# Of another library's time, what is compiled may take: where all parts are, a decode step is one call, which saves more
# than a busy machine's times scatter (one row of SmolLM2 in fp32 40 ms, and 68 without; Emerald Rapids).
_COMPILED_ROUNDS, _COMPILED_WORTH = 8, 1.1
_SMALL_PRODUCT = 1 << 21  # multiplications from which an unmeasured product goes to oneDNN
_ONEDNN = torch.backends.mkldnn.is_available()
_SMALL_WEIGHT = 1 << 16
_SMALL_LAID = 1 << 12  # of a compiled product: 512 rows by 128 x 128 in three quarters of torch's time
_DECODED, _DECODED_ROWS = (1024, 4096), (1, 16, 64)  # a large weight, and rows decoded at a time
_AS_IT_IS = nullcontext()
_INT8_FEATURES = (1 << 17) - 1  # of 128 * 128 each: one more could make 2^31


class Products:
    """The three products of a linear map, each by the way that was measured to be the fastest for its shape.

    ``operands``: what the fp32 tensors hold, any values or bf16's; what has bf16's dtype has one way. ``table``: what
    was measured (``CpuProducts``); None: on this machine. Not differentiable: for use inside an operation.
    """

    def __init__(self, operands: Operands = "fp32", table: CpuProducts | None = None) -> None:
        self.operands, self.table = operands, table

    def _way(self, side: Side, x: Tensor, rows: int, weight: int) -> str:
        if x.is_cuda:
            return TORCH
        if self.table is None:  # not before there is a product: what runs on a GPU needs none
            self.table = products()
        return self.table.way(self.operands, side, rows, weight)

    def forward(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None) -> Tensor:
        """x @ weight^T + bias in the dtype of x; ``weight_FE`` may be laid out."""
        if isinstance(weight_FE, Laid):
            return weight_FE.product(x_NE, bias_F, x_NE.dtype)
        if weight_FE.is_mkldnn:
            return multiply(ONEDNN, x_NE, weight_FE, bias_F)
        way = self._way("forward", x_NE, x_NE.numel() // max(1, x_NE.shape[-1]), weight_FE.numel())
        return multiply(way, x_NE, weight_FE, bias_F)

    def to_float(self, x_NE: Tensor, weight_FE: Tensor) -> Tensor:
        """x @ weight^T of half tensors in fp32, unrounded: by compiled pairs of bf16, or of the widened operands."""
        pairs = x_NE.dtype is torch.bfloat16 and self.has("pairs", x_NE, formats.BF16)
        if pairs and compiled.fits(weight_FE.shape, "pairs"):
            return compiled.lay(weight_FE, "pairs").product(x_NE)
        return self.forward(x_NE.float(), weight_FE.float())

    def of_input(self, grad_NF: Tensor, weight_FE: Tensor) -> Tensor:
        """The gradient of x: grad @ weight."""
        rows = grad_NF.numel() // max(1, grad_NF.shape[-1])
        return multiply(self._way("input", grad_NF, rows, weight_FE.numel()), grad_NF, weight_FE.t())

    def of_weight(self, grad_NF: Tensor, x_NE: Tensor) -> Tensor:
        """The gradient of the weight: grad^T @ x, of two matrices."""
        way = self._way("weight", grad_NF, len(grad_NF), grad_NF.shape[1] * x_NE.shape[1])
        return multiply(way, grad_NF.t(), x_NE.t())

    @property
    def of_codes(self) -> bool:
        """Whether there is a product of 8-bit floating-point codes here."""
        return "codes" in (self.table or products()).compiled

    def laid(self, copy_FE: Tensor, kind: Kind) -> Tensor:
        """A copy that does not train, with values of ``kind``, in the layout that its product reads fastest."""
        if copy_FE.dim() != 2 or copy_FE.numel() < _SMALL_LAID or copy_FE.device.type != "cpu":
            return copy_FE
        if kind in (self.table or products()).compiled and compiled.fits(copy_FE.shape, kind):
            return compiled.lay(copy_FE, kind)
        return packed(copy_FE)

    def laid_codes(self, copy: BlockScaled, fp8: Fp8Policy) -> Tensor:
        """The codes of ``quantized_copy``, laid out with their scales; themselves where there is no product of them."""
        codes_FE, kept = copy.codes, (self.table or products()).compiled
        part: Literal["int8", "codes"] = "int8" if codes_FE.dtype is torch.int8 else "codes"
        laid = codes_FE.device.type == "cpu" and codes_FE.numel() >= _SMALL_LAID and part in kept
        if not laid or not compiled.fits(codes_FE.shape, part):
            return codes_FE
        if part == "int8":
            return compiled.lay_codes(codes_FE)
        return compiled.lay_scaled(codes_FE, copy.scales, _per(fp8), fp8.power_of_two)

    def has(self, part: Part, x_NE: Tensor, fmt: NumberFormat, width: int = 0) -> bool:
        """Whether that compiled part was measured to be faster here, and computes rows like these."""
        if x_NE.device.type != "cpu" or not compiled.computes(width or x_NE.shape[-1], fmt):
            return False
        return part in (self.table or products()).compiled

    def heads(self, x: Tensor, rows: int, values: int) -> AbstractContextManager[None]:
        """Within this, batched products take the way of ``rows`` rows by ``values`` values for each head."""
        return switched(self._way("heads", x, rows, values) == BF16)


def int8(
    x_NE: Tensor, weight_FE: BlockScaled, bias_F: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Q(x) Q(W)^T + bias, both operands int8: ``x_NE`` quantised here by row, the weight by row beforehand.

    The sum of the codes' products is exact, as int32, in whatever order a library adds. It is rounded to fp32 once,
    multiplied by the two scales, and rounded to ``dtype``: fp32, or bf16.
    """
    if x_NE.shape[-1] > _INT8_FEATURES:
        raise MantissaError(f"int8: a product sums {x_NE.shape[-1]:,} features, at most {_INT8_FEATURES:,} fit int32")
    if isinstance(weight_FE.codes, Laid):
        return weight_FE.codes.integer_product(x_NE, weight_FE.scales, bias_F, dtype)
    codes_NE, scales_N1 = int8_codes(x_NE.reshape(-1, x_NE.shape[-1]))
    sums_NF = torch._int_mm(codes_NE, weight_FE.codes.t()).float()
    out_NF = sums_NF.mul_(scales_N1).mul_(weight_FE.scales.view(-1))
    out_NF = out_NF if bias_F is None else out_NF.add_(bias_F)
    return out_NF.view(*x_NE.shape[:-1], len(weight_FE.codes)).to(dtype)


def quantized_copy(master_FE: Tensor, fp8: Fp8Policy, products: Products) -> Tensor | BlockScaled:
    """What a rollout keeps of a weight for ``quantized_product``: codes and the scales of each output's groups, all in
    fp32; its values in bf16, which holds those of powers of two, where no product of codes was measured to be good."""
    scheme = SCHEMES[fp8.scheme] if isinstance(fp8, Quantized) else None
    if scheme is not None and scheme.name == "int8":
        return BlockScaled(*int8_codes(master_FE))
    if not products.of_codes:
        return weight_values(master_FE, fp8).bfloat16()
    if scheme is None:
        blocks = quantized(master_FE, E4M3, SQUARE, fp8.power_of_two)
        return BlockScaled(blocks.codes, blocks.scales.repeat_interleave(BLOCK, 0)[: len(master_FE)])
    coded = scheme.encode(master_FE.detach().float(), False)
    if coded.total is not None:
        scales_FG = coded.scales.float().repeat_interleave(scheme.size or 1, 1)[:, : master_FE.shape[1]]
        return BlockScaled((coded.codes * scales_FG).bfloat16(), coded.total.expand(len(master_FE), 1))
    scales_FG = coded.scales
    if scales_FG.dtype is torch.uint8:
        scales_FG = torch.ldexp(torch.ones(scales_FG.shape), scales_FG.int() - 127)
    return BlockScaled(coded.codes.to(E4M3.dtype), scales_FG)  # which holds e2m1's codes and integers up to 16 too


def quantized_product(
    x_NE: Tensor, weight_FE: Tensor | BlockScaled, bias_F: Tensor | None, fp8: Fp8Policy, products: Products
) -> Tensor:
    """Q(x) Q(W)^T + bias of what ``quantized_copy`` keeps, rounded once to the dtype of ``x``."""
    if isinstance(weight_FE, Tensor) and weight_FE.dtype is torch.float32:  # a master
        weight_FE = quantized_copy(weight_FE, fp8, products)
    if isinstance(weight_FE, Tensor):
        multiplied = products.forward if compiled.is_laid(weight_FE) else F.linear
        return multiplied(activation_values(x_NE, fp8), weight_FE, bias_F)
    wide = None if bias_F is None else bias_F.float()
    if weight_FE.codes.dtype is torch.int8:
        return int8(x_NE.detach(), weight_FE, wide, x_NE.dtype)
    if isinstance(weight_FE.codes, Laid):
        return weight_FE.codes.coded_product(x_NE.detach(), activation_scheme(fp8), wide, x_NE.dtype)
    values_FE = weight_FE.codes.float()  # of a shape that is not laid out: the values themselves, in fp32
    values_FE *= weight_FE.scales.repeat_interleave(_per(fp8) or len(values_FE[0]), 1)[:, : values_FE.shape[1]]
    return F.linear(activation_values(x_NE.float(), fp8), values_FE, wide).to(x_NE.dtype)


def _per(fp8: Fp8Policy) -> int:
    """Inputs that share a scale; 0: all of an output's."""
    if not isinstance(fp8, Quantized):
        return BLOCK
    return 0 if fp8.scheme == "nvfp4" else SCHEMES[fp8.scheme].size or 0


def weight_values(master_FE: Tensor, fp8: Fp8Policy) -> Tensor:
    """The fp32 values of a weight's codes: what the simulated products multiply, in learner and rollout alike."""
    if isinstance(fp8, Quantized):
        return SCHEMES[fp8.scheme].encode(master_FE.detach().float(), False).values
    return round_in_blocks(master_FE, E4M3, SQUARE, fp8.power_of_two)


def activation_scheme(fp8: Fp8Policy) -> str | None:
    """What ``compiled.scaled`` knows the activations' grid by; None where they stay as they are."""
    if isinstance(fp8, Quantized):
        return fp8.scheme if SCHEMES[fp8.scheme].activations else None
    return FP8_BY_POWER_OF_TWO if fp8.power_of_two else FP8


def activation_values(x_NE: Tensor, fp8: Fp8Policy) -> Tensor:
    """The values of an activation as an operand of the forward product: fp32, or bf16 where that holds them."""
    scheme = activation_scheme(fp8)
    values_NE = x_NE if scheme is None else compiled.scaled(x_NE, scheme)
    if values_NE is not None:
        return values_NE
    if isinstance(fp8, Quantized):
        return SCHEMES[fp8.scheme].activation(x_NE).to(x_NE.dtype)
    return round_in_blocks(x_NE, E4M3, ALONG_ROWS, fp8.power_of_two).to(x_NE.dtype)


def packable(shape: tuple[int, ...]) -> bool:
    """Whether a weight of this shape gains from oneDNN and its layout."""
    return _ONEDNN and len(shape) == 2 and math.prod(shape) >= _SMALL_WEIGHT


def joinable(weights_FE: Sequence[Tensor]) -> bool:
    """Whether these weights of one input gain from being one product's: each would be laid out."""
    return all(_lays_out(weight, _SMALL_LAID) for weight in weights_FE)


def packed(weight_FE: Tensor) -> Tensor:
    """``weight_FE`` in the layout that a product reads fastest; itself where that is the one it has."""
    if not _lays_out(weight_FE):
        return weight_FE
    return _reordered(weight_FE)


def _reordered(weight_FE: Tensor) -> Tensor:
    layout: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_FE.contiguous())
    return layout


def _lays_out(weight_FE: Tensor, least: int = _SMALL_WEIGHT) -> bool:
    own = weight_FE.dtype is torch.bfloat16 and "bf16" in products().own  # else oneDNN may have no such product
    known = weight_FE.device.type == "cpu" and (weight_FE.dtype is torch.float32 or own)
    return known and _ONEDNN and weight_FE.dim() == 2 and weight_FE.numel() >= least


def multiply(way: str, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias by ``way``. Not differentiable.

    Both may be transposed; oneDNN reads parts of larger matrices by a loop a thousand times slower: those are torch's.
    """
    if way == TORCH or not (weight_FE.is_mkldnn or _is_whole(weight_FE)):
        return F.linear(x_NE, weight_FE, bias_F)
    if not x_NE.numel():
        return x_NE.new_zeros(*x_NE.shape[:-1], weight_FE.shape[0])
    x_NE = x_NE if _is_whole(x_NE) else x_NE.contiguous()
    if way != BF16:
        return onednn(x_NE, weight_FE, bias_F)
    with switched():
        return onednn(x_NE, weight_FE, bias_F)


def onednn(x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """The same by oneDNN; ``weight_FE`` may be in a layout of its own."""
    out_NF: Tensor = torch.ops.mkldnn._linear_pointwise(x_NE, weight_FE, bias_F, "none", [], "")
    return out_NF


def _is_whole(x: Tensor) -> bool:
    return x.is_contiguous() or (x.dim() == 2 and x.t().is_contiguous())


def switched(on: bool = True) -> AbstractContextManager[None]:
    """Within this, oneDNN may multiply fp32 tensors as bf16: only for operands that hold bf16's values.

    The switch is the process's, so it is set around our own products and put back: what another thread multiplies in
    that moment, in fp32, would be rounded too.
    """
    return _switched() if on else _AS_IT_IS  # which costs nothing: attention asks once a layer


@contextmanager
def _switched() -> Iterator[None]:
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _unmeasured() -> dict[str, tuple[str, ...]]:
    """Ways that hold on any machine: oneDNN where a product is large, torch's own for the weight's gradient."""
    by_size = tuple(
        "".join(ONEDNN if rows * inner * outer >= _SMALL_PRODUCT else TORCH for rows in _CLASSES)
        for inner, outer in _WEIGHTS
    )
    plain = (TORCH * len(_CLASSES),) * len(_WEIGHTS)
    of = {"forward": by_size, "input": plain, "weight": plain, "heads": plain}
    return {f"{kind} {side}": of[side] for kind in ("fp32", "bf16") for side in _SIDES}


@dataclass(frozen=True)
class CpuProducts:
    """Seconds of a product over those of the same one in fp32, each the least of some rounds: ``ratio`` that of bf16
    tensors, ``int8_ratio`` int8's; inf where a library has no such product, or one that is not exact.

    ``ways``: by what operands hold and the product's side, a string for each class of weights, a letter of it for each
    class of rows. ``flushes``: whether products of bf16 tensors take magnitudes below 2^-126 for zero, as the
    instructions of AVX512-BF16 and AMX do. ``compiled``: the kinds of weights that do not train whose compiled products
    (``compiled.py``) take less time than oneDNN's.
    """

    ratio: float
    int8_ratio: float = math.inf
    ways: Mapping[str, tuple[str, ...]] = field(default_factory=_unmeasured, hash=False)
    flushes: bool = False
    compiled: tuple[Part, ...] = ()

    @property
    def own(self) -> frozenset[str]:
        """The formats that the processor multiplies itself, faster than fp32: of ``bf16``, ``int8``."""
        ratios = {"bf16": self.ratio, "int8": self.int8_ratio}
        return frozenset(name for name, ratio in ratios.items() if ratio <= _GAIN)

    def way(self, operands: Operands, side: Side, rows: int, weight: int) -> str:
        """The way of a product of ``rows`` rows and a matrix of ``weight`` values: the class that is nearest."""
        return chosen(self.ways[f"{operands} {side}"], rows, weight)

    def smallest(self, operands: Operands, side: Side) -> Iterator[tuple[str, str, tuple[int, int, int]]]:
        """Each way but torch's own, what it is called, and the smallest class (rows, features in and out) it serves."""
        found: dict[str, tuple[int, int, int]] = {}
        for sizes, letters in zip(_WEIGHTS, self.ways[f"{operands} {side}"], strict=True):
            for rows, way in zip(_CLASSES, letters, strict=True):
                found.setdefault(way, (rows, *sizes))
        yield from ((way, _NAMES[way], shape) for way, shape in found.items() if way != TORCH)

    def record(self) -> dict[str, Any]:
        """Plain values, of which ``of`` makes the same again."""
        ratios = {"bf16": self.ratio, "int8": self.int8_ratio}
        finite = {name: ratio if math.isfinite(ratio) else None for name, ratio in ratios.items()}
        return {
            **finite,
            "flushes": self.flushes,
            "compiled": list(self.compiled),
            "ways": {key: list(rows) for key, rows in self.ways.items()},
        }

    @staticmethod
    def of(record: Any) -> CpuProducts:
        """What ``record`` wrote. ``MantissaError`` for anything else."""
        try:
            ratios = [math.inf if record[name] is None else float(record[name]) for name in ("bf16", "int8")]
            ways = {key: tuple(record["ways"][key]) for key in _unmeasured()}
            flushes = record["flushes"]
            parts = tuple(part for part in PARTS if part in record.get("compiled", ()))  # an older run has none
        except (KeyError, TypeError, ValueError, AttributeError):
            raise MantissaError(f"{record!r:.60}: expected a table of products, as runs write it") from None
        if not all(_is_ways(rows, key.startswith("bf16")) for key, rows in ways.items()):
            raise MantissaError("a table of products has other ways or sizes than runs write; measure it anew")
        if not all(ratio > 0 for ratio in ratios) or not isinstance(flushes, bool):
            raise MantissaError(f"a table of products has ratios {ratios}; expected positive numbers")
        if len(parts) != len(record.get("compiled", ())):
            raise MantissaError(f"a table of products has compiled ones of {record['compiled']}; expected of {PARTS}")
        return CpuProducts(ratios[0], ratios[1], ways, flushes, parts)

    def __str__(self) -> str:
        ratios = {"bf16": self.ratio, "int8": self.int8_ratio}
        each = ", ".join(f"{name} {'none' if math.isinf(ratio) else f'{ratio:.2f}'}" for name, ratio in ratios.items())
        return f"time of a product over fp32's ({_ROWS} x {_IN} x {_OUT}): {each}"

    def lines(self) -> list[str]:
        """Which way serves which shapes, for the screen: rows by way, a line for what operands hold and each side."""
        said: dict[str, list[str]] = {}
        for key, classes in self.ways.items():
            parts = [f"{inner}x{outer} {_runs_of(row)}" for (inner, outer), row in zip(_WEIGHTS, classes, strict=True)]
            what = _runs_of(classes[0]) if len(set(classes)) == 1 else "; ".join(parts)
            said.setdefault(what, []).append(key)
        rest = f" ({compiled.why_not()})" if compiled.why_not() else ""
        kinds, others = ([part for part in self.compiled if (part in KINDS) is wanted] for wanted in (True, False))
        products = f"compiled for {', '.join(kinds)}" if kinds else f"oneDNN{rest}"
        laid = "; also compiled: ".join([products, *([", ".join(others)] if others else [])])
        return [*(f"{', '.join(keys)}: {what}" for what, keys in said.items()), f"weights that do not train: {laid}"]


def _is_ways(rows: tuple[Any, ...], switch: bool) -> bool:
    known = {TORCH, ONEDNN, *([BF16] if switch else [])}
    right = (isinstance(row, str) and len(row) == len(_CLASSES) and set(row) <= known for row in rows)
    return len(rows) == len(_WEIGHTS) and all(right)


def chosen(ways: Sequence[str], rows: int, weight: int) -> str:
    """The letter of ``ways`` for ``rows`` rows and a matrix of ``weight`` values."""
    of_weight = min(max(weight.bit_length() - 12, 0) // 3, len(_WEIGHTS) - 1)
    return ways[of_weight][min(rows.bit_length() // 2, len(_CLASSES) - 1)]


def _runs_of(row: str) -> str:
    """``torch, oneDNN from 16 rows on``: a class's letters in words."""
    parts = [_NAMES[row[0]]]
    for at in range(1, len(row)):
        if row[at] != row[at - 1]:
            parts.append(f"{_NAMES[row[at]]} from {_CLASSES[at]} rows on")
    return ", ".join(parts)


@functools.cache
def products() -> CpuProducts:
    """What was measured on this machine: from the user's cache folder, or measured now and put there.

    Of several processes that measure at once the first one's is kept, so that all have the same. Where nothing can be
    kept, the ways are those that hold on any machine: a process that goes on with another's work has the same.
    """
    about = {"cpu": CPU_MODEL, "capability": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}
    about |= {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(("ONEDNN_", "DNNL_", "MKL_"))
    }
    about["compiled"] = compiled.named()  # which a compiler that is installed later changes
    about["by"] = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]  # how it is measured and judged
    key = json.dumps({**about, "oneDNN": torch.backends.mkldnn.is_available()}, sort_keys=True)
    root = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))  # "~" where there is no home
    path = root / "mantissa" / f"products-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if path.is_absolute() and (kept := _read(path, key)) is not None:
        return kept
    found = measured()
    if path.is_absolute():
        with suppress(OSError):  # a folder that cannot be written to
            return _keep(path, key, found)
    return replace(found, ways=_unmeasured(), compiled=()) if torch.backends.mkldnn.is_available() else found


def _keep(path: Path, key: str, found: CpuProducts) -> CpuProducts:
    """Write the file and return what it then holds: of another process, where that was first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.write_text(json.dumps({"key": key, "products": found.record()}))
    try:
        os.link(beside, path)  # which fails where another process was first
    except FileExistsError:
        if (first := _read(path, key)) is not None:
            return first
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return found


def _read(path: Path, key: str) -> CpuProducts | None:
    """What the file keeps for ``key``; None where it does not."""
    try:
        if not path.is_file() or path.stat().st_size > 1 << 16:
            return None
        kept = parse_json(path.read_bytes())
        return CpuProducts.of(kept["products"]) if kept["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, MantissaError):
        return None


def measured() -> CpuProducts:
    """Time the products of this machine, with one thread: a second or two of its time.

    Two threads beside other work take any time, and what one gains they gain; so one table serves all numbers of them.
    A ratio is inf without oneDNN, or where it has no such product for this processor (held to AVX2, say), and int8's
    where a sum of products is wrong: before VNNI a processor adds pairs of them in 16 bits, and cuts off.
    """
    if not torch.backends.mkldnn.is_available():
        return CpuProducts(math.inf, ways={key: (TORCH * len(_CLASSES),) * len(_WEIGHTS) for key in _unmeasured()})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            ratios, generator = _ratios(), torch.Generator().manual_seed(0)
            ways = {}
            for side in _SIDES:
                ways[f"fp32 {side}"], ways[f"bf16 {side}"] = _of_side(side, generator)
            flushes = "bf16" in ratios and _flushes()
            faster = _compiled("bf16" in ratios, generator) + (_compiled_int8(generator) if "int8" in ratios else ())
            faster += _compiled_codes(generator) if "pairs" in faster and "codes" in compiled.parts() else ()
    finally:
        torch.set_num_threads(threads)
    return CpuProducts(ratios.get("bf16", math.inf), ratios.get("int8", math.inf), ways, flushes, faster)


def _compiled(own_bf16: bool, generator: torch.Generator) -> tuple[Part, ...]:
    """What is right of the compiled library, and no slower than oneDNN or torch over the rows of decode."""
    tried: list[Kind] = [kind for kind in compiled.kinds() if kind != "pairs" or own_bf16]
    if not tried:
        return ()
    x, weight = operands_of("forward", max(_DECODED_ROWS), *_DECODED, generator)
    exact, laid = multiply(ONEDNN, x, weight), {kind: compiled.lay(weight, kind) for kind in tried}
    tried = [kind for kind in tried if torch.equal(laid[kind].product(x), exact)]
    over = dict.fromkeys(tried, 0.0)
    for rows in _DECODED_ROWS:
        for dtype in (torch.float32, torch.bfloat16):
            ours = [kind for kind in tried if (kind == "pairs") == (dtype is torch.bfloat16)]
            if not ours:
                continue
            given, theirs = x[:rows].to(dtype), _reordered(weight.to(dtype))
            calls: dict[str, Callable[[], object]] = {"oneDNN": functools.partial(onednn, given, theirs)}
            least = _least(
                calls | {kind: functools.partial(laid[kind].product, given) for kind in ours}, _COMPILED_ROUNDS
            )
            over |= {kind: over[kind] + math.log(least[kind] / least["oneDNN"]) for kind in ours}
    bound = len(_DECODED_ROWS) * math.log(_COMPILED_WORTH)
    faster = [kind for kind in tried if over[kind] < bound]
    others: list[tuple[Part, Any, Any, Any]] = [
        ("attention", compiled.attention, _attention, [(rows, *shape, 64) for shape in ((8, 1), (2, 256), (2, 256))])
        for rows in _DECODED_ROWS
    ]
    others += [("rows", _normed, _norm, [(rows, 4096)] * 2) for rows in _DECODED_ROWS]
    ratios: dict[Part, float] = {}
    for part, ours, theirs, shapes in others:
        operands = [torch.randn(shape, generator=generator) for shape in shapes]
        right = (ours(*operands, FP32).double() - theirs(*(each.double() for each in operands))).abs().max() < 2.0**-18
        least = _least(
            {"torch": functools.partial(theirs, *operands), "ours": functools.partial(ours, *operands, FP32)},
            _COMPILED_ROUNDS,
        )
        ratios[part] = ratios.get(part, 0.0) + (math.log(least["ours"] / least["torch"]) if right else math.inf)
    return (*faster, *(part for part, over in ratios.items() if over < bound))


def _compiled_int8(generator: torch.Generator) -> tuple[Part, ...]:
    """The compiled product of int8 where there is one, in the same bits as torch's and not slower."""
    if "int8" not in compiled.parts():
        return ()
    x, weight = operands_of("forward", max(_DECODED_ROWS), *_DECODED, generator)
    codes = BlockScaled(*int8_codes(weight))
    weights = {"torch": codes, "ours": BlockScaled(compiled.lay_codes(codes.codes), codes.scales)}
    over = 0.0
    for rows in _DECODED_ROWS:
        calls: dict[str, Callable[[], Any]] = {
            name: functools.partial(int8, x[:rows], each) for name, each in weights.items()
        }
        if not torch.equal(*(call() for call in calls.values())):
            return ()
        least = _least(calls, _COMPILED_ROUNDS)
        over += math.log(least["ours"] / least["torch"])
    return ("int8",) if over < len(_DECODED_ROWS) * math.log(_COMPILED_WORTH) else ()


def _compiled_codes(generator: torch.Generator) -> tuple[Part, ...]:
    """The compiled product of 8-bit codes, where it is exact (of integers beside one of 448 in each block, whose scales
    are 1) and no slower than oneDNN's of fp32, by which the values would be multiplied."""
    inputs, outputs = _DECODED
    x, weight = (torch.randint(-8, 9, (n, inputs), generator=generator).float() for n in (max(_DECODED_ROWS), outputs))
    x[:, ::BLOCK] = weight[::BLOCK, ::BLOCK] = E4M3.largest
    codes, theirs, over = quantized(weight, E4M3, SQUARE), _reordered(weight), 0.0
    ours = compiled.lay_scaled(codes.codes, codes.scales.repeat_interleave(BLOCK, 0), BLOCK, folded=False)
    if not torch.equal(ours.coded_product(x, FP8), F.linear(x, weight)):
        return ()
    for rows in _DECODED_ROWS:
        calls: dict[str, Callable[[], object]] = {
            "oneDNN": functools.partial(onednn, x[:rows], theirs),
            "ours": functools.partial(ours.coded_product, x[:rows].bfloat16(), FP8),
        }
        least = _least(calls, _COMPILED_ROUNDS)
        over += math.log(least["ours"] / least["oneDNN"])
    return ("codes",) if over < len(_DECODED_ROWS) * math.log(_COMPILED_WORTH) else ()


def _norm(x_NE: Tensor, y_NE: Tensor) -> Tensor:
    return F.rms_norm(x_NE + y_NE, x_NE.shape[-1:], y_NE[0], 1e-6)


def _normed(x_NE: Tensor, y_NE: Tensor, fmt: NumberFormat) -> Tensor:
    return compiled.norm(x_NE, y_NE[0], 1e-6, fmt, y_NE)[1]


def _attention(q_BH1D: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
    q_NGD = q_BH1D.reshape(k_BKSD.shape[0] * k_BKSD.shape[1], -1, q_BH1D.shape[-1])
    k_NSD, v_NSD = k_BKSD.flatten(0, 1), v_BKSD.flatten(0, 1)
    p_NGS = torch.softmax((q_NGD @ k_NSD.transpose(1, 2)).mul_(q_NGD.shape[-1] ** -0.5), -1)
    return (p_NGS @ v_NSD).view(q_BH1D.shape)


def _ratios() -> dict[str, float]:
    """Seconds in bf16 and int8 over those in fp32 by oneDNN."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(_ROWS, _IN, generator=generator), torch.randn(_OUT, _IN, generator=generator)
    codes = [torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator) for shape in (x.shape, w.shape)]
    calls: dict[str, Callable[[], object]] = {"fp32": functools.partial(_product, x, w)}
    if has_bf16():
        calls["bf16"] = functools.partial(_product, x.bfloat16(), w.bfloat16())
    if _exact_integers(*codes):
        calls["int8"] = functools.partial(_integer_product, *codes)
    least = _least(calls)
    return {name: seconds / least["fp32"] for name, seconds in least.items()}


def _least(calls: dict[str, Callable[[], object]], rounds: int = _ROUNDS) -> dict[str, float]:
    """The least seconds of each call, in turn. What takes three times as long as the first is tried once."""
    least, first = dict.fromkeys(calls, math.inf), next(iter(calls))
    for _ in range(rounds):
        least |= {name: min(least[name], _seconds(call)) for name, call in calls.items()}
        calls = {name: call for name, call in calls.items() if least[name] <= 3 * least[first]}
    return least


def _of_side(side: Side, generator: torch.Generator) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """For each class of weights the way of each class of rows: of any fp32 values, and of bf16's."""
    largest = _LARGEST >> 5 if side == "heads" else _LARGEST
    timed = [
        [
            _timed(side, operands_of(side, rows, inner, outer, generator))
            for rows in _CLASSES
            if rows == 1 or rows * inner * outer <= largest
        ]
        for inner, outer in _WEIGHTS
    ]
    plain = [_fitted(classes, (ONEDNN,)) for classes in timed]
    # The switch only where the processor makes something of it: elsewhere oneDNN computes in fp32 in any case.
    spared = [[{**each, BF16: each[BF16] / _GAIN} for each in classes] for classes in timed]
    both = [_fitted(classes, (ONEDNN, BF16)) for classes in (timed if side == "heads" else spared)]
    return tuple(plain), tuple(both)


def _fitted(timed: list[dict[str, float]], ways: Sequence[str]) -> str:
    """torch's own up to some class of rows and one of ``ways`` from there on: what takes least, each class counting
    alike. One change, for a busy machine's times scatter. Classes beyond those timed go with the last."""

    def logarithm(way: str, start: int) -> float:
        taken = (each[way] / _WORTH if at >= start else each[TORCH] for at, each in enumerate(timed))
        return sum(math.log(seconds / each[TORCH]) for seconds, each in zip(taken, timed, strict=True))

    choices = [(way, start) for way in ways for start in range(len(timed) + 1)]
    way, start = min(choices, key=lambda choice: logarithm(*choice))
    letters = TORCH * start + way * (len(timed) - start)
    return letters.ljust(len(_CLASSES), letters[-1])


def operands_of(side: Side, rows: int, inner: int, outer: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Integers of at most 8 bits whose sums of products fp32 holds, as the side's two operands."""
    terms = {"forward": inner, "input": outer, "weight": rows, "heads": inner}[side]
    limit = min(255, math.isqrt((1 << 24) // terms))

    def drawn(*shape: int) -> Tensor:
        return torch.randint(-limit, limit + 1, shape, generator=generator).float()

    if side == "heads":  # eight heads, in one call
        return drawn(8, rows, inner), drawn(8, inner, outer)
    if side == "forward":
        return drawn(rows, inner), drawn(outer, inner)
    if side == "input":
        return drawn(rows, outer), drawn(outer, inner).t()
    return drawn(rows, outer).t(), drawn(rows, inner).t()


def _timed(side: Side, operands: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Seconds of each way, inf where it is not right; torch's own is, as ``kernels/probe.py`` proves."""
    call, ways = (heads, (TORCH, BF16)) if side == "heads" else (multiply, (TORCH, ONEDNN, BF16))
    exact = call(TORCH, *operands)
    right = [way for way in ways if torch.equal(call(way, *operands), exact)]
    return dict.fromkeys(_NAMES, math.inf) | _least({way: functools.partial(call, way, *operands) for way in right})


def heads(way: str, x_NMK: Tensor, y_NKS: Tensor) -> Tensor:
    """x @ y for each of N heads, with the switch or without."""
    with switched(way == BF16):
        return torch.bmm(x_NMK, y_NKS)


def has_bf16() -> bool:
    """Whether oneDNN has products of bf16 tensors here."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        _product(torch.ones(16, 16, dtype=torch.bfloat16), torch.ones(16, 16, dtype=torch.bfloat16))
    except RuntimeError:  # "could not create a primitive"
        return False
    return True


def _flushes() -> bool:
    """Whether a product of bf16 tensors takes 2^-130 for zero."""
    x = torch.full((16, 16), 2.0**-130).bfloat16()
    return not bool(_product(x, torch.eye(16).bfloat16())[0, 0] == x[0, 0])


def _exact_integers(x: Tensor, w: Tensor) -> bool:
    """Whether int8 products are added without loss: of random codes, and where all are the largest there are."""
    x[0], w[0], x[1], w[1] = -128, -128, 127, 127
    some = w[:64]  # an exact sum of these in float64: 576 * 2^14 is far below 2^53
    return torch.equal(_integer_product(x, some).double(), x.double() @ some.double().t())


def _product(x: Tensor, w: Tensor) -> Tensor:
    return onednn(x, w)


def _integer_product(x: Tensor, w: Tensor) -> Tensor:
    return torch._int_mm(x, w.t())


def _seconds(call: Callable[[], object]) -> float:
    began = time.thread_time()  # what other processes take does not count
    call()
    return time.thread_time() - began
