"""Scaled formats of 8 and 4 bits, beside fp8's blocks: what serving engines keep weights in, as exact definitions.

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

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.precision.formats import E4M3, NumberFormat, round_bounded_, round_to_format

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
    those are quantised too. ``bits``: of a weight, scales included."""

    name: str
    encode: Callable[[Tensor, bool], Coded]
    activations: bool
    bits: float

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
        Scheme("mxfp8", _mx(E4M3, 8), True, 8.25),
        Scheme("mxfp4", _mx(E2M1, 2), True, 4.25),
        Scheme("nvfp4", _nvfp4, True, 4.5),
        Scheme("int8", _integer(8, None), True, 8.0),
        Scheme("int4", _integer(4, 128), False, 4.25),
        Scheme("int4-32", _integer(4, 32), False, 5.0),
    )
}
