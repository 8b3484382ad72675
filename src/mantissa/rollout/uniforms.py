"""One uniform number for each (seed, sample, position): a counter-based generator in int64 tensor operations.

A sample must not depend on its batch mates, on the order of requests or on the device. A generator with state (torch's)
cannot promise that; a hash of the counter can. The hash is SplitMix64's finaliser, m(x), applied in a chain:

    key(seed, sample)   = m(m(seed + g) + (sample + 1) g)
    word(key, position) = m(m(key + (position + 1) g) xor key)
    uniform             = (floor(word / 2^12) + 1/2) / 2^52,        g = 0x9E3779B97F4A7C15, everything modulo 2^64

For a fixed key the inner m walks through a SplitMix64 sequence; the xor with the key before the outer m makes two keys
whose sequences meet go apart again. The uniform has 52 random bits and lies strictly between 0 and 1, so neither log(u)
nor a comparison with a total can degenerate; it is float64, because fp32 could not tell apart events rarer than 2^-24.

Torch's int64 products and sums wrap modulo 2^64 on every device; its right shift copies the sign bit, which is masked.
Source of m and g: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), variant 13.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _signed(word: int) -> int:
    """The int64 with the same 64 bits."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def stream_keys(seeds: Sequence[int], samples: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """The key of each (seed, sample): int64, shape B. Seeds are any integers, taken modulo 2^64."""
    seeds_B = torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64, device=device)
    samples_B = torch.tensor(samples, dtype=torch.int64, device=device)
    return _mix(_mix(seeds_B + _STEP) + (samples_B + 1) * _STEP)


def uniforms(keys_B: Tensor, positions_B: Tensor) -> Tensor:
    """The uniform of each key at each position: float64 in (0, 1), shape of the two int64 inputs, broadcast."""
    word = _mix(_mix(keys_B + (positions_B + 1) * _STEP) ^ keys_B)
    return (_shift_right(word, 12).double() + 0.5) * 2.0**-52  # exact: 52 bits and a half fit a float64's 53


def _mix(word: Tensor) -> Tensor:
    word = (word ^ _shift_right(word, 30)) * _FIRST
    word = (word ^ _shift_right(word, 27)) * _SECOND
    return word ^ _shift_right(word, 31)


def _shift_right(word: Tensor, bits: int) -> Tensor:
    return (word >> bits) & ((1 << (64 - bits)) - 1)
