"""What one document may be, whichever its format; and a bar on the screen while it takes long to read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

_LARGE = 32 << 20  # bytes: what takes a second or more to parse


class Limits(NamedTuple):
    """Of one document, or of one row where a file has rows."""

    bytes: int  # of the file; characters, of a text
    depth: int  # levels of lists and dictionaries; of YAML the brackets, on which its scanner is slow
    values: int  # with every alias and reference written out
    digits: int = 308  # of a whole number: what a float can still hold
    rows: int = 1_000_000  # of a file of rows


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """``path`` open for reading, with a bar on stderr for as long as it takes: for a large file, on a terminal."""
    if not sys.stderr.isatty() or path.stat().st_size < _LARGE:
        with path.open("rb") as file:
            yield file
        return
    from rich.progress import open as bar

    from mantissa.base.screen import Screen

    with bar(path, "rb", description=f"reading {path.name}", transient=True, console=Screen(stderr=True)) as file:
        yield file
