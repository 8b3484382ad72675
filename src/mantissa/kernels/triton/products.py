"""Row-invariant matrix products on a GPU: x @ w^T in fp32, bf16, fp16, and in block-scaled fp8.

Row r of the result is a function of row r of x and of w: never of how many rows there are, or where r stands among
them. Tiles are fixed by the dtype and the weight's shape (N, K), and so is the tree of each output element: K is cut
into ``splits`` ranges of whole steps of the tile's depth; each has an accumulator that takes its steps in order, and
the ranges are added in order. Rows beyond the last are loaded as zeros and not stored. Inside a step the tensor core's
sum depends on the operands of that row and column alone.

Who walks that tree does depend on the rows. Where they are many, one program takes the ranges of its tile one after
the other. Where they are few, as in decoding, a program takes one range, so that a weight of few columns still fills
the GPU; the ranges' sums go through memory, and a second kernel adds them.

Half operands and fp32 accumulate in fp32 (fp32 as true fp32: TF32 has 10 bits), add the bias and round once. fp8
operands are codes with a scale for each 128 values: a block of 128 is summed in the tensor core (whose fp8 accumulator
on Hopper keeps about 14 bits), then multiplied by its two scales and added up in fp32, block by block.

The tiles and splits are a guess from arithmetic, not tuned. fp8 products are not split.

Interpreted on a CPU, compiled for sm_80 and sm_90 (fp8: for sm_90), run on an H200.

The linear layer with fp8 operands is the three products of ``simulated.py``, on codes in place of their values; dW is
rounded to the base format (fp16's overflow must reach the loss scaler) and then held in the master's fp32. The fast and
the exact family share the forward product. It is row-invariant as it stands: a scale belongs to one row, and the
product's tiles do not depend on the number of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from mantissa.kernels.triton import LAUNCH, PROGRAMS, aligned, ceil_div
from mantissa.precision import E4M3, SQUARE, BlockScaled, Fp8Policy, NumberFormat, dequantize
from mantissa.precision.schemes import BLOCK

_LEAST = 8  # features of a row that fill 16 bytes in every dtype
_GROUP = 8  # tiles of rows that go through the columns together: they find the weights in the L2 cache


@dataclass(frozen=True)
class Tile:
    """Rows, columns and depth of a product's tile; warps that compute it; tiles loaded ahead; ranges of K."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    splits: int = 1


def product_tile(dtype: torch.dtype, outputs: int, inputs: int) -> Tile:
    """The tile for operands of ``dtype`` and a weight of ``outputs`` by ``inputs``. The rows of x do not enter."""
    if dtype == torch.float32:  # no tensor core: products on the fp32 units, operands of 64 KiB would not fit
        return _cut(Tile(64, 64, 32, 4, 2), outputs, inputs)
    wide = outputs >= 4096  # from here on 128 columns leave at least 32 programs for one tile of rows
    if dtype.itemsize == 1:
        return Tile(128, 128, BLOCK, 8, 3) if wide else Tile(128, 64, BLOCK, 4, 3)
    return _cut(Tile(128, 128, 64, 8, 3) if wide else Tile(128, 64, 64, 4, 3), outputs, inputs)


def _cut(tile: Tile, outputs: int, inputs: int) -> Tile:
    """Ranges enough for ``PROGRAMS`` programs over one tile of rows, of at least four steps each; a power of two."""
    most = min(PROGRAMS // ceil_div(outputs, tile.columns), inputs // (4 * tile.depth))
    return replace(tile, splits=1 << (max(1, most).bit_length() - 1))


def matmul(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x @ weight^T + bias, fp32 inside, rounded once to ``out_dtype`` (fp32 keeps the accumulator). M by N.

    ``x_MK`` and ``weight_NK`` share a dtype (fp32, bf16, fp16); ``bias_N`` may have any of them.
    """
    rows, inputs, outputs = _checked(x_MK, weight_NK)
    if inputs % _LEAST:  # rows of whole 16 bytes: zeros more are exact, and thousands of single loads spill registers
        x_MK, weight_NK = (F.pad(t, (0, -inputs % _LEAST)) for t in (x_MK, weight_NK))
        inputs = x_MK.shape[1]
    x, weight = aligned(x_MK), aligned(weight_NK)
    bias = weight if bias_N is None else aligned(bias_N)
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    if rows == 0:
        return out
    tile = product_tile(x.dtype, outputs, inputs)
    programs = ceil_div(rows, tile.rows) * ceil_div(outputs, tile.columns)
    apart = tile.splits > 1 and programs < PROGRAMS
    into = torch.empty(tile.splits, rows, outputs, dtype=torch.float32, device=x.device) if apart else out
    unit = math.gcd(inputs, tile.depth)
    _product[programs, tile.splits if apart else 1](
        x, weight, bias, into, rows, outputs, inputs // unit, UNIT=unit,
        HAS_BIAS=bias_N is not None, EVEN_K=unit == tile.depth, SPLITS=tile.splits, APART=apart, BLOCK_M=tile.rows,
        BLOCK_N=tile.columns, BLOCK_K=tile.depth, GROUP=_GROUP, num_warps=tile.warps, num_stages=tile.stages, **LAUNCH,
    )  # fmt: skip
    if apart:
        _join[ceil_div(rows, 16), ceil_div(outputs, 64)](
            into, bias, out, rows, outputs,
            HAS_BIAS=bias_N is not None, SPLITS=tile.splits, BLOCK_M=16, BLOCK_N=64, num_warps=4, **LAUNCH,
        )  # fmt: skip
    return out


def scaled_matmul(
    x_MK: BlockScaled, weight_NK: BlockScaled, bias_N: Tensor | None, out_dtype: torch.dtype, weight_rows: int = BLOCK
) -> Tensor:
    """x @ weight^T + bias of block-scaled operands, fp32 sums of blocks, rounded once to ``out_dtype``. M by N.

    Codes e4m3 or e5m2. ``x_MK.scales`` is M by K/128. ``weight_rows``: rows of the weight that share a scale: 128
    (scales N/128 by K/128) or 1 (scales N by K/128). Dimensions are rounded up: the last block may be short.
    """
    rows, inputs, outputs = _checked(x_MK.codes, weight_NK.codes)
    blocks = ceil_div(inputs, BLOCK)
    expected = (rows, blocks), (ceil_div(outputs, weight_rows), blocks)
    found = tuple(x_MK.scales.shape), tuple(weight_NK.scales.shape)
    if found != expected or weight_rows not in (1, BLOCK):
        raise ValueError(f"scales of {found} for blocks of 1 and {weight_rows} by {BLOCK}: expected {expected}")
    codes = aligned(x_MK.codes), aligned(weight_NK.codes)
    scales = aligned(x_MK.scales), aligned(weight_NK.scales)
    bias = scales[1] if bias_N is None else aligned(bias_N)
    out = torch.empty(rows, outputs, dtype=out_dtype, device=codes[0].device)
    if rows == 0:
        return out
    tile = product_tile(codes[0].dtype, outputs, inputs)
    grid = (ceil_div(rows, tile.rows) * ceil_div(outputs, tile.columns),)
    _scaled_product[grid](
        codes[0], scales[0], codes[1], scales[1], bias, out, rows, outputs, inputs, blocks,
        HAS_BIAS=bias_N is not None, EVEN_K=inputs % tile.depth == 0, WEIGHT_ROWS=weight_rows, BLOCK_M=tile.rows,
        BLOCK_N=tile.columns, BLOCK_K=tile.depth, GROUP=_GROUP, num_warps=tile.warps, num_stages=tile.stages, **LAUNCH,
    )  # fmt: skip
    return out


def quantize(x_MK: Tensor, fmt: NumberFormat, block_rows: int, power_of_two: bool) -> BlockScaled:
    """Codes and scales of ``x_MK`` in blocks of ``block_rows`` (1 or 128) by 128; value = code * scale.

    d = fp32(amax / largest), with ``power_of_two`` rounded up to one; at least 2^-126; 1 for a block of zeros.
    code = fmt(fp32(x / d)). A block that holds inf or NaN is NaN throughout, scale and codes: a check would have to
    wait for the GPU, and a block silently at its largest value would hide an overflow.
    """
    if block_rows not in (1, BLOCK) or x_MK.dim() != 2:
        raise ValueError(
            f"blocks of {block_rows} rows of {tuple(x_MK.shape)}: expected a matrix, and 1 or {BLOCK} rows"
        )
    x, (rows, columns) = aligned(x_MK), x_MK.shape
    blocks = ceil_div(columns, BLOCK)
    codes = torch.empty(rows, columns, dtype=fmt.dtype, device=x.device)
    scales = torch.empty(ceil_div(rows, block_rows), blocks, dtype=torch.float32, device=x.device)
    tile_rows = 32 if block_rows == 1 else BLOCK
    if rows and columns:
        _quantize[(ceil_div(rows, tile_rows), blocks)](
            x, codes, scales, rows, columns, blocks, LARGEST=fmt.largest, POWER_OF_TWO=power_of_two,
            PER_ROW=block_rows == 1, BLOCK_M=tile_rows, BLOCK_K=BLOCK, num_warps=4 if block_rows == 1 else 8, **LAUNCH,
        )  # fmt: skip
    return BlockScaled(codes, scales)


def _checked(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.shape[1] == 0:
        raise ValueError(f"a product of {tuple(x.shape)} with the transpose of {tuple(weight.shape)}")
    if x.dtype != weight.dtype and not x.dtype.itemsize == weight.dtype.itemsize == 1:
        raise TypeError(f"a product of {x.dtype} with {weight.dtype}: cast one of them on a line of its own")
    return x.shape[0], x.shape[1], weight.shape[0]


@triton.jit
def _place(
    rows: tl.tensor, N: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Which rows (int64) and columns this program computes: GROUP tiles of rows go through the columns together."""
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = program // (GROUP * column_tiles) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    within = program % (GROUP * column_tiles)
    row_tile, column_tile = first + within % height, within // height
    m = row_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    return m, n


@triton.jit
def _finish(
    out: tl.tensor, total: tl.tensor, bias: tl.tensor, m: tl.tensor, n: tl.tensor, rows: tl.tensor, N: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> None:  # fmt: skip
    """Add the bias, round once, store the rows and columns that exist."""
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    inside = (m < rows)[:, None] & (n < N)[None, :]
    tl.store(out + m[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _range(
    x_tile: tl.tensor, w_tile: tl.tensor, in_rows: tl.tensor, in_columns: tl.tensor, K: tl.tensor, split: tl.tensor,
    EVEN_K: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The sum over one of the ranges of K: whole steps, and behind the last range what is left of K, masked."""
    steps = K // BLOCK_K
    per = tl.cdiv(steps, SPLITS)
    first, last = split * per, tl.minimum(split * per + per, steps)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(first, last):
        a = tl.load(x_tile + step * BLOCK_K, mask=in_rows, other=0.0)
        b = tl.load(w_tile + step * BLOCK_K, mask=in_columns, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if not EVEN_K:  # noqa: SIM102 - decided when it is compiled, the other when it runs
        if split == SPLITS - 1:
            inside = tl.arange(0, BLOCK_K) < K - steps * BLOCK_K
            a = tl.load(x_tile + steps * BLOCK_K, mask=in_rows & inside[None, :], other=0.0)
            b = tl.load(w_tile + steps * BLOCK_K, mask=in_columns & inside[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def _product(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, rows: tl.tensor, N: tl.tensor, units: tl.tensor,
    UNIT: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, SPLITS: tl.constexpr, APART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    K = units * UNIT  # a multiple of 8, as the compiler sees: so it loads 16 bytes at a time
    m, n = _place(rows, N, BLOCK_M, BLOCK_N, GROUP)
    k = tl.arange(0, BLOCK_K)
    x_tile = x + m[:, None] * K + k[None, :]
    w_tile = weight + n.to(tl.int64)[None, :] * K + k[:, None]
    in_rows, in_columns = (m < rows)[:, None], (n < N)[None, :]
    tl.assume(K > 0)  # without it the assembler serialises some shapes' wgmma
    if APART:  # one range, whose sum goes to memory
        split = tl.program_id(1)
        part = _range(x_tile, w_tile, in_rows, in_columns, K, split, EVEN_K, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K)
        _finish(out + split.to(tl.int64) * rows * N, part, bias, m, n, rows, N, False)
    elif SPLITS == 1:
        total = _range(x_tile, w_tile, in_rows, in_columns, K, 0, EVEN_K, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K)
        _finish(out, total, bias, m, n, rows, N, HAS_BIAS)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for split in range(0, SPLITS):
            total += _range(x_tile, w_tile, in_rows, in_columns, K, split, EVEN_K, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K)
        _finish(out, total, bias, m, n, rows, N, HAS_BIAS)


@triton.jit(do_not_specialize=["rows"])
def _join(
    parts: tl.tensor, bias: tl.tensor, out: tl.tensor, rows: tl.tensor, N: tl.tensor, HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """Add the ranges' sums in order, as ``_product`` does where it takes them all."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m < rows)[:, None] & (n < N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    place = m[:, None] * N + n[None, :]
    for _ in range(0, SPLITS):
        total += tl.load(parts + place, mask=inside, other=0.0)
        place += rows * N
    _finish(out, total, bias, m, n, rows, N, HAS_BIAS)


@triton.jit(do_not_specialize=["rows"])
def _scaled_product(
    x: tl.tensor, x_scales: tl.tensor, weight: tl.tensor, w_scales: tl.tensor, bias: tl.tensor, out: tl.tensor,
    rows: tl.tensor, N: tl.tensor, K: tl.tensor, blocks: tl.tensor, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:  # fmt: skip
    m, n = _place(rows, N, BLOCK_M, BLOCK_N, GROUP)
    k = tl.arange(0, BLOCK_K)
    x_tile = x + m[:, None] * K + k[None, :]
    w_tile = weight + n.to(tl.int64)[None, :] * K + k[:, None]
    in_rows, in_columns = m < rows, n < N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    tl.assume(blocks > 0)
    for block in range(0, blocks):
        if EVEN_K:
            a = tl.load(x_tile, mask=in_rows[:, None], other=0.0)
            b = tl.load(w_tile, mask=in_columns[None, :], other=0.0)
        else:
            in_depth = k < K - block * BLOCK_K
            a = tl.load(x_tile, mask=in_rows[:, None] & in_depth[None, :], other=0.0)
            b = tl.load(w_tile, mask=in_columns[None, :] & in_depth[:, None], other=0.0)
        scale_m = tl.load(x_scales + m * blocks + block, mask=in_rows, other=0.0)
        scale_n = tl.load(w_scales + n.to(tl.int64) // WEIGHT_ROWS * blocks + block, mask=in_columns, other=0.0)
        total += tl.dot(a, b) * scale_m[:, None] * scale_n[None, :]
        x_tile += BLOCK_K
        w_tile += BLOCK_K
    _finish(out, total, bias, m, n, rows, N, HAS_BIAS)


@triton.jit(do_not_specialize=["rows"])
def _quantize(
    x: tl.tensor, codes: tl.tensor, scales: tl.tensor, rows: tl.tensor, K: tl.tensor, blocks: tl.tensor,
    LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, PER_ROW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(1)
    k = block * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (m < rows)[:, None] & (k < K)[None, :]
    value = tl.load(x + m[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(value)
    largest = tl.max(size, axis=1)
    finite = tl.min((size < float("inf")).to(tl.int32), axis=1)  # a maximum may pass over NaN
    if not PER_ROW:
        largest = tl.max(largest, axis=0) + tl.zeros((BLOCK_M,), dtype=tl.float32)
        finite = tl.min(finite, axis=0) + tl.zeros((BLOCK_M,), dtype=tl.int32)
    scale = tl.div_rn(largest, tl.full((BLOCK_M,), LARGEST, dtype=tl.float32))
    if POWER_OF_TWO:  # up to the next exponent where a mantissa bit is set
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(largest == 0.0, 1.0, tl.maximum(scale, 1.1754943508222875e-38))
    scale = tl.where(finite == 1, scale, float("nan"))
    code = tl.div_rn(value, tl.broadcast_to(scale[:, None], (BLOCK_M, BLOCK_K)))
    tl.store(codes + m[:, None] * K + k[None, :], code.to(codes.dtype.element_ty), mask=inside)
    if PER_ROW:
        tl.store(scales + m * blocks + block, scale, mask=m < rows)
    else:
        one = tl.arange(0, BLOCK_M) == 0
        tl.store(scales + tl.program_id(0) * blocks + block + tl.zeros((BLOCK_M,), dtype=tl.int32), scale, mask=one)


def quantized_weight(master_FE: Tensor, fp8: Fp8Policy) -> BlockScaled:
    """Codes and scales of an fp32 master, in blocks of 128 by 128."""
    return quantize(master_FE.detach(), E4M3, BLOCK, fp8.power_of_two)


class Fp8Linear(torch.autograd.Function):
    """x @ weight^T + bias in block-scaled fp8, rounded to the dtype of ``x``.

    ``weight``: an fp32 master, or codes with their ``scales`` (then it has no gradient).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, fp8: Fp8Policy
    ) -> Tensor:
        codes = quantized_weight(weight, fp8) if scales is None else BlockScaled(weight, scales)
        flat = x.reshape(-1, x.shape[-1])
        out = scaled_matmul(quantize(flat, E4M3, 1, fp8.power_of_two), codes, bias, x.dtype)
        ctx.save_for_backward(x, codes.codes, codes.scales)
        ctx.fp8 = fp8
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, Tensor | None, None]:
        x, *weight = ctx.saved_tensors
        flat, grad = x.reshape(-1, x.shape[-1]), grads[0].reshape(-1, grads[0].shape[-1])
        fmt = ctx.fp8.backward_format
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _grad_x(grad, BlockScaled(*weight), fmt, ctx.fp8.power_of_two).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = _grad_weight(grad, flat, fmt, ctx.fp8.power_of_two)
        grad_bias = grad.sum(0) if ctx.needs_input_grad[3] else None
        return grad_x, grad_weight, None, grad_bias, None


def _grad_x(grad_NF: Tensor, weight_FE: BlockScaled, fmt: NumberFormat | None, power_of_two: bool) -> Tensor:
    if fmt is None:
        return grad_NF @ dequantize(weight_FE, SQUARE, grad_NF.dtype)
    transposed = BlockScaled(weight_FE.codes.t().contiguous(), weight_FE.scales.t().contiguous())
    return scaled_matmul(quantize(grad_NF, fmt, 1, power_of_two), transposed, None, grad_NF.dtype)


def _grad_weight(grad_NF: Tensor, x_NE: Tensor, fmt: NumberFormat | None, power_of_two: bool) -> Tensor:
    if fmt is None:
        return (grad_NF.t() @ x_NE).float()  # the master's dtype, from here on
    grad, x = (quantize(_by_tokens(a), f, 1, power_of_two) for a, f in ((grad_NF, fmt), (x_NE, E4M3)))
    return scaled_matmul(grad, x, None, x_NE.dtype, weight_rows=1).float()


def _by_tokens(x_NE: Tensor) -> Tensor:
    """Transposed, with zeros up to a multiple of 128 tokens, which change no sum: rows then stay aligned. E by N."""
    tokens, features = x_NE.shape
    padded = x_NE.new_zeros(features, -(-tokens // BLOCK) * BLOCK)
    padded[:, :tokens] = x_NE.t()
    return padded
