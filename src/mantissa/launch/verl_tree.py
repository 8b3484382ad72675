"""What hydra makes of overrides to verl's configuration: which it takes, and which end the job before it starts.

The tree of each version and model engine is data (``verl_tree.json``), written by hydra itself in verl's environment
(``make facts``). Hydra's rules, one override after another: ``key=value`` wants the key to be there, ``+key=value``
that it is not, or is null (a dictionary or list is merged wherever it is put), ``++key=value`` wants nothing,
``~key`` that there is something to take away.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mantissa.base.errors import MantissaError
from mantissa.base.readers.json import read_json
from mantissa.base.readers.yaml import parse_yaml
from mantissa.launch.scripts import Override, plain

_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(\.*)([\w.]+)(?:,(.*))?\}")
_COLON = re.compile(r":(?=[^\s])")
_NOTHING = object()
_DEEPEST = 8  # references to references


@cache
def _trees() -> dict[str, Any]:
    trees: dict[str, Any] = read_json(Path(__file__).with_name("verl_tree.json"))
    return trees


def defaults(version: str, group: str, trainer: str = "") -> dict[str, Any]:
    """Key to default (a reference as it is written) where ``model_engine`` is ``group``; of ``trainer``, one of
    ``trainers``, instead of the first one's."""
    tree = _trees()[version]
    return {**tree["common"], **tree["engines"][group], **(tree["trainers"][trainer] if trainer else {})}


def trainers(version: str) -> list[str]:
    """The configurations of other trainers that are known of this version."""
    return list(_trees()[version].get("trainers", {}))


def groups(version: str) -> list[str]:
    """The model engines that this version has."""
    return list(_trees()[version]["engines"])


def as_yaml(text: str) -> str:
    """A dictionary or list of hydra's, which has no space after a colon, as YAML wants it."""
    return _COLON.sub(": ", text)


def hydra_value(text: str) -> Any:
    """The value of an override as hydra reads it, as far as its kind goes: null, a dictionary, a list or other."""
    if text.lower() == "null":
        return None
    if not text.startswith(("{", "[")):
        return text
    try:
        return parse_yaml(as_yaml(text), "value")
    except MantissaError:
        return {} if text.startswith("{") else []


def _and_above(key: str) -> list[str]:
    """The key, the section that it is in, the section of that, and so on."""
    return [key.rsplit(".", count)[0] for count in range(key.count(".") + 1)]


def _refers(value: object) -> bool:
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


class Tree:
    """A configuration of verl's by its leaves, to which overrides are applied in their order."""

    def __init__(self, leaves: Mapping[str, Any]) -> None:
        self._root: dict[str, Any] = {}
        for key, value in leaves.items():
            self._put(key, dict(value) if isinstance(value, dict) else value)

    def has(self, key: str) -> bool:
        """Whether the key, or one below it, is there."""
        return self._node(key) is not _NOTHING

    def may_have(self, key: str) -> bool:
        """Whether the key is there, or stands below one that is null, empty or a reference: put there, it is no
        stranger."""
        nodes = [self._node(each) for each in _and_above(key)[1:]]
        found = next((node for node in nodes if node is not _NOTHING), self._root)
        return self.has(key) or not isinstance(found, dict) or not found

    def is_null(self, key: str) -> bool:
        """Whether hydra finds nothing there: no such key, null, or a reference to null."""
        return self.resolved(key, self._node(key)) is None

    def value(self, key: str) -> Any:
        """What stands at the key, references followed; None where nothing does, or a reference that is not known."""
        return self._followed(self._root, key.split("."), [], _DEEPEST)

    def _followed(self, node: Any, path: list[str], at: list[str], left: int) -> Any:
        """What stands at ``path`` below ``node``, which stands at ``at``, references on the way followed too."""
        found = _REFERENCE.fullmatch(node) if isinstance(node, str) else None
        if found is not None and left:
            up, name, default = found.groups()
            other = [*at[: -len(up)], *name.split(".")] if up else name.split(".")
            followed = self._followed(self._root, [*other, *path], [], left - 1)
            return hydra_value(default.strip()) if followed is None and default and not path else followed
        if not path:
            return None if found or node in ("???", "null", "None") else node
        inner = node.get(path[0], _NOTHING) if isinstance(node, dict) else _NOTHING
        return None if inner is _NOTHING else self._followed(inner, path[1:], [*at, path[0]], left)

    def resolved(self, key: str, value: Any, left: int = _DEEPEST) -> Any:
        """What a value that stands at ``key`` comes to, references followed ``left`` deep; None where it is nothing."""
        if value is _NOTHING or value is None or value in ("???", "null", "None"):
            return None
        found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if found is None or not left:
            return value
        up, name, default = found.groups()
        above = ".".join(key.split(".")[: -len(up)]) if up else ""
        other = f"{above}.{name}" if above else name
        inner = self.resolved(other, self._node(other), left - 1)
        return inner if inner is not None or default is None else self.resolved(key, default.strip(), left - 1)

    def apply(self, given: Override) -> str:
        """Apply one override. Returns why hydra refuses it, which leaves all as it was; empty where it does not."""
        key, value = given.key, hydra_value(given.value)
        if given.mark == "~":
            if self.is_null(key):
                return "there is nothing to delete"
            self._remove(key)
            return ""
        if given.mark == "+" and not self.is_null(key) and not isinstance(value, dict | list):
            return "the key is in verl's tree already"
        if not given.mark and (missing := self._missing(key, value)):
            return "the key is not in verl's tree" if missing == key else f"{missing} is not in verl's tree"
        self._put(key, value)
        return ""

    def _missing(self, key: str, value: Any) -> str:
        """The first key that a plain override would have to add, or an empty text."""
        node = self._node(key)
        if node is _NOTHING:
            return key
        if isinstance(node, dict) and isinstance(value, dict):
            return next(filter(None, (self._missing(f"{key}.{name}", inner) for name, inner in value.items())), "")
        return ""

    def _node(self, key: str) -> Any:
        node: Any = self._root
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                return _NOTHING
            node = node[part]
        return node

    def _put(self, key: str, value: Any) -> None:
        *path, last = key.split(".")
        node = self._root
        for part in path:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        if isinstance(value, dict) and isinstance(node.get(last), dict):
            for name, inner in value.items():
                self._put(f"{key}.{name}", inner)
        else:
            node[last] = value

    def _remove(self, key: str) -> None:
        above, _, last = key.rpartition(".")
        (self._node(above) if above else self._root).pop(last)


def every() -> list[dict[str, Any]]:
    """Key to default of each configuration that is known, of all versions."""
    engines = [(version, group, "") for version in _trees() for group in groups(version)]
    others = [(version, "dp", trainer) for version in _trees() for trainer in trainers(version)]
    return [defaults(*each) for each in (*engines, *others)]


@cache
def tree(version: str, group: str) -> Tree:
    """A version's own tree where ``model_engine`` is ``group``: to be looked at, and left as it is."""
    return Tree(defaults(version, group))


def not_at_default(settings: Mapping[str, str], version: str, group: str) -> dict[str, str]:
    """The leaves of a whole configuration, as text, that say something else than this version does by itself."""
    known = defaults(version, group if group in groups(version) else "dp")
    own = Tree(settings)

    def default(key: str) -> Any:
        """What a key would come to here, where the version has it or refers to a section that has it."""
        above = next((each for each in _and_above(key) if each in known), None)
        if above is None or (above != key and not _refers(known[above])):
            return _NOTHING
        node = own.resolved(above, known[above])
        for part in key.removeprefix(above).split(".")[1:]:
            node = node.get(part, _NOTHING) if isinstance(node, dict) else _NOTHING
        return node

    def differs(key: str, value: str) -> bool:
        expected = default(key)
        return expected is _NOTHING or plain(own.resolved(key, value)) != plain(own.resolved(key, expected))

    return {key: value for key, value in settings.items() if differs(key, value)}


def nearest(settings: Mapping[str, str], group: str) -> str:
    """The version whose tree has the keys of a whole configuration, as far as any has; of several the newest."""

    own = Tree(settings)

    def strange(version: str) -> int:
        group_ = group if group in groups(version) else "dp"
        strangers = sum(not tree(version, group_).may_have(key) for key in settings)
        return strangers + sum(not own.may_have(key) for key in defaults(version, group_))

    return min(reversed(list(_trees())), key=strange)


def refusals(version: str, group: str, overrides: Sequence[Override]) -> list[str]:
    """Of each override, in their order, why hydra refuses it; empty where it takes it."""
    applied = Tree(defaults(version, group))
    return [applied.apply(given) for given in overrides]
