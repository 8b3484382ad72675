"""The picture of the rooms is that of the imports."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_picture_is_current() -> None:
    spec = importlib.util.spec_from_file_location("make_map", DOCS / "make_map.py")
    assert spec is not None
    assert spec.loader is not None
    make_map = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_map)
    assert make_map.picture() == make_map.PICTURE.read_text(encoding="utf-8"), "python docs/make_map.py"
