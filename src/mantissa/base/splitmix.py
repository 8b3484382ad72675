"""SplitMix64 as a hash: random numbers that are functions of a counter, in int64 tensors, the same on every device.

A generator with state (torch's) must be kept, rewound and drawn from in a fixed order, so its numbers depend on batch
mates and on the device. A hash of what a number is for does not. With g = 0x9E3779B97F4A7C15 the k-th word of the
stream of a key is m(key + k g), where m is the finaliser; everything is modulo 2^64.

Torch's int64 products and sums wrap modulo 2^64 on every device; its right shift copies the sign bit, which is masked.
Source of m and g: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), variant 13.
"""

from __future__ import annotations

from torch import Tensor


def signed(word: int) -> int:
    """The int64 with the same 64 bits."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


GOLDEN = signed(0x9E3779B97F4A7C15)  # g
_FIRST, _SECOND = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def mix(word: Tensor) -> Tensor:
    """The finaliser m of int64 words, any shape."""
    word = (word ^ shift_right(word, 30)) * _FIRST
    word = (word ^ shift_right(word, 27)) * _SECOND
    return word ^ shift_right(word, 31)


def shift_right(word: Tensor, bits: int) -> Tensor:
    """Right shift that fills with zeros; torch's own copies the sign of an int64."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
