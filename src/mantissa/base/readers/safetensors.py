"""The one reader of safetensors: its header looked at before the library does, its tensors given one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mantissa.base.bounds import boundary
from mantissa.base.readers.json import parse_json
from mantissa.base.readers.limits import Limits, require_size

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_FILE = 1 << 44  # bytes: it is mapped, and not read
# Of the header. Ten values a tensor: its dtype, its shape and two offsets; the largest models have some 100,000.
_HEADER = Limits(100_000_000, 8, 4_000_000)


@contextmanager
def open_tensors(path: Path) -> Iterator[tuple[Mapping[str, str], Iterator[tuple[str, Tensor]]]]:
    """A file's metadata, and the name and tensor of each that is in it, read when it is asked for.

    ``ValueError`` or the library's own exceptions for what is damaged: a caller's ``boundary`` says whose it is.
    """
    from safetensors import safe_open

    _check_header(path)
    with safe_open(str(path), framework="pt") as file:
        yield file.metadata() or {}, ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - no dict


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All of a file's tensors by name. Errors: ``open_tensors``'."""
    with open_tensors(path) as (_, tensors):
        return dict(tensors)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All of a file's tensors by name; ``MantissaError`` for one that is damaged."""
    with boundary(f"{path}: truncated or damaged", "fetch the file again"):
        return load_tensors(path)


def _check_header(path: Path) -> None:
    size = require_size(path, _LARGEST_FILE)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_HEADER.bytes, size - 8):
            raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
        header: Any = parse_json(file.read(length), _HEADER)
    if not isinstance(header, dict):
        raise ValueError(f"a header that is a {type(header).__name__}")
