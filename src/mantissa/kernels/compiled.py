"""Products, attention, rows and rounding, compiled for this processor where a C compiler is there.

A decode step multiplies a few rows by every weight, so its time is the time to read the weights. No library that comes
with torch reads them as fast as the memory gives them: on one core of an AMD EPYC (Zen 4) one row of SmolLM2's
projections takes oneDNN 20 ms in bf16 and 40 ms in fp32, and these 10 and 20. They hold fp16's values in fp16, bf16's
in bf16, and widen them as they are read, which is exact: a simulated half reads half of what fp32 reads. Codes of 8
bits and fewer (fp8, mxfp8, mxfp4, int4) are read in a byte, become bf16's values in the cache, and are multiplied as
those: up to 16 rows in fp8 take no longer than in bf16.

Each output is one fp32 sum over the inputs in order (in AMX's tiles: of the even ones and the odd ones of each 32, as
the instruction defines), so it does not depend on how many rows or threads there are.
Attention in one call computes each query's row by itself, in one order of its own: no mask, no rows beside it. int8's
product and roundings have the bits of the Python that they stand for: which of the two ran is a matter of time alone.

A policy that trains computes attention and rows by the same code, and their gradients by the families' formulas and
roundings (``simulated.py``): the ``Operation``s below. By torch's operations more than half of a small model's training
step (512 completions, hidden 128, fp32, one core) was passes over memory, and not products; here an operation reads
its operands once and writes its result, and its backward likewise. Sums are fp32, in one order, whatever the number of
threads. Gradients of gradients there are none.

The library is built once a machine, in five seconds, and kept in the user's cache folder; a folder that others may
write to is not used. ``cpu.py`` measures where it is not the slower one, and a run's table of products says so.

Legend: N rows (any leading shape), E features in, F features out. Of attention: B sequences, H query heads, K key
heads, T queries, S keys, D head size.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mantissa.base.environ import CPU_FLAGS
from mantissa.base.errors import MantissaError
from mantissa.precision import BF16, BLOCK, FP16, FP32, NumberFormat, round_to_format, round_to_format_

Kind = Literal["fp32", "bf16", "fp16", "pairs"]
Coded = Literal["int8", "codes", "folded", "total"]  # held as codes, their scales beside them: ``Laid``
Held = Kind | Coded
Part = Kind | Literal["attention", "rows", "int8", "codes"]  # of the library, each used where it was measured faster
KINDS: tuple[Kind, ...] = ("fp32", "bf16", "fp16", "pairs")
HELD: tuple[Held, ...] = (*KINDS, "int8", "codes", "folded", "total")  # in the order of the source's enum
PARTS: tuple[Part, ...] = (*KINDS, "attention", "rows", "int8", "codes")
FP8, FP8_BY_POWER_OF_TWO = "fp8", "fp8 by a power of two"
SCALED = (FP8, FP8_BY_POWER_OF_TWO, "mxfp8", "mxfp4", "nvfp4", "int8")  # in the order of the source's enum
_HELD: dict[str, torch.dtype] = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "pairs": torch.bfloat16, "int8": torch.int8,
    "codes": torch.float8_e4m3fn, "folded": torch.float8_e4m3fn, "total": torch.bfloat16,
}  # fmt: skip
_GROUP: dict[str, int] = {"pairs": 2, "int8": 4, "codes": 2, "folded": 2, "total": 2}  # inputs multiplied at a time
_FOLDER = Path(__file__).parent
_SOURCES = tuple(_FOLDER / f"{name}.c" for name in ("products", "attention", "rows", "rounding", "step"))
_HEADER = _FOLDER / "vectors.h"
_COMPILERS = ("gcc", "cc", "clang")
_READ = (torch.float32, torch.bfloat16)  # what the sources read: of four bytes, and of two
FORMATS = (FP32, BF16, FP16)  # in the order of the sources' enum
_SECONDS = 60.0  # that a compiler may take: it takes five
_OPTIONS = ("-O3", "-ffp-contract=off", "-shared", "-fPIC")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_MORE = {"avx512_bf16": "-mavx512bf16", "avx512_vnni": "-mavx512vnni", "avx512vbmi": "-mavx512vbmi"}
_TILES = {"amx_bf16": "-mamx-bf16", "amx_int8": "-mamx-int8"}  # used where both are there
_ROWS_AT_A_TIME = 32  # the sources' AT_A_TIME
LINE = 64  # bytes of a line of the cache
SHARED = 1 << 16  # multiplications from which threads share a product: waking them takes microseconds


class Laid(Tensor):
    """A weight F,E in the layout of the compiled products, held as ``kind`` says: a tensor with which nothing can be
    done but to multiply by it, and to make it plain again (``to_dense``: the same values, in the dtype it came in).

    ``pairs``: in bf16, for rows in bf16, multiplied two at a time by the processor's own instruction (AVX512-BF16,
    AMX). ``int8``: codes, for ``integer_product`` (AVX512-VNNI, AMX). For ``coded_product``, by that of pairs: e4m3's
    codes, of which ``per`` in a row share a scale, fp32 (``codes``) or a power of two (``folded``); and values of bf16
    that an output's one scale belongs to (``total``).
    """

    held: Tensor
    kind: Held
    per: int

    @staticmethod
    def __new__(cls, values: Tensor, shape: Sequence[int], kind: Held, dtype: torch.dtype, per: int = 1) -> Laid:
        laid: Laid = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=values.device)
        laid.held, laid.kind, laid.per = values, kind, per
        return laid

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Laid({tuple(self.shape)}, {self.kind})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        laid = args[0]
        if function is torch.ops.aten.detach.default:
            return Laid(laid.held, laid.shape, laid.kind, laid.dtype, laid.per)
        raise NotImplementedError(f"{function} of a weight in the layout of compiled products: use to_dense() first")

    def to_dense(self, *_: Any, **__: Any) -> Tensor:
        """The weight again, F,E: the same values, in the dtype it came in."""
        dtype = _HELD[self.kind]  # what was put behind the values is left out
        held = self.held.view(torch.uint8)[: self.shape.numel() * dtype.itemsize].view(dtype)
        held = _interleaved(held, self.kind, back=True)
        return _laid(held, self.shape, self.kind, back=True).view(self.shape).to(self.dtype)

    def product(
        self,
        x_NE: Tensor,
        bias_F: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        scales_NG: Tensor | None = None,
    ) -> Tensor:
        """x @ weight^T + bias, summed in fp32 and rounded once to ``dtype``: fp32, or bf16. Not differentiable.

        ``scales_NG``: those of each row's groups of ``per``, where ``x_NE`` is codes too.
        """
        features, inputs = self.shape
        x_NE = x_NE.to(torch.float32 if self.kind in KINDS[:3] else torch.bfloat16).contiguous()
        out_NF = _results(x_NE, features, dtype)
        rows = x_NE.numel() // inputs
        bias = None if bias_F is None else bias_F.float().contiguous()
        threads = torch.get_num_threads() if rows * features * inputs >= SHARED else 1
        library().mantissa_product(
            HELD.index(self.kind), self.held.data_ptr(), x_NE.data_ptr(), out_NF.data_ptr(),
            dtype is torch.bfloat16, None if bias is None else bias.data_ptr(),
            None if scales_NG is None else scales_NG.data_ptr(), self.per, rows, inputs, features, threads,
            team() if threads > 1 else None,
        )  # fmt: skip
        return out_NF

    def coded_product(
        self, x_NE: Tensor, scheme: str | None, bias_F: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Q(x) @ weight^T + bias of a weight that is codes, rounded once to ``dtype``. ``scheme``: of Q (``SCALED``);
        None: x as it is. A group's products are summed in fp32, multiplied by both scales, and added up."""
        if scheme is None:
            return self.product(x_NE, bias_F, dtype)
        if self.kind == "folded":
            return self.product(_scaled(x_NE.to(torch.bfloat16), scheme), bias_F, dtype)
        codes_NE, scales_NG = scaled_apart(x_NE, scheme)
        return self.product(codes_NE, bias_F, dtype, scales_NG)

    def integer_product(
        self, x_NE: Tensor, scales_F: Tensor, bias_F: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Q(x) @ codes^T times the scales of both, + bias: ``cpu.int8`` in the same bits, rounded once to ``dtype``."""
        features, inputs = self.shape
        x_NE = (x_NE if x_NE.dtype in _READ else x_NE.float()).contiguous()
        rows = x_NE.numel() // inputs
        codes_NE, row_scales_N = torch.empty(rows, inputs, dtype=torch.uint8), torch.empty(rows)
        if library().mantissa_codes(
            x_NE.element_size(), x_NE.data_ptr(), codes_NE.data_ptr(), row_scales_N.data_ptr(), rows, inputs
        ):
            raise MemoryError(f"a row of {inputs} values")
        out_NF, scales_F = _results(x_NE, features, dtype), scales_F.contiguous()
        bias = None if bias_F is None else bias_F.float().contiguous()
        threads = torch.get_num_threads() if rows * features * inputs >= SHARED else 1
        library().mantissa_integers(
            self.held.data_ptr(), codes_NE.data_ptr(), out_NF.data_ptr(), dtype is torch.bfloat16,
            scales_F.data_ptr(), row_scales_N.data_ptr(), None if bias is None else bias.data_ptr(),
            rows, inputs, features, threads, team() if threads > 1 else None,
        )  # fmt: skip
        return out_NF


def _results(x_NE: Tensor, features: int, dtype: torch.dtype) -> Tensor:
    """Room for what a product writes, which knows two dtypes."""
    if dtype not in _READ:
        raise TypeError(f"a compiled product gives float32 or bfloat16, and was asked for {dtype}")
    return torch.empty(*x_NE.shape[:-1], features, dtype=dtype)


def lay_codes(codes_FE: Tensor) -> Laid:
    """int8 codes laid out, with what the processor's unsigned operand adds to each output: 128 times its codes' sum."""
    too_much_F = codes_FE.sum(1, dtype=torch.int32).mul_(128)
    held = torch.cat((_laid(codes_FE.contiguous(), codes_FE.shape, "int8"), too_much_F.view(torch.int8)))
    return Laid(held, codes_FE.shape, "int8", torch.int8)


def lay_scaled(codes_FE: Tensor, scales_FG: Tensor, per: int, folded: bool) -> Laid:
    """e4m3's codes and the scales of each output's groups of ``per``, powers of two where they are ``folded``; or
    bf16's values and each output's one scale. See ``Laid``."""
    groups = scales_FG.shape[1]
    kind: Coded = "total" if codes_FE.dtype is torch.bfloat16 else "folded" if folded else "codes"
    if folded:  # the exponents, 2^-127's too
        scales_FG = ((scales_FG.contiguous().view(torch.int32) >> 23) - 127).to(torch.int8)
    of_blocks = scales_FG.view(-1, library().mantissa_block(), groups).transpose(1, 2).contiguous()
    laid = _laid(codes_FE.contiguous(), codes_FE.shape, kind)
    held = torch.cat((_interleaved(laid, kind).view(torch.uint8), of_blocks.view(-1).view(torch.uint8)))
    return Laid(held, codes_FE.shape, kind, codes_FE.dtype, per)


def _interleaved(laid: Tensor, kind: Held, back: bool = False) -> Tensor:
    """Codes in the order that the processor unpacks them in: of 64, by eights, those of both halves in turn."""
    if kind not in ("codes", "folded"):
        return laid
    return laid.view(-1, *((4, 2) if back else (2, 4)), 8).transpose(1, 2).reshape(-1)


def lay(weight_FE: Tensor, kind: Kind) -> Laid:
    """``weight_FE`` laid out; its values must be ``kind``'s."""
    held, (features, inputs) = weight_FE.to(_HELD[kind]).contiguous(), weight_FE.shape
    return Laid(_laid(held, (features, inputs), kind), (features, inputs), kind, weight_FE.dtype)


def is_laid(weight: Tensor) -> bool:
    """Whether a weight is in some product's layout: these, or oneDNN's."""
    return weight.is_mkldnn or isinstance(weight, Laid)


def fits(shape: Sequence[int], kind: Held) -> bool:
    """Whether a weight of this shape can be laid out: whole blocks of outputs, and whole groups of inputs."""
    return len(shape) == 2 and shape[0] % library().mantissa_block() == 0 and shape[1] % _GROUP.get(kind, 1) == 0


def computes(width: int, fmt: NumberFormat) -> bool:
    """Whether there is compiled code for rows of ``width`` values (attention: a head's) in this format."""
    return built()[0] is not None and fmt in FORMATS and width % library().mantissa_lanes() == 0


def attention(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, fmt: NumberFormat, seen_B: Tensor | None = None
) -> Tensor:
    """round(round(softmax(q k^T / sqrt(D))) v), of the last T positions of S, each to the keys up to its own.

    fp32 or bf16 tensors, whose values are ``fmt``'s; each row is an fp32 sum of its own. ``seen_B``: int64, the keys
    that a sequence's last query sees, at least T; None: all. Not differentiable. Shape and dtype of ``q``.
    """
    (batch, heads, queries, size), (kv_heads, keys) = q_BHTD.shape, k_BKSD.shape[1:3]
    alike = (x.to(q_BHTD.dtype) for x in (q_BHTD, k_BKSD, v_BKSD))
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in alike)
    seen_B = None if seen_B is None else seen_B.long().contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    sizes = batch, kv_heads, heads // kv_heads, queries, keys, size, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
    threads = torch.get_num_threads() if batch * heads * queries * keys * size >= SHARED else 1
    failed = library().mantissa_attention(
        q.element_size(), FORMATS.index(fmt), q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
        None if seen_B is None else seen_B.data_ptr(), (ctypes.c_long * 15)(*sizes), size**-0.5,
        threads, team() if threads > 1 else None,
    )  # fmt: skip
    if failed:
        raise MemoryError(f"attention over {keys} keys")
    return out


def packed_attention(q_1HND: Tensor, k_1KND: Tensor, v_1KND: Tensor, fmt: NumberFormat, spans: Spans) -> Tensor:
    """``attention`` of packed positions, each to those of its own sequence up to itself; in the same bits.

    fp32 or bf16 tensors, all alike. Shape and dtype of ``q``. Not differentiable.
    """
    q, k, v = map(_by_feature, (q_1HND, k_1KND, v_1KND))
    out = _positions_first(q)
    _packed(spans, fmt, (q, k, v), (out,))
    return out


def packed_attention_gradients(
    q_1HND: Tensor, k_1KND: Tensor, v_1KND: Tensor, out_1HND: Tensor, grad_1HND: Tensor, fmt: NumberFormat, spans: Spans
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of q, k and v by ``CausalAttention``'s formulas, of ``packed_attention``'s result and its gradient: each
    an fp32 sum over all sequences that a position is part of, rounded once."""
    given = tuple(map(_by_feature, (q_1HND, k_1KND, v_1KND, out_1HND, grad_1HND)))
    results = [_positions_first(x) for x in given[:3]]
    _packed(spans, fmt, given, results)
    of_q, of_k, of_v = results
    return of_q, of_k, of_v


@dataclass(frozen=True)
class Spans:
    """Which of N packed positions make sequences: those of a prompt, and of each response to it, lie side by side.

    ``prompts_U4``: where a prompt begins, its length, and the first of its responses and the one after the last;
    ``responses_B2``: where a response begins, and its length, which may be 0. int64, on the CPU.
    """

    prompts_U4: Tensor
    responses_B2: Tensor

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def whole(sequences: int, length: int) -> Spans:
        """Sequences that share nothing, each ``length`` positions: prompts without a response."""
        start_U = torch.arange(sequences) * length
        prompts_U4 = torch.stack((start_U, torch.full_like(start_U, length), *[torch.zeros_like(start_U)] * 2), 1)
        return Spans(prompts_U4, torch.zeros(0, 2, dtype=torch.int64))

    @functools.cached_property
    def longest(self) -> tuple[int, int]:
        """Keys of the longest sequence, and queries of the longest prompt or response."""
        prompts, responses = self.prompts_U4[:, 1], self.responses_B2[:, 1]
        counts = self.prompts_U4[:, 3] - self.prompts_U4[:, 2]
        whole = prompts.repeat_interleave(counts) + responses
        return int(torch.cat((whole, prompts)).max()), int(torch.cat((responses, prompts)).max())


SpansOf = Callable[[], Spans]  # made where somebody asks for them


def _by_feature(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _positions_first(x_1HND: Tensor) -> Tensor:
    """Room of this shape, in memory N,H,D: as a product takes it."""
    _, heads, count, size = x_1HND.shape
    return torch.empty(1, count, heads, size, dtype=x_1HND.dtype).transpose(1, 2)


def _packed(spans: Spans, fmt: NumberFormat, given: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    q, k = given[:2]
    heads, count, size = q.shape[1:]
    sizes = len(spans.prompts_U4), k.shape[1], heads // k.shape[1], size, *spans.longest
    strides = [n for x in given for n in (x.stride(1), x.stride(2))]
    work = heads * count * spans.longest[0] * size  # at most
    threads = torch.get_num_threads() if work >= SHARED else 1
    failed = library().mantissa_packed_attention(
        q.element_size(), FORMATS.index(fmt), (ctypes.c_void_p * 5)(*(x.data_ptr() for x in given)),
        (ctypes.c_void_p * 3)(*(x.data_ptr() for x in results)), spans.prompts_U4.data_ptr(),
        spans.responses_B2.data_ptr(), (ctypes.c_long * 6)(*sizes), (ctypes.c_long * 10)(*strides), size**-0.5,
        threads, team() if threads > 1 else None,
    )  # fmt: skip
    if failed:
        raise MemoryError(f"attention over {spans.longest[0]} keys")


def norm(
    x_NE: Tensor, weight_E: Tensor, eps: float, fmt: NumberFormat, added_NE: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + added, rounded (x itself without), and its RMSNorm. fp32 or bf16, all alike. Not differentiable."""
    x_NE, rows = x_NE.contiguous(), x_NE.numel() // x_NE.shape[-1]
    added_NE = None if added_NE is None else added_NE.contiguous()
    out_NE, total_NE = torch.empty_like(x_NE), x_NE if added_NE is None else torch.empty_like(x_NE)
    library().mantissa_norm(
        x_NE.element_size(), FORMATS.index(fmt), x_NE.data_ptr(), None if added_NE is None else added_NE.data_ptr(),
        weight_E.data_ptr(), total_NE.data_ptr(), out_NE.data_ptr(), rows, x_NE.shape[-1], eps, *_threads(x_NE),
    )  # fmt: skip
    return total_NE, out_NE


def norm_gradients(
    x_NE: Tensor, weight_E: Tensor, grad_NE: Tensor, eps: float, fmt: NumberFormat, total_NE: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """RMSNorm's of x, and of the weight (in its dtype), by ``simulated.norm_gradients``' formulas; each an fp32 sum.

    ``total``: a gradient of x from elsewhere, which is added to the first, and the sum rounded.
    """
    x_NE, grad_NE = x_NE.contiguous(), grad_NE.contiguous()
    total_NE = None if total_NE is None else total_NE.contiguous()
    rows, width = x_NE.numel() // x_NE.shape[-1], x_NE.shape[-1]
    of_x_NE, of_weight = torch.empty_like(x_NE), torch.empty(max(1, -(-rows // _ROWS_AT_A_TIME)), width)
    library().mantissa_norm_gradients(
        x_NE.element_size(), FORMATS.index(fmt), x_NE.data_ptr(), weight_E.data_ptr(), grad_NE.data_ptr(),
        None if total_NE is None else total_NE.data_ptr(), of_x_NE.data_ptr(), of_weight.data_ptr(), rows, width, eps,
        *_threads(x_NE),
    )  # fmt: skip
    return of_x_NE, of_weight[0].to(weight_E.dtype)


def swiglu(gate_NE: Tensor, up_NE: Tensor, fmt: NumberFormat) -> Tensor:
    """round(silu(gate)) * up, rounded. fp32 or bf16, parts of one tensor or two tensors. Not differentiable."""
    rows, width = gate_NE.numel() // gate_NE.shape[-1], gate_NE.shape[-1]
    if not gate_NE.stride() == up_NE.stride() == (*(gate_NE.stride(-2) * n for n in _outer(gate_NE)), 1):
        gate_NE, up_NE = gate_NE.contiguous(), up_NE.contiguous()
    out_NE = torch.empty(gate_NE.shape, dtype=gate_NE.dtype)
    library().mantissa_swiglu(
        gate_NE.element_size(), FORMATS.index(fmt), gate_NE.data_ptr(), up_NE.data_ptr(), out_NE.data_ptr(), rows,
        width, gate_NE.stride(-2) if gate_NE.dim() > 1 else width, *_threads(gate_NE),
    )  # fmt: skip
    return out_NE


def swiglu_gradients(gate_NE: Tensor, up_NE: Tensor, grad_NE: Tensor, fmt: NumberFormat) -> tuple[Tensor, Tensor]:
    """Those of gate and up, by ``simulated.unit_gradients``' formulas."""
    gate_NE, up_NE, grad_NE = (x.contiguous() for x in (gate_NE, up_NE, grad_NE))
    of_gate_NE, of_up_NE = torch.empty_like(gate_NE), torch.empty_like(gate_NE)
    rows, width = gate_NE.numel() // gate_NE.shape[-1], gate_NE.shape[-1]
    library().mantissa_swiglu_gradients(
        gate_NE.element_size(), FORMATS.index(fmt), gate_NE.data_ptr(), up_NE.data_ptr(), grad_NE.data_ptr(),
        of_gate_NE.data_ptr(), of_up_NE.data_ptr(), rows, width, *_threads(gate_NE),
    )  # fmt: skip
    return of_gate_NE, of_up_NE


def _outer(x: Tensor) -> list[int]:
    """By how many rows each leading dimension steps, were the rows one after another."""
    steps = [1]
    for size in reversed(x.shape[1:-1]):
        steps.insert(0, steps[0] * size)
    return steps[: x.dim() - 1]


def rotate(x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, fmt: NumberFormat, back: bool = False) -> Tensor:
    """x * cos + rotate_half(x) * sin, rounded once; ``back``: by the opposite angles, which is its gradient. ``x`` fp32
    or bf16, angles fp32. In memory positions come first where they do in ``x``. Not differentiable."""
    x_BHTD = _by_feature(x_BHTD)
    cos_BTD, sin_BTD = cos_BTD.contiguous(), sin_BTD.contiguous()
    (batch, heads, length, size), by_head = x_BHTD.shape, x_BHTD.stride(1) > x_BHTD.stride(2)
    shape = (batch, heads, length, size) if by_head else (batch, length, heads, size)
    out = torch.empty(shape, dtype=x_BHTD.dtype)
    out_BHTD = out if by_head else out.transpose(1, 2)
    angles = 0 if len(cos_BTD) == 1 else cos_BTD.stride(0)
    sizes = *x_BHTD.shape, *x_BHTD.stride()[:3], angles, *out_BHTD.stride()[:3]
    library().mantissa_rotate(
        x_BHTD.element_size(), FORMATS.index(fmt), x_BHTD.data_ptr(), cos_BTD.data_ptr(), sin_BTD.data_ptr(),
        out_BHTD.data_ptr(), (ctypes.c_long * 11)(*sizes), back, *_threads(x_BHTD),
    )  # fmt: skip
    return out_BHTD


def _threads(x: Tensor) -> tuple[int, int | None]:
    """How many threads share what is done to each value once or twice, and who calls them."""
    threads = torch.get_num_threads() if x.numel() >= SHARED else 1
    return threads, team() if threads > 1 else None


def rounded(x: Tensor, fmt: NumberFormat) -> Tensor:
    """``round_to_format`` of a tensor without gradient: to a half in one pass, in the same bits."""
    if not _in_one_pass(x, fmt):
        return round_to_format(x, fmt)
    out = torch.empty_like(x)
    _round(x, out, fmt)
    return out


def rounded_(x: Tensor, fmt: NumberFormat) -> Tensor:
    """``round_to_format_`` likewise."""
    if not _in_one_pass(x, fmt):
        return round_to_format_(x, fmt)
    _round(x, x, fmt)
    return x


def on_grid(x: Tensor, fmt: NumberFormat) -> Tensor:
    """``rounded``, or ``x`` itself where its values are the format's already: to see that takes a third of the time."""
    return x if _in_one_pass(x, fmt) and not _round(x, None, fmt) else rounded(x, fmt)


def _in_one_pass(x: Tensor, fmt: NumberFormat) -> bool:
    plain = type(x) is Tensor and x.dtype is torch.float32 and x.device.type == "cpu" and x.is_contiguous()
    differentiable = x.requires_grad and torch.is_grad_enabled()  # which a pass over the memory is not
    return plain and not differentiable and (fmt is BF16 or fmt is FP16) and built()[0] is not None


def _round(x: Tensor, out: Tensor | None, fmt: NumberFormat) -> bool:
    """Round into ``out``; without one, whether a value of ``x`` is not the format's."""
    to = None if out is None else out.data_ptr()
    return bool(library().mantissa_round(FORMATS.index(fmt), x.data_ptr(), to, x.numel(), *_threads(x)))


def scaled(x_NE: Tensor, scheme: str) -> Tensor | None:
    """The values of each row's codes, the bits of ``round_in_blocks`` (``FP8``, ``FP8_BY_POWER_OF_TWO``: e4m3 along
    rows) and of ``SCHEMES``; None where nothing is compiled.

    ``x``: fp32, or bf16 where bf16 holds the values too. Its shape and dtype. Not differentiable.
    """
    known = x_NE.dtype in _READ and x_NE.device.type == "cpu"
    if not known or type(x_NE) is not Tensor or built()[0] is None:
        return None
    return _scaled(x_NE, scheme)


def scaled_apart(x_NE: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """What ``scaled`` multiplies into values, as a product takes it: each row's codes in bf16, and the fp32 scales of
    its blocks; of nvfp4 codes times their blocks' e4m3, and the row's one scale. Of ``FP8`` and nvfp4."""
    per = {FP8: BLOCK, "nvfp4": x_NE.shape[-1]}[scheme]
    scales_NG = torch.empty(x_NE.numel() // x_NE.shape[-1], -(-x_NE.shape[-1] // per))
    return _scaled(x_NE.to(torch.bfloat16), scheme, scales_NG), scales_NG


def _scaled(x_NE: Tensor, scheme: str, scales_NG: Tensor | None = None) -> Tensor:
    """Each row's values, of the dtype of ``x``; with ``scales_NG``, which are written, what they belong to."""
    x_NE, width = x_NE if x_NE.is_contiguous() else x_NE.contiguous(), x_NE.shape[-1]
    out_NE, rows = torch.empty_like(x_NE), x_NE.numel() // max(1, width)
    threads = torch.get_num_threads() if x_NE.numel() >= SHARED else 1
    failed = library().mantissa_scaled(
        SCALED.index(scheme), x_NE.element_size(), x_NE.data_ptr(), out_NE.data_ptr(),
        None if scales_NG is None else scales_NG.data_ptr(), rows, width, threads, team() if threads > 1 else None,
    )  # fmt: skip
    if failed:
        raise MemoryError(f"a row of {width} values")
    return out_NE


def parts() -> tuple[Part, ...]:
    """What there is here."""
    if not kinds():
        return ()
    int8: tuple[Part, ...] = ("int8",) if "avx512_vnni" in _flags() else ()
    codes: tuple[Part, ...] = ("codes",) if "pairs" in kinds() and "avx512vbmi" in _flags() else ()
    return (*kinds(), "attention", "rows", *int8, *codes)


def kinds() -> tuple[Kind, ...]:
    """What can be multiplied so here; nothing without a compiler, or on a processor without AVX2."""
    if built()[0] is None:
        return ()
    return KINDS if "avx512_bf16" in _flags() else KINDS[:3]


def tiled() -> bool:
    """Whether pairs and int8 are multiplied in tiles (AMX), of weights whose inputs fill them."""
    found, _ = built()
    return found is not None and bool(found.mantissa_tiles())


def why_not() -> str:
    """Why nothing was compiled; empty where something was."""
    return built()[1]


def named() -> str:
    """The library's sources, compiler and options in a name; empty where there is none."""
    found, _ = built()
    return "" if found is None else Path(found._name).stem


def library() -> Any:
    """The compiled library. ``MantissaError`` where there is none."""
    found, why = built()
    if found is None:
        raise MantissaError(f"this run multiplies by compiled products, and {why}; install gcc, or start a new run")
    return found


def _laid(values: Tensor, shape: Sequence[int], kind: str, back: bool = False) -> Tensor:
    out, group = torch.empty(values.numel(), dtype=values.dtype), _GROUP.get(kind, 1)
    sizes = values.element_size() * group, values.data_ptr(), out.data_ptr(), shape[1] // group, shape[0]
    library().mantissa_lay(*sizes, int(back))
    return out


def _flags() -> tuple[str, ...]:
    """The processor's, as far as torch may use them: ``ATEN_CPU_CAPABILITY`` holds instructions back."""
    has, capability = set(CPU_FLAGS.split()), torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX512", "AVX2") or not has >= {"avx2", "fma", "f16c"}:
        return ()
    wide = [flag for flag in ("avx512f", *_MORE, *_TILES) if capability == "AVX512" and {"avx512f", flag} <= has]
    return "avx2", *wide


@functools.cache
def built() -> tuple[Any | None, str]:
    """The library, and why there is none."""
    flags = _flags()
    if "avx2" not in flags:
        return None, "there is no AVX2 with FMA and F16C here"
    named = os.environ.get("CC")
    compiler = next((found for name in ((named,) if named else _COMPILERS) if (found := shutil.which(name))), None)
    if compiler is None:
        return None, f"there is no C compiler ({named or ', '.join(_COMPILERS)})"
    options = (*_AVX2, *(_AVX512 if "avx512f" in flags else ()), *(o for flag, o in _MORE.items() if flag in flags))
    tiles = ("-mamx-tile", *_TILES.values()) if {"avx512_bf16", "avx512_vnni", *_TILES} <= set(flags) else ()
    try:
        with _folder() as folder:
            for more in dict.fromkeys((tiles, ())):  # a compiler may know the processor's vectors and not its tiles
                with suppress(*((subprocess.CalledProcessError,) if more else ())):
                    return _opened(_kept(folder, compiler, (*_OPTIONS, *options, *more))), ""
    except subprocess.TimeoutExpired:
        return None, f"{compiler} took more than {_SECONDS:.0f} s"
    except subprocess.CalledProcessError as error:
        return None, f"{compiler} refused: {error.stderr.strip().splitlines()[-1:]}"
    except OSError as error:
        return None, f"the products could not be built: {error}"
    raise AssertionError("the last attempt returns or raises")


def _kept(folder: Path, compiler: str, options: tuple[str, ...]) -> Path:
    """The library's file: of the cache, or made now."""
    about = os.stat(compiler)
    sources = [path.read_bytes() for path in (*_SOURCES, _HEADER)]
    key = repr((sources, os.path.realpath(compiler), about.st_size, about.st_mtime_ns, options))
    path = folder / f"products-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not path.is_file() or not _ours(path):
        _compile(compiler, options, path)
    return path


@contextmanager
def _folder() -> Iterator[Path]:
    """The user's cache folder, where nobody else can write; without one such, a folder for the time of loading."""
    root = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "mantissa"
    with suppress(OSError):
        if root.is_absolute():
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
    if root.is_absolute() and root.is_dir() and _ours(root) and os.access(root, os.W_OK):
        yield root
        return
    with tempfile.TemporaryDirectory(prefix="mantissa-") as made:
        yield Path(made)


def _ours(path: Path) -> bool:
    """Whether this user owns it and nobody else may write to it: what is loaded from there runs as this user."""
    about = path.lstat()
    return about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not path.is_symlink()


def _compile(compiler: str, options: tuple[str, ...], path: Path) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    command = [compiler, *options, "-o", str(beside), *map(str, _SOURCES)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
        beside.chmod(0o700)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _opened(path: Path) -> Any:
    library = ctypes.CDLL(str(path))
    pointer, size, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    library.mantissa_product.argtypes = [number, *[pointer] * 3, number, *[pointer] * 2, *[size] * 4, number, pointer]
    library.mantissa_attention.argtypes = [*[number] * 2, *[pointer] * 6, ctypes.c_float, number, pointer]
    real, threads = ctypes.c_float, (number, pointer)
    library.mantissa_packed_attention.argtypes = [*[number] * 2, *[pointer] * 6, real, *threads]
    library.mantissa_norm.argtypes = [*[number] * 2, *[pointer] * 5, size, size, real, *threads]
    library.mantissa_norm_gradients.argtypes = [*[number] * 2, *[pointer] * 6, size, size, real, *threads]
    library.mantissa_swiglu.argtypes = [*[number] * 2, *[pointer] * 3, *[size] * 3, *threads]
    library.mantissa_swiglu_gradients.argtypes = [*[number] * 2, *[pointer] * 5, *[size] * 2, *threads]
    library.mantissa_rotate.argtypes = [*[number] * 2, *[pointer] * 5, number, *threads]
    library.mantissa_round.argtypes = [number, pointer, pointer, size, number, pointer]
    library.mantissa_codes.argtypes = [number, *[pointer] * 3, *[size] * 2]
    library.mantissa_integers.argtypes = [*[pointer] * 3, number, *[pointer] * 3, *[size] * 3, number, pointer]
    library.mantissa_scaled.argtypes = [*[number] * 2, *[pointer] * 3, *[size] * 2, number, pointer]
    library.mantissa_step.argtypes = [pointer, pointer]
    library.mantissa_room.argtypes = [pointer, size]
    library.mantissa_room.restype = size
    library.mantissa_lay.argtypes = [number, pointer, pointer, size, size, number]
    nothing = "product", "lay", "norm", "norm_gradients", "swiglu", "swiglu_gradients", "rotate", "integers"
    for name in nothing:  # is what these return
        getattr(library, f"mantissa_{name}").restype = None
    library.mantissa_tiles()  # asks the system for them, where the library has code for them
    return library


@functools.cache
def team() -> int | None:
    """Where torch's own threads are called (``GOMP_parallel``), so that none stand beside them; None: not found."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    loaded = dict.fromkeys(line.split(maxsplit=5)[-1] for line in maps if "omp" in line.rpartition("/")[2])
    for name in loaded:
        with_threads = getattr(ctypes.CDLL(name), "GOMP_parallel", None)
        if with_threads is not None:
            return ctypes.cast(with_threads, ctypes.c_void_p).value
    return None


class _Nowhere:
    """What a forward without gradients keeps for its backward goes here: nothing stays."""

    def save_for_backward(self, *_: Tensor | None) -> None:
        pass

    def set_materialize_grads(self, _: bool) -> None:
        pass

    def __setattr__(self, name: str, value: object) -> None:
        pass


_NOWHERE = _Nowhere()


class Operation(torch.autograd.Function):
    """A function of autograd that costs less where nothing is differentiated."""

    @classmethod
    def of(cls, *given: Any) -> Any:
        """``apply``; without gradients the forward by itself, for to enter autograd takes as long as a small one."""
        return cls.apply(*given) if torch.is_grad_enabled() else cls.forward(_NOWHERE, *given)


class Norm(Operation):
    """y = w * n, n = round(x * s), of each row: ``simulated.RMSNorm``."""

    @staticmethod
    def forward(ctx: Any, x_NE: Tensor, weight_E: Tensor, eps: float, fmt: NumberFormat) -> Tensor:
        ctx.save_for_backward(x_NE, weight_E)
        ctx.eps, ctx.fmt = eps, fmt
        return norm(x_NE, weight_E, eps, fmt)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_NE, weight_E = ctx.saved_tensors
        return *norm_gradients(x_NE, weight_E, grads[0], ctx.eps, ctx.fmt), None, None


class AddedNorm(Operation):
    """t = round(x + y), and its norm. The gradient of x and of y is one: round(dt + that of the norm)."""

    @staticmethod
    def forward(
        ctx: Any, x_NE: Tensor, y_NE: Tensor, weight_E: Tensor, eps: float, fmt: NumberFormat
    ) -> tuple[Tensor, Tensor]:
        total_NE, out_NE = norm(x_NE, weight_E, eps, fmt, y_NE)
        ctx.save_for_backward(total_NE, weight_E)
        ctx.eps, ctx.fmt = eps, fmt
        ctx.set_materialize_grads(False)
        return total_NE, out_NE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        total, normed = grads
        if normed is None:  # nobody read the norm
            total = None if total is None else rounded(total, ctx.fmt)
            return total, total, None, None, None
        total_NE, weight_E = ctx.saved_tensors
        of_x, of_weight = norm_gradients(total_NE, weight_E, normed, ctx.eps, ctx.fmt, total)
        return of_x, of_x, of_weight, None, None


class SwiGLU(Operation):
    """y = round(silu(g)) * u, silu(g) = g / (1 + e^-g)."""

    @staticmethod
    def forward(ctx: Any, gate_NE: Tensor, up_NE: Tensor, fmt: NumberFormat) -> Tensor:
        ctx.save_for_backward(gate_NE, up_NE)
        ctx.fmt = fmt
        return swiglu(gate_NE, up_NE, fmt)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate_NE, up_NE = ctx.saved_tensors
        return *swiglu_gradients(gate_NE, up_NE, grads[0], ctx.fmt), None


class Rotation(Operation):
    """A rotation; its backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, fmt: NumberFormat) -> Tensor:
        ctx.save_for_backward(cos_BTD, sin_BTD)
        ctx.fmt = fmt
        return rotate(x_BHTD, cos_BTD, sin_BTD, fmt)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos_BTD, sin_BTD = ctx.saved_tensors
        return rotate(grads[0], cos_BTD, sin_BTD, ctx.fmt, back=True), None, None, None


class PackedAttention(Operation):
    """Attention of packed positions, each to those of its sequence up to itself: ``packed_attention``."""

    @staticmethod
    def forward(ctx: Any, q_1HND: Tensor, k_1KND: Tensor, v_1KND: Tensor, fmt: NumberFormat, spans: Spans) -> Tensor:
        out_1HND = packed_attention(q_1HND, k_1KND, v_1KND, fmt, spans)
        ctx.save_for_backward(q_1HND, k_1KND, v_1KND, out_1HND)
        ctx.fmt, ctx.spans = fmt, spans
        return out_1HND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out = ctx.saved_tensors
        return *packed_attention_gradients(q, k, v, out, grads[0], ctx.fmt, ctx.spans), None, None


def causal_attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, fmt: NumberFormat) -> Tensor:
    """``PackedAttention`` of whole sequences that share nothing. Shape of ``q``."""
    batch, heads, length, size = q_BHTD.shape
    packed = (x.transpose(1, 2).reshape(1, batch * length, -1, size).transpose(1, 2) for x in (q_BHTD, k_BKTD, v_BKTD))
    out_1HND: Tensor = PackedAttention.of(*packed, fmt, Spans.whole(batch, length))
    return out_1HND.transpose(1, 2).view(batch, length, heads, size).transpose(1, 2)


class Compiles:
    """A family of kernels whose attention and rows are this code where it was measured to be no slower.

    ``products``: ``cpu.Products``, which know what was measured.
    """

    format: NumberFormat
    dtype: torch.dtype
    products: Any

    def compiles(self, x: Tensor, width: int = 0, part: Part = "rows") -> bool:
        """Whether compiled code computes that of such tensors, in training too."""
        read = x.dtype is self.dtype and x.dtype in _READ
        return read and bool(self.products.has(part, x, self.format, width))

    def packed_attention(self, q: Tensor, k: Tensor, v: Tensor, spans: SpansOf) -> Tensor | None:
        """``Kernels.packed_attention``."""
        return PackedAttention.of(q, k, v, self.format, spans()) if self.compiles(q, part="attention") else None
