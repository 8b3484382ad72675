"""Block scaling: 8-bit codes that share a scale with their neighbours.

e4m3 holds 2^-9 to 448, so a tensor is divided by a scale before it is rounded. One scale for a whole tensor would let
its largest value push the others into the subnormals, and would make a row's result depend on the rows beside it. So
each block of at most 128 values in a line, or of 128 by 128, has its own:

    d = fp32(amax / largest)        at least 2^-126; 1 where the block is all zeros; or rounded up to a power of two
    code = format(fp32(x / d))      to nearest, ties to even; |x / d| exceeds ``largest`` by an fp32 rounding at most
    value = fp32(code * d)

Each step is one rounding that IEEE 754 defines, so codes and scales are the same bits on every device. What checkpoints
call ``weight_scale_inv`` is d. A dimension that 128 does not divide ends in a shorter block, whose codes are those of
the block padded with zeros.

A power of two makes the division and the last product exact: a value then has the format's own digits, is on the bf16
grid, and is quantised again to itself. It costs at most a factor of two of the range below, and no digit above it.

Two ways in. ``quantize`` makes codes, for a weight that is kept or sent, and refuses a tensor that is not finite.
``round_in_blocks`` is for the kernels: the values alone, in fp32, without a check, which would stall a GPU at each
product. There a block that holds inf or NaN becomes NaN throughout: a gradient that overflowed must never look like a
finite one.

Cost on a CPU: torch takes 1.4 ms per million values to turn e4m3 into fp32. ``round_in_blocks`` makes no codes: for
|y| in [2^e, 2^(e+1)) adding and subtracting 1.5 * 2^(e + 23 - mantissa bits) rounds y in fp32's own addition: 0.4 to
0.8 ms per million with scales and all, on two threads.

Sources: DeepSeek-AI, "DeepSeek-V3 technical report" (2024), section 3.3.2 (1x128 and 128x128 scales); the formats:
``formats.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.precision.formats import E4M3, NumberFormat, round_bounded_, round_to_format
from mantissa.precision.policy import BLOCK

Block = tuple[int, int]

ALONG_ROWS: Block = (1, BLOCK)  # an activation or gradient, tokens by features, in a product that sums over features
ALONG_COLUMNS: Block = (BLOCK, 1)  # the same tensor in the product that sums over tokens: the weight's gradient
SQUARE: Block = (BLOCK, BLOCK)  # a weight: one set of codes serves x W^T and grad W

_EXPONENT = 0x7F800000  # fp32's exponent bits


@dataclass(frozen=True)
class BlockScaled:
    """A tensor as 8-bit codes and one fp32 scale a block: value = code * scale.

    ``codes``: dtype of an 8-bit format, any shape. ``scales``: fp32, one for each block of the last dimension
    (activations) or of the last two (weights); a block at the edge may be short.
    """

    codes: Tensor
    scales: Tensor


def quantize(
    x: Tensor, fmt: NumberFormat, block: Block = ALONG_ROWS, power_of_two: bool = False, name: str = "tensor"
) -> BlockScaled:
    """``x`` as codes of ``fmt`` and a scale for each ``block`` of its last two dimensions. No gradient.

    ``x``: fp32 or a half, shape (..., R, C), or (C,), which counts as one row. Codes have its shape; scales are fp32,
    (..., ceil(R / rows), ceil(C / columns)), contiguous. Raises ``MantissaError`` naming ``name`` where ``x`` is not
    finite; ``TypeError`` for other dtypes.
    """
    x = _fp32(x)
    codes = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    scales = _empty_scales(x, block)
    for of_values, of_scales in _tiles(x, block):
        of_x = _part(x, of_values)
        d = _scale_of(of_x, fmt, power_of_two)
        _part(scales, of_scales).copy_(d)
        _part(codes, of_values).copy_(of_x / d)
    if not bool(scales.isfinite().all()):
        bad = x[~x.isfinite()].flatten()
        raise MantissaError(
            f"fp8: {name} holds {bad[0].item()} in {bad.numel()} of {x.numel()} values: expected finite values; "
            "training diverged, or the tensor was never written"
        )
    return BlockScaled(codes, scales)


def dequantize(scaled: BlockScaled, block: Block = ALONG_ROWS, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values code * scale, rounded once to fp32, then to ``dtype``. Zeros are positive, as ``round_in_blocks``'s.

    Codes may be NaN, and give NaN. A code of a tensor that reaches fp32's last binade may give inf.
    """
    if scaled.scales.shape != _empty_scales(scaled.codes, block).shape:
        raise ValueError(
            f"scales of shape {tuple(scaled.scales.shape)} for codes {tuple(scaled.codes.shape)} in blocks {block}"
        )
    values = scaled.codes.to(torch.float32)
    for of_values, of_scales in _tiles(values, block):
        _part(values, of_values).mul_(_part(scaled.scales, of_scales))
    return values.add_(0.0).to(dtype)  # -0 + 0 is +0


def round_in_blocks(x: Tensor, fmt: NumberFormat, block: Block = ALONG_ROWS, power_of_two: bool = False) -> Tensor:
    """The values that ``quantize`` and ``dequantize`` give, to the bit: fp32, a new tensor, no gradient, no check.

    A block that holds inf or NaN becomes NaN throughout.
    """
    x = _fp32(x)
    out = torch.empty_like(x)
    for of_values, _ in _tiles(x, block):
        of_x = _part(x, of_values)
        d = _scale_of(of_x, fmt, power_of_two)
        round_bounded_(torch.div(of_x, d, out=_part(out, of_values)), fmt).mul_(d)
    return out


def round_cached(x: Tensor, fmt: NumberFormat) -> Tensor:
    """What a cache in ``fmt`` does to keys and values, (..., D): e4m3 with a scale for each vector; else rounding.

    The scale is a power of two: what is attended to is then on the grid that ``x`` was on (four digits of a value that
    bf16 or fp16 holds), so attention's operands stay in the rollout's format. Same dtype as ``x``; no gradient in e4m3.
    A vector that holds inf or NaN becomes NaN throughout.
    """
    if fmt is not E4M3:
        return round_to_format(x, fmt)
    return round_in_blocks(x.detach(), fmt, (1, x.shape[-1]), power_of_two=True).to(x.dtype)


def _fp32(x: Tensor) -> Tensor:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"block scaling needs fp32 or a half, not {x.dtype}: cast on a line of its own")
    return x.detach().float()  # exact


def _scale_of(of_x: Tensor, fmt: NumberFormat, power_of_two: bool) -> Tensor:
    """d of each block of ``of_x`` (..., i, rows, j, columns), as (..., i, 1, j, 1). Not finite where a value is not."""
    amax = torch.maximum(of_x.amax((-3, -1), keepdim=True), of_x.amin((-3, -1), keepdim=True).neg_())
    # A tensor, not a number: by a number, CUDA multiplies with its reciprocal, which rounds twice.
    d = (amax / torch.full_like(amax, fmt.largest)).clamp_(min=2.0**-126)
    if power_of_two:
        upward = d.view(torch.int32).add(0x7FFFFF).bitwise_and_(_EXPONENT).view(torch.float32)
        d = torch.where(d.isfinite(), upward, d)
    return torch.where(amax == 0, torch.ones_like(d), d)


def _empty_scales(x: Tensor, block: Block) -> Tensor:
    rows, columns = block
    if x.dim() == 0 or (x.dim() == 1 and rows > 1):
        raise ValueError(f"blocks of {rows} by {columns} of a tensor of {x.dim()} dimensions")
    of_rows = (*x.shape[:-2], -(-x.shape[-2] // rows)) if x.dim() > 1 else ()
    return torch.empty((*of_rows, -(-x.shape[-1] // columns)), dtype=torch.float32, device=x.device)


_Span = tuple[slice, int]  # which rows or columns of a tensor, and how many of them a block has
_Cut = tuple[_Span, _Span]


def _tiles(x: Tensor, block: Block) -> Iterator[tuple[_Cut, _Cut]]:
    """Where the values of blocks of one size lie, and where their scales: at most four times.

    The whole blocks, and those cut short below, to the right, and in the corner.
    """
    for rows, rows_of_scales in _spans(_two(x).shape[-2], block[0]):
        for columns, columns_of_scales in _spans(x.shape[-1], block[1]):
            yield (rows, columns), (rows_of_scales, columns_of_scales)


def _spans(size: int, block: int) -> Iterator[tuple[_Span, _Span]]:
    """The whole blocks of ``size`` values, and the shorter last one; and the scales of each, one for a block."""
    whole = size - size % block
    for start, stop, length in ((0, whole, block), (whole, size, size - whole)):
        if stop > start:
            yield (slice(start, stop), length), (slice(start // block, -(-stop // block)), 1)


def _part(x: Tensor, cut: _Cut) -> Tensor:
    """A view (..., i, rows, j, columns) of blocks of ``x``; of scales (..., i, 1, j, 1)."""
    (rows, height), (columns, width) = cut
    return _two(x)[..., rows, columns].unflatten(-1, (-1, width)).unflatten(-3, (-1, height))


def _two(x: Tensor) -> Tensor:
    """A vector as one row."""
    return x if x.dim() > 1 else x.unsqueeze(0)
