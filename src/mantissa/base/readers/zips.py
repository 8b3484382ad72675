"""The one reader of zip files: entries that are stored and not compressed, as torch.save writes them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from mantissa.base.bounds import boundary, require_size

LARGEST = 2 << 30  # bytes
_MOST_ENTRIES = 200_000
MAGIC = b"PK\x03\x04"


def entries(data: bytes) -> dict[str, bytes]:
    """The bytes of each entry by its name. ``ValueError``: compressed, more bytes than the file has, a name twice."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        _check(archive, len(data))
        return {entry.filename: archive.read(entry) for entry in archive.infolist()}


def check(path: Path) -> None:
    """Raise as ``entries`` does, for a file that another library then reads."""
    with zipfile.ZipFile(path) as archive:
        _check(archive, path.stat().st_size)


def _check(archive: zipfile.ZipFile, size: int) -> None:
    found = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in found):
        raise ValueError("compressed entries, which torch.save never writes")
    if len(found) > _MOST_ENTRIES:
        raise ValueError(f"more than {_MOST_ENTRIES:,} entries")
    if sum(entry.file_size for entry in found) > size:  # several that lie in the same bytes, or a lie
        raise ValueError("entries that claim more bytes than the file has")
    if len({entry.filename for entry in found}) < len(found):
        raise ValueError("two entries of one name")


def read_zip(path: Path) -> dict[str, bytes]:
    """The entries of a file; ``MantissaError`` for one that is damaged or holds what ``entries`` refuses."""
    with boundary(f"{path}: not a zip file as torch.save writes them", "write it again"):
        require_size(path, LARGEST)
        return entries(path.read_bytes())
