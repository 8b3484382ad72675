"""Block scaling in numpy, one block at a time, with no torch, no cast to 8 bits and no shared line: the oracle.

A format is a table of its 127 or so positive values, decoded from their bits; rounding finds the two neighbours and
compares with their midpoint, which float64 holds exactly.
"""

from __future__ import annotations

import math

import numpy as np

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def positive_values(fmt: str) -> np.ndarray:
    """value[c] of the codes c = 0.. up to the largest finite one, float64."""
    exponent_bits, mantissa_bits = {"e4m3": (4, 3), "e5m2": (5, 2)}[fmt]
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        fraction = mantissa / 2**mantissa_bits
        value = math.ldexp(fraction, 1 - bias) if exponent == 0 else math.ldexp(1 + fraction, exponent - bias)
        if value > LARGEST[fmt] or (fmt == "e4m3" and code == 127):
            break
        values.append(value)
    return np.array(values)


def encode(y: np.ndarray, fmt: str) -> np.ndarray:
    """Codes (uint8) of fp32 values: nearest, ties to the even code, saturating."""
    table = positive_values(fmt)
    size = np.minimum(np.abs(y.astype(np.float64)), table[-1])
    above = np.minimum(np.searchsorted(table, size, side="right"), len(table) - 1)
    below = np.maximum(above - 1, 0)
    middle = (table[below] + table[above]) / 2
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    up |= size == table[above]
    return (np.where(up, above, below) | np.where(np.signbit(y), 128, 0)).astype(np.uint8)


def decode(codes: np.ndarray, fmt: str) -> np.ndarray:
    values = positive_values(fmt)[codes & 127]
    return np.where(codes & 128, -values, values)


def scale(block: np.ndarray, fmt: str, power_of_two: bool) -> np.float32:
    amax = float(np.abs(block).max())
    if amax == 0.0:
        return np.float32(1.0)
    d = max(float(np.float32(amax / LARGEST[fmt])), 2.0**-126)
    if power_of_two:
        mantissa, exponent = math.frexp(d)
        d = math.ldexp(1.0, exponent - (mantissa == 0.5))
    return np.float32(d)


def quantize(x: np.ndarray, fmt: str, block: tuple[int, int], power_of_two: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes (uint8) and scales (float32) of a float32 array of two or more dimensions, padded with zeros to blocks."""
    lead, (r, c) = x.shape[:-2], x.shape[-2:]
    i, j = -(-r // block[0]), -(-c // block[1])
    padded = np.zeros((*lead, i * block[0], j * block[1]), dtype=np.float32)
    padded[..., :r, :c] = x
    codes, scales = np.zeros(padded.shape, dtype=np.uint8), np.zeros((*lead, i, j), dtype=np.float32)
    for index in np.ndindex(*scales.shape):
        *outer, a, b = index
        where = (*outer, slice(a * block[0], (a + 1) * block[0]), slice(b * block[1], (b + 1) * block[1]))
        d = scale(padded[where], fmt, power_of_two)
        y = (padded[where].astype(np.float64) / np.float64(d)).astype(np.float32)
        codes[where], scales[index] = encode(y, fmt), d
    return codes[..., :r, :c], scales


def values(x: np.ndarray, fmt: str, block: tuple[int, int], power_of_two: bool) -> np.ndarray:
    """code * scale, rounded to float32."""
    codes, scales = quantize(x, fmt, block, power_of_two)
    wide = np.repeat(np.repeat(scales, block[0], -2), block[1], -1)[..., : x.shape[-2], : x.shape[-1]]
    with np.errstate(over="ignore"):
        return (decode(codes, fmt) * wide.astype(np.float64)).astype(np.float32)
