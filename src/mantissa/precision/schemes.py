"""Scaled formats of 8 and 4 bits: codes that share a scale with their neighbours.

Blocks. e4m3 holds 2^-9 to 448, so a tensor is divided by a scale before it is rounded. One scale for a whole tensor
would let its largest value push the others into the subnormals, and would make a row's result depend on the rows beside
it. So each block of at most 128 values in a line, or of 128 by 128, has its own:

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

Schemes: what else serving engines keep weights in, as exact definitions.

=======  =========  ===============================================================  ====================
scheme   code       scale                                                            activations
=======  =========  ===============================================================  ====================
mxfp8    e4m3       a power of two for 32 in a row: 2^(floor(log2 amax) - 8)         the same
mxfp4    e2m1       the same, 2^(floor(log2 amax) - 2)                               the same
nvfp4    e2m1       e4m3 for 16 in a row, times one fp32 for the tensor              the same, fp32 by row
int8     -128..127  fp32 for a row: amax / 127.5                                     the same, by token
int4     -8..7      fp32 for 128 in a row: amax / 7.5                                the base format
int4-32  -8..7      fp32 for 32 in a row: amax / 7.5                                 the base format
=======  =========  ===============================================================  ====================

A row runs along the dimension that a product sums over. e2m1 holds 0, 0.5, 1, 1.5, 2, 3, 4 and 6; every code is rounded
to nearest, ties to even, and what lies beyond the largest saturates. The power of two is rounded down, so up to half of
the largest values of a block saturate: that is the OCP's definition. Each step below is one fp32 operation, in the
order that torchao 0.18 has it, so codes and scales are its own to the bit. An all-zero block has the smallest scale
there is, and codes of 0. A dimension that a block does not divide ends in a shorter one.

nvfp4's second scale is amax / (448 * 6) of the whole weight, so that the largest block scale is e4m3's largest. Of an
activation it is of each token by itself, for a number of one token must not depend on the tokens beside it; engines
that use one calibrated number a layer differ from that.

Sources: OCP Microscaling Formats v1.0, sections 5 and 6.3; NVIDIA, "Introducing NVFP4" (2025); torchao 0.18.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.precision.formats import E4M3, NumberFormat, round_to_format

BLOCK = 128  # values that share a scale: 1 x 128 of an activation or gradient, 128 x 128 of a weight
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
    x = _widened(x)
    scaled = quantized(x, fmt, block, power_of_two)
    if not bool(scaled.scales.isfinite().all()):
        bad = x[~x.isfinite()].flatten()
        raise MantissaError(
            f"fp8: {name} holds {bad[0].item()} in {bad.numel()} of {x.numel()} values: expected finite values; "
            "training diverged, or the tensor was never written"
        )
    return scaled


def quantized(x: Tensor, fmt: NumberFormat, block: Block = ALONG_ROWS, power_of_two: bool = False) -> BlockScaled:
    """``quantize`` without a check: a block that holds inf or NaN has a scale that is not finite."""
    x = _widened(x)
    codes = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    scales = _empty_scales(x, block)
    for of_values, of_scales in _tiles(x, block):
        of_x = _part(x, of_values)
        d = _scale_of(of_x, fmt, power_of_two)
        _part(scales, of_scales).copy_(d)
        _part(codes, of_values).copy_(of_x / d)
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
    x = _widened(x)
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


def _widened(x: Tensor) -> Tensor:
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


def round_bounded_(y: Tensor, fmt: NumberFormat) -> Tensor:
    """Round ``y`` (fp32, |y| at most about ``fmt.largest``, or NaN) to the grid in place; every zero becomes +0.

    The number added is 1.5 * 2^(e + 23 - m): the sum lies in a binade whose spacing is the grid's, 2^(e - m), and its
    addition rounds to nearest, ties to even, as the format does. Below the smallest normal the spacing stays.
    """
    least = (128 - fmt.bias) << 23  # the bits of the smallest normal
    raise_by = ((23 - fmt.mantissa_bits) << 23) + 0x400000
    bits = y.view(torch.int32) & 0x7F800000
    number = bits.clamp_min_(least).add_(raise_by).view(torch.float32)
    return y.add_(number).sub_(number)


E2M1 = NumberFormat("e2m1", 2, 1, 6.0, "saturate", torch.float32)
_TINY = 2.0**-126


@dataclass(frozen=True)
class Coded:
    """``values``: fp32, on the grid of their blocks, the tensor's shape. ``codes``: fp32 numbers of the element's own
    grid, before any scale. ``scales``: of each block, in what the format stores: the e8m0 byte (uint8), e4m3, or fp32;
    ``total``: nvfp4's second one, else None."""

    values: Tensor
    codes: Tensor
    scales: Tensor
    total: Tensor | None = None


@dataclass(frozen=True)
class Scheme:
    """One row of the table. ``encode``: of a tensor (R, C), and whether it is an activation. ``activations``: whether
    those are quantised too. ``bits``: of a weight, scales included. ``size``: of a block; None: a row."""

    name: str
    encode: Callable[[Tensor, bool], Coded]
    activations: bool
    bits: float
    size: int | None

    def weight(self, master: Tensor, name: str = "tensor") -> Tensor:
        """The fp32 values of a weight's codes; no gradient. ``MantissaError`` where it is not finite."""
        if not bool(master.isfinite().all()):
            raise MantissaError(f"{self.name}: {name} holds values that are not finite: training diverged")
        return self.encode(_fp32(master), False).values

    def activation(self, x_NE: Tensor) -> Tensor:
        """The fp32 values of an activation's codes, of shape (..., E); itself where those stay in the base format. A
        block that holds inf or NaN becomes NaN."""
        if not self.activations:
            return x_NE
        flat = _fp32(x_NE).reshape(-1, x_NE.shape[-1])
        return self.encode(flat, True).values.view(x_NE.shape)


def _fp32(x: Tensor) -> Tensor:
    return x.detach().float()  # exact


def _blocks(x: Tensor, size: int) -> Tensor:
    """(R, C) as (R, blocks, size), the last one padded with zeros."""
    return F.pad(x, (0, -x.shape[1] % size)).unflatten(1, (-1, size))


def _whole(blocks: Tensor, x: Tensor) -> Tensor:
    return blocks.flatten(1)[:, : x.shape[1]]


def _amax(blocks: Tensor) -> Tensor:
    """Of each block, (R, blocks, 1); NaN where a value is not finite."""
    peak = blocks.abs().amax(-1, keepdim=True)
    return torch.where(peak.isfinite(), peak, torch.nan)


def _element(y: Tensor, fmt: NumberFormat) -> Tensor:
    """Rounded to the element's grid, saturating; NaN stays."""
    return round_bounded_(y.clamp(-fmt.largest, fmt.largest), fmt)


def _mx(fmt: NumberFormat, largest_power: int) -> Callable[[Tensor, bool], Coded]:
    def encode(x: Tensor, activation: bool) -> Coded:
        blocks = _blocks(x, 32)
        amax = _amax(blocks)
        power = ((amax.view(torch.int32) >> 23) & 0xFF) - 127 - largest_power
        byte = power.clamp(-127, 128) + 127
        scale = torch.where(amax.isnan(), torch.nan, (byte << 23).view(torch.float32).clamp(min=_TINY))
        codes = _element(blocks / scale, fmt)
        stored = torch.where(amax.isnan(), 255, byte).to(torch.uint8).squeeze(-1)
        held = torch.where(byte == 0, 2.0**-127, scale)  # what the stored byte says, which fp32 divides by no more
        return Coded(_whole(codes * held, x), _whole(codes, x), stored)

    return encode


def _nvfp4(x: Tensor, activation: bool) -> Coded:
    blocks = _blocks(x, 16)
    amax = _amax(blocks)
    peak = amax.amax(1, keepdim=True) if activation else amax.amax() if amax.numel() else amax.new_zeros(())
    total = (peak / (E4M3.largest * E2M1.largest)).clamp(min=2.0**-110)  # whose reciprocal, times 2^6, is finite
    scale = round_to_format((amax / E2M1.largest / total).clamp(E4M3.smallest_normal, E4M3.largest), E4M3)
    codes = _element(blocks * ((1.0 / total) / scale), E2M1)
    stored = scale.to(torch.float8_e4m3fn).squeeze(-1)
    return Coded(_whole(codes * (scale * total), x), _whole(codes, x), stored, total)


def _integer(bits: int, size: int | None) -> Callable[[Tensor, bool], Coded]:
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def encode(x: Tensor, activation: bool) -> Coded:
        blocks = _blocks(x, size or max(x.shape[1], 1))
        scale = (_amax(blocks) / ((highest - lowest) / 2)).clamp(min=_TINY)
        codes = torch.round(blocks * (1.0 / scale)).clamp(lowest, highest)
        return Coded(_whole(codes * scale, x), _whole(codes, x), scale.squeeze(-1))

    return encode


def int8_codes(x_NE: Tensor) -> tuple[Tensor, Tensor]:
    """What ``SCHEMES["int8"]`` makes of each row, as int8 codes and their scales (N, 1). No gradient.

    A row that holds inf or NaN has a scale of NaN. ``x_NE``: fp32 or a half.
    """
    x = _fp32(x_NE)
    scale = (_amax(x) / 127.5).clamp(min=_TINY)
    codes = torch.round(x * (1.0 / scale)).clamp_(-128, 127)
    return codes.to(torch.int8), scale  # what NaN becomes as a code does not matter: its scale is NaN


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("mxfp8", _mx(E4M3, 8), True, 8.25, 32),
        Scheme("mxfp4", _mx(E2M1, 2), True, 4.25, 32),
        Scheme("nvfp4", _nvfp4, True, 4.5, 16),
        Scheme("int8", _integer(8, None), True, 8.0, None),
        Scheme("int4", _integer(4, 128), False, 4.25, 128),
        Scheme("int4-32", _integer(4, 32), False, 5.0, 32),
    )
}
