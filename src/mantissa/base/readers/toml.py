"""The one reader of TOML: bounded in bytes, in the parts of a dotted key, in levels and values."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from mantissa.base.bounds import Limits, boundary, require_size
from mantissa.base.readers.json import require_few

WRITTEN = Limits(400_000, 100, 20_000)
_PARTS = 64  # of a dotted key: a table is looked up from the top for each
_BETWEEN = re.compile(r"[=,{}\[\]\n]")


def read_toml(path: Path, limits: Limits = WRITTEN) -> dict[str, Any]:
    """What a file in TOML says. ``MantissaError`` for what is none, and for more than the limits allow."""
    with boundary(path, "expected TOML"):
        require_size(path, limits.bytes)
        text = path.read_text(encoding="utf-8")
        if any(piece.count(".") > _PARTS for piece in _BETWEEN.split(text)):
            raise ValueError(f"a name of more than {_PARTS} parts")
        if text.count("[") + text.count("{") > limits.values:
            raise ValueError(f"more than {limits.values:,} brackets")
        value = tomllib.loads(text)
        require_few(value, limits)
        return value
