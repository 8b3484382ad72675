"""The one reader of YAML: bounded in length, brackets and values, an error in it one line with its position.

And the recipes that come with Mantissa, by name: ``demo``, ``cluster/qwen3-8b-fp16-fsdp2``. In a checkout they are the
folder ``recipes/``; the wheel carries a copy of it (``setup.py``).
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from mantissa.base.bounds import Limits, boundary, budget, describe_error
from mantissa.base.errors import MantissaError, nearest

WRITTEN = Limits(20_000, 200, 5_000)  # by a person: a recipe, a lab, an override
RECORDED = Limits(200_000, 5_000, 50_000)  # by a program, or a table of tests
_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """YAML as people write it: ``1e-3`` is a number (YAML 1.1 wants ``1.0e-3``), and a key given twice is an error."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._whole = set[int]()  # mappings that have been looked through

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int) and value.bit_length() > 64:
                raise MantissaError(f"line {node.start_mark.line + 1}: a number of more than 64 bits")
            return value
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            if isinstance(error, MantissaError):
                raise
            kind, text = node.tag.rpartition(":")[2], str(node.value)[:60]
            raise MantissaError(f"line {node.start_mark.line + 1}: {text!r} is no {kind}") from None

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put in what ``<<`` names, once; keys are counted before, since an own key replaces one that is put in."""
        if id(node) in self._whole:
            return
        self._whole.add(id(node))
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != _MERGE]
        seen = set()
        for key in keys:
            if not isinstance(key, Hashable):
                continue  # which the line below refuses
            if key in seen:
                raise MantissaError(f"line {node.start_mark.line + 1}: the key {key!r} is given twice")
            seen.add(key)
        super().flatten_mapping(node)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def read_yaml(path: Path, limits: Limits = WRITTEN) -> Any:
    """What a file holds, read no further than the limits go. Errors: ``parse_yaml``'s, and the system's."""
    budget().file(path, path.stat())
    with path.open(encoding="utf-8") as file:
        try:
            text = file.read(limits.bytes + 1)
        except UnicodeDecodeError as error:
            raise MantissaError(f"{path}: {describe_error(error)}; expected YAML in UTF-8") from None
    return parse_yaml(text, str(path), limits)


def read_shipped(path: Path) -> Any:
    """A table that comes with the package: nobody else wrote it, and it is read each time that a command starts."""
    return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def parse_yaml(text: str, where: str, limits: Limits = WRITTEN) -> Any:
    """Parse YAML; a mistake in it becomes one line with its position. Bounded in length and, aliases written out, in
    values."""
    if len(text) > limits.bytes or text.count("[") + text.count("{") > limits.depth:
        raise MantissaError(f"{where}: more than {limits.bytes:,} characters or {limits.depth:,} brackets; shorten it")
    with boundary(where, "expected YAML"):
        try:
            loader = _Loader(text)
            node = loader.get_single_node()
            _values_in(node, limits.values, {})
            return None if node is None else loader.construct_document(node)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            at = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            raise MantissaError(f"{where}{at}: not valid YAML: {error.problem or error}") from None
        except MantissaError as error:
            raise MantissaError(f"{where}: {error}") from None


def _values_in(node: yaml.Node | None, most: int, known: dict[int, int]) -> int:
    """How many values a document has with every alias written out. ``known``: of nodes seen; 0 while inside one."""
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = 0
        inner = [each for pair in node.value for each in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_values_in(each, most, known) for each in inner)
    total = known[id(node)]
    if not 0 < total <= most:
        what = f"more than {most:,} values" if total else "an alias of what it is inside of"
        raise MantissaError(f"line {node.start_mark.line + 1}: {what}; write out what is meant")
    return total


_PACKAGE = Path(__file__).resolve().parents[2]


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
