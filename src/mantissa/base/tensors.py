"""Tensors in files: safetensors written with a digest taken on the way, and what is read checked before it is used."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
