"""A number for a tensor's bits that does not depend on how it is laid out, or over how many ranks it lies.

    h = sum over i, j of a_i b_j m(bits of x_ij)   modulo 2^64

i is the first index, j all others flattened; a and b are odd numbers of the index alone (splitmix64: G. Steele, D. Lea
and C. Flood, "Fast splittable pseudorandom number generators", 2014); m adds the upper half of 32 or more bits to the
lower one, so that a sign alone is no multiple of a high power of two. Integers add exactly and in any order: the sums
of a tensor's slices, each with its own indices, add to its own. Tensors that differ have the same sum once in 2^47 or
less often, were a and b drawn anew; h is 0 for zeros. -0 counts as 0, as a sum with zeros makes of it; not in 8 bits.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from mantissa.base.errors import MantissaError

_CHUNK = 1 << 17  # values at a time: what they become in 64 bits stays in a cache
_ROWS, _COLUMNS = 1, 2  # seeds of a and b
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WRITTEN = re.compile(r"(\w+) \(([\d, ]*)\) ([0-9a-f]{16})")


@dataclass(frozen=True)
class Digest:
    """``dtype``: torch's name of it; ``total``: h."""

    dtype: str
    shape: tuple[int, ...]
    total: int

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape} {self.total:016x}"

    @staticmethod
    def parse(text: str) -> Digest:
        """The inverse of ``str``. ``MantissaError`` for anything else, which it shows."""
        found = _WRITTEN.fullmatch(text)
        if found is None:
            raise MantissaError(f"expected a tensor's dtype, shape and digest, got {text[:200]}")
        sizes = tuple(int(size) for size in found[2].replace(",", " ").split())
        return Digest(found[1], sizes, int(found[3], 16))

    @property
    def weights(self) -> int:
        """How many values it is of."""
        return prod(self.shape)


def digest(tensor: Tensor) -> Digest:
    """Of a whole tensor of any dtype of 8 to 64 bits."""
    return Digest(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), partial(tensor))


def partial(tensor: Tensor, row: int = 0, column: int = 0) -> int:
    """h of a slice whose first value stands at ``row`` of the first index and ``column`` of the others, flattened.

    A slice has whole columns, or is of a matrix.
    """
    if not tensor.numel():
        return 0
    x = tensor.detach()
    x = x.reshape(len(x), -1) if x.ndim else x.reshape(1, 1)
    count, width = x.shape
    a, b = _factors(row + count, _ROWS, x.device)[row:], _factors(column + width, _COLUMNS, x.device)[column:]
    step, total = max(1, _CHUNK // width), 0
    for start in range(0, count, step):
        bits = _bits(x[start : start + step])
        rows = bits @ b if x.device.type == "cpu" else (bits * b).sum(1)  # no other device multiplies integers so
        total += int((rows * a[start : start + step]).sum())
    return total % (1 << 64)


def _bits(x: Tensor) -> Tensor:
    """The bits as int64, those of 32 or more mixed."""
    size = x.dtype.itemsize
    if size > 1 and x.is_floating_point():
        x = x + 0
    if x.is_complex() or x.dtype is torch.bool:
        raise MantissaError(f"a digest of {x.dtype}: expected real numbers")
    bits = x.contiguous().view(_BITS[size]).long()
    if size == 4:
        bits ^= (bits >> 16) & 0xFFFF
    elif size == 8:
        bits ^= (bits >> 32) & 0xFFFFFFFF
    return bits


def _factors(count: int, seed: int, device: torch.device) -> Tensor:
    return _made(1 << (count - 1).bit_length(), seed, str(device))[:count]  # few sizes are kept


@functools.lru_cache(maxsize=64)
def _made(count: int, seed: int, device: str) -> Tensor:
    with np.errstate(over="ignore"):
        x = (np.arange(1, count + 1, dtype=np.uint64) + (np.uint64(seed) << np.uint64(40))) * np.uint64(
            0x9E3779B97F4A7C15
        )
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64)).to(device)
