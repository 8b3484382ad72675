"""The recipes that come with Mantissa, by name: ``demo``, ``cluster/qwen3-8b-fp16-fsdp2``.

In a checkout they are the folder ``recipes/``; the wheel carries a copy of it (``setup.py``).
"""

from __future__ import annotations

import re
from pathlib import Path

from mantissa.base.errors import MantissaError, nearest

_PACKAGE = Path(__file__).resolve().parents[1]
_SUFFIXES = (".yaml", ".yml")


def recipes_folder() -> Path:
    """Where the recipes are; the copy of an installed wheel is inside the package."""
    for folder in (_PACKAGE / "recipes", _PACKAGE.parents[1] / "recipes"):
        if (folder / "demo.yaml").is_file():
            return folder
    raise MantissaError(
        f"the recipes that come with Mantissa are not in {_PACKAGE}: install it again, from a wheel or a whole checkout"
    )


def shipped_recipes() -> dict[str, Path]:
    """Each recipe that comes with Mantissa, by its name: the path below the folder without ``.yaml``."""
    folder = recipes_folder()
    named = {path.relative_to(folder).as_posix().removesuffix(".yaml"): path for path in folder.rglob("*.yaml")}
    return dict(sorted(named.items(), key=lambda item: ("/" in item[0], item[0] != "demo", item[0])))


def said_of(path: Path) -> str:
    """What a recipe is, in a line: its leading comment up to the first colon or full stop."""
    lines = []
    for line in path.read_text("utf-8").splitlines():
        if not line.startswith("# "):
            break
        lines.append(line[2:].strip())
    return re.split(r"(?::|\.)(?:\s|$)", " ".join(lines), maxsplit=1)[0]


def find_recipe(given: str | Path) -> Path:
    """The file of a recipe: ``given`` where it is a file, else the recipe of that name that comes with Mantissa.

    Raises ``MantissaError`` where there is neither.
    """
    path, name = Path(given), Path(given).as_posix()
    if path.is_file():
        return path
    known = shipped_recipes()
    if name in known:
        return known[name]
    plain = name.removeprefix("recipes/").removesuffix(".yaml")
    if plain in known:
        raise MantissaError(f"no recipe at {path} in this folder; the one that comes with Mantissa is named {plain}")
    hint = "" if path.suffix in _SUFFIXES else nearest(name, known)
    raise MantissaError(
        f"no recipe at {path}: expected a YAML file, or the name of a recipe that comes with Mantissa, such as demo "
        f"(mantissa recipes lists them){hint}"
    )
