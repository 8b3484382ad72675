"""Tensors in files: safetensors written with a digest taken on the way, and what is read checked before it is used.

A digest is a number for a tensor's bits that does not depend on how it is laid out, or over how many ranks it lies.

    h = sum over i, j of a_i b_j m(bits of x_ij)   modulo 2^64

i is the first index, j all others flattened; a and b are odd numbers of the index alone (splitmix64: G. Steele, D. Lea
and C. Flood, "Fast splittable pseudorandom number generators", 2014); m adds the upper half of 32 or more bits to the
lower one, so that a sign alone is no multiple of a high power of two. Integers add exactly and in any order: the sums
of a tensor's slices, each with its own indices, add to its own. Tensors that differ have the same sum once in 2^47 or
less often, were a and b drawn anew; h is 0 for zeros. -0 counts as 0, as a sum with zeros makes of it; not in 8 bits.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mantissa.base.errors import MantissaError

# The format's names: https://github.com/huggingface/safetensors
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_BLOCK = 1 << 26  # bytes that are written while the ones before them are hashed


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file; returns the SHA-256 of its bytes, hexadecimal, taken beside the writing.

    One tensor at a time is held beside the given ones (those on a GPU). ``OSError`` as any file.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each is aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    path.unlink(missing_ok=True)  # whoever has mapped the file that was there keeps its bytes
    with path.open("wb") as file, ThreadPoolExecutor(1) as pool:
        for block in _blocks(len(text).to_bytes(8, "little") + text, (tensors[name] for name in order)):
            hashed = pool.submit(digest.update, block)
            file.write(block)
            hashed.result()
    return digest.hexdigest()


def _blocks(head: bytes, tensors: Iterator[Tensor]) -> Iterator[memoryview]:
    yield memoryview(head)
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        data: Any = plain.view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")
        for start in range(0, len(data), _BLOCK):
            yield data[start : start + _BLOCK]


def check_tensors(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    """``MantissaError`` unless ``found`` has the names, shapes and dtypes of ``wanted`` and is finite."""
    if set(wanted) != set(found):
        differing = ", ".join(sorted(set(wanted) ^ set(found))[:3])
        raise MantissaError(f"{where} and model have different tensors ({differing}, ...): another model's recipe?")
    for name, tensor in wanted.items():
        check_tensor(f"{where}'s {name}", found[name], tensor.shape, tensor.dtype)


def check_tensor(name: str, found: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    """One tensor of ``check_tensors``; ``name`` begins the error."""
    if found.shape != shape:
        raise MantissaError(f"{name} has shape {tuple(found.shape)}, the model's {tuple(shape)}")
    if found.dtype != dtype:
        raise MantissaError(f"{name} is {plain_name(found.dtype)}, expected {plain_name(dtype)}; it is not converted")
    require_finite(name, found)


def require_finite(name: str, tensor: Tensor) -> None:
    """``MantissaError`` that counts the values of ``tensor`` that are not finite, where there are any."""
    if not all_finite(tensor):
        bad = int((~torch.isfinite(_numbers(tensor).float())).sum())
        raise MantissaError(f"{name} has {bad} values that are not finite; it is broken")


def all_finite(tensor: Tensor) -> bool:
    """Whether every value is finite; on a CPU at the speed of reading it, without a mask of its size."""
    found = _numbers(tensor)
    if not found.is_floating_point() or not found.numel():
        return True
    low, high = torch.aminmax(found if found.element_size() > 1 else found.float())
    return math.isfinite(low) and math.isfinite(high)  # a NaN is either's result


def _numbers(tensor: Tensor) -> Tensor:
    """The values of a sparse tensor (an SGD's momentum may be one), any other itself."""
    return tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()


def plain_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


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
