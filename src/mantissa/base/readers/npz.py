"""NumPy's archives of arrays (``numpy.savez``): stored entries, numbers alone, no pickles."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from mantissa.base.bounds import boundary, require_size
from mantissa.base.readers import zips


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays by their names. ``MantissaError`` for what is damaged, compressed, or holds objects."""
    with boundary(
        f"{path}: not an archive of arrays", "write it with numpy.savez (not savez_compressed), numbers alone"
    ):
        require_size(path, zips.LARGEST)
        found = {}
        for name, data in zips.entries(path.read_bytes()).items():
            shape, _, kind = _header(data)
            if kind.hasobject or kind.itemsize * int(np.prod(shape, dtype=object)) > len(data):
                raise ValueError(f"{name[:80]} holds objects, or fewer numbers than it claims")
            found[name.removesuffix(".npy")] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        return found


def _header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"an array of format {version}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file)
