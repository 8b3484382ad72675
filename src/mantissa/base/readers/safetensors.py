"""The one reader of safetensors: its header looked at before the library does, its tensors given one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mantissa.base.bounds import Limits, boundary, require_size
from mantissa.base.readers.json import parse_json

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_FILE = 1 << 44  # bytes: it is mapped, and not read
# Of the header. Ten values a tensor: its dtype, its shape and two offsets; the largest models have some 100,000.
_HEADER = Limits(100_000_000, 8, 4_000_000)


@contextmanager
def open_tensors(
    path: Path, name: str | None = None
) -> Iterator[tuple[Mapping[str, str], Iterator[tuple[str, Tensor]]]]:
    """A file's metadata, and the name and tensor of each that is in it (or of ``name``), read when it is asked for.

    ``ValueError`` or the library's own exceptions for what is damaged: a caller's ``boundary`` says whose it is.
    """
    from safetensors import safe_open

    _check_header(path)
    with safe_open(str(path), framework="pt") as file:
        names = file.keys() if name is None else [name]
        yield file.metadata() or {}, ((each, file.get_tensor(each)) for each in names)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All of a file's tensors by name. Errors: ``open_tensors``'."""
    with open_tensors(path) as (_, tensors):
        return dict(tensors)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All of a file's tensors by name; ``MantissaError`` for one that is damaged."""
    with boundary(f"{path}: truncated or damaged", "fetch the file again"):
        return load_tensors(path)


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each of a file's tensors by name, from its header alone. Errors: ``open_tensors``'."""
    listed = {name: of for name, of in _check_header(path).items() if name != "__metadata__"}
    if not all(isinstance(of, dict) and isinstance(of.get("shape"), list) for of in listed.values()):
        raise ValueError("a header whose tensors have no shapes")
    return {name: tuple(of["shape"]) for name, of in listed.items()}


def _check_header(path: Path) -> dict[str, Any]:
    size = require_size(path, _LARGEST_FILE, weights=True)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_HEADER.bytes, size - 8):
            raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
        header: Any = parse_json(file.read(length), _HEADER)
    if not isinstance(header, dict):
        raise ValueError(f"a header that is a {type(header).__name__}")
    return header
