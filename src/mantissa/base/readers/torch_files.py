"""The one place that calls ``torch.load``: tensors and plain values alone, a zip file looked at before torch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mantissa.base.bounds import boundary, require_memory, require_size
from mantissa.base.readers import zips
from mantissa.base.readers.pickles import NESTED, walk

_LARGEST = 1 << 44  # bytes; what this machine's memory holds is asked below


def load_torch(path: Path) -> Any:
    """What torch.save wrote, on the CPU. ``pickle.UnpicklingError`` for more than tensors and plain values.

    ``ValueError`` or torch's own exceptions for what is damaged: a caller's ``boundary`` says whose it is.
    """
    import torch

    size = require_size(path, _LARGEST, weights=True)
    require_memory(size, str(path), "free some memory, or load it on a larger machine")
    with path.open("rb") as file:
        zipped = file.read(4) == zips.MAGIC
    if zipped:
        zips.check(path)
    value = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(value, NESTED):
        walk(value)
    return value


def read_torch(path: Path) -> Any:
    """What torch.save wrote; ``MantissaError`` for what is damaged or holds more than tensors and plain values."""
    with boundary(f"{path}: no file of tensors and plain values", "write it again with torch.save"):
        return load_torch(path)
