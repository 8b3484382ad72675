"""What a document may cost, whichever its format."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mantissa.base.bounds import regular_file
from mantissa.base.errors import MantissaError


class Limits(NamedTuple):
    """Of one document, or of one row where a file has rows."""

    bytes: int  # of the file; characters, of a text
    depth: int  # levels of lists and dictionaries; of YAML the brackets, on which its scanner is slow
    values: int  # with every alias and reference written out
    digits: int = 308  # of a whole number: what a float can still hold
    rows: int = 1_000_000  # of a file of rows
    seconds: float = 60.0  # of processor time, where few bytes can ask for many


def require_size(path: Path, most: int) -> int:
    """The bytes of a file that may be read: ``MantissaError`` for a pipe or device, and for one too large."""
    regular_file(path)
    size = path.stat().st_size
    if size > most:
        raise MantissaError(f"{path} has {size:,} bytes; expected at most {most:,}; give a part of it")
    return size
