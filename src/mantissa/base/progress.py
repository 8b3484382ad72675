"""A bar on the screen while a large file is read, where there is a screen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_LARGE = 32 << 20  # bytes: what takes a second or more to parse


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """``path`` open for reading, with a bar on stderr for as long as it takes: for a large file, on a terminal."""
    if not sys.stderr.isatty() or path.stat().st_size < _LARGE:
        with path.open("rb") as file:
            yield file
        return
    from rich.console import Console
    from rich.progress import open as bar

    with bar(path, "rb", description=f"reading {path.name}", transient=True, console=Console(stderr=True)) as file:
        yield file
