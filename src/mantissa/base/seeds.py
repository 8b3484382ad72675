"""Random numbers that are functions of a seed and a position: no generator state to save or lose.

Seeds and shuffled streams come of SHA-256. What is drawn token by token and weight by weight comes of SplitMix64 as a
hash, in int64 tensors, the same on every device: a generator with state (torch's) must be kept, rewound and drawn from
in a fixed order, so its numbers depend on batch mates and on the device; a hash of what a number is for does not. With
g = 0x9E3779B97F4A7C15 the k-th word of the stream of a key is m(key + k g), where m is the finaliser; everything is
modulo 2^64.

Torch's int64 products and sums wrap modulo 2^64 on every device; its right shift copies the sign bit, which is masked.
Source of m and g: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), variant 13.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from ``(run seed, purpose, position, ...)``: the first 63 bits of SHA-256 of the parts' text."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator at the start of the stream that ``derive_seed`` names."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def stream_slice(population: int, start: int, count: int, *parts: int | str) -> list[int]:
    """Items ``start`` to ``start + count`` of an endless stream of indices below ``population``.

    The stream is one shuffled epoch after another, each shuffled by its own seed: any slice of it can be computed
    without those before it, which is what makes a data position a single integer.
    """
    indices: list[int] = []
    while len(indices) < count:
        epoch, offset = divmod(start + len(indices), population)
        order = torch.randperm(population, generator=generator(*parts, epoch))
        indices += order[offset : offset + count - len(indices)].tolist()
    return indices


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
