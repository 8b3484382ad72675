"""What somebody else's script or configuration sets, by dotted key, and whose it is. Nothing of it is run.

A shell script's words are looked at: ``key=value``, ``--key value`` and ``--flag``, variables put in where they are
used (``check.py``). Of a Python script, the arguments of calls to a framework's configuration class, where they are
constants or names of such (read by ``ast``). Of YAML, its tree. Of several files, and of a key given twice, the last
counts; a configuration that a script names, or that another builds on, is read before it.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mantissa.base.bounds import boundary, regular_file
from mantissa.base.errors import MantissaError
from mantissa.base.readers.limits import Limits
from mantissa.base.readers.yaml import read_yaml
from mantissa.launch.check import script_words

_LONGEST = 400_000  # bytes of a script
_DEEPEST = 8  # configurations that build on one another
_CONFIG = Limits(400_000, 2_000, 20_000)
_PAIR = re.compile(r"(?:--)?(\+\+|\+|~)?([A-Za-z_][\w/@-]*(?:\.[\w@/-]+)*)=(.*)", re.S)
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)")
_USE = re.compile(r"\$\{([\w.]+)\}")
_CALLS = ("bash", "sh", "source", ".", "exec")
_PARSERS = ("TrlParser", "HfArgumentParser")
_NAMES_A_CONFIG = ("config", "config-path", "config_path")
_VERL = {"words": ["verl.trainer.main_ppo", "verl.trainer"], "keys": ["actor_rollout_ref"]}


@dataclass
class Given:
    """``settings``: key to value, as text (true, false and null so, in any language). ``words``: of command lines, and
    the classes that a Python script calls. ``notes``: what was not read. ``partial``: it builds on a configuration that
    was not read, so what is not given is not known. ``shell``: shell scripts among the files.
    """

    settings: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    partial: bool = False
    shell: list[Path] = field(default_factory=list)

    def has(self, key: str) -> bool:
        """Whether the key, or one below it, is given."""
        return key in self.settings or any(each.startswith(key + ".") for each in self.settings)


def read_given(arguments: Sequence[str], classes: Sequence[str]) -> Given:
    """What files and ``key=value`` set, in their order. ``classes``: the configuration classes that are looked for.

    Raises ``MantissaError`` for a file that cannot be read or sets nothing.
    """
    found = Given()
    for argument in arguments:
        path = Path(argument)
        pair = _PAIR.fullmatch(argument)
        if pair and not path.is_file():
            found.settings[pair[2]] = plain(pair[3])
            continue
        before = len(found.settings), len(found.words)
        with boundary(argument, "expected a shell or Python script, or a configuration in YAML"):
            _read_file(path, found, classes)
        if (len(found.settings), len(found.words)) == before:
            what = f"no call of {' or '.join(classes)} in it" if path.suffix == ".py" else "it sets nothing"
            raise MantissaError(f"{argument}: {what}; expected a script or a configuration of a training")
    if not found.settings:
        said = "; ".join(found.notes) or "expected key=value, --key value or YAML"
        raise MantissaError(f"{' '.join(arguments)}: no setting in it; {said}")
    for key, value in list(found.settings.items()):
        found.settings[key] = _put_in(key, value, found.settings)
    return found


def _read_file(path: Path, found: Given, classes: Sequence[str]) -> None:
    if not path.exists():
        raise MantissaError(f"{path}: no such file; expected a script, a configuration, or key=value")
    if not regular_file(path):
        raise MantissaError(f"{path}: expected a file")
    if path.stat().st_size > _LONGEST:
        raise MantissaError(
            f"{path}: {path.stat().st_size:,} bytes; a script or configuration has at most {_LONGEST:,}"
        )
    if path.suffix in (".yaml", ".yml", ".json"):
        _read_config(path, found)
    elif path.suffix == ".py":
        _read_python(path, found, classes)
    else:
        found.shell.append(path)
        _read_shell(path, found)


def _read_config(path: Path, found: Given, inside: tuple[Path, ...] = ()) -> None:
    """``inside``: the files that build on this one, which is read before them."""
    tree = read_yaml(path, _CONFIG)
    if not isinstance(tree, Mapping):
        raise MantissaError(
            f"{path}: expected keys and values, got {'nothing' if tree is None else type(tree).__name__}"
        )
    bases = tree.get("defaults") or []
    for base in bases if isinstance(bases, list) else [bases]:
        below = path.parent / base if isinstance(base, str) and base.endswith((".yaml", ".yml")) else None
        if below is None or not below.is_file() or below in (path, *inside) or len(inside) >= _DEEPEST:
            if base != "_self_":
                found.partial = True
                found.notes.append(f"{path.name} builds on {plain(base)}, which was not read")
        else:
            _read_config(below, found, (path, *inside))
    found.settings |= {key: value for key, value in _leaves(tree) if key.partition(".")[0] != "defaults"}


def _leaves(tree: Mapping[Any, Any], under: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if value is _UNKNOWN:
            continue
        key = f"{under}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, key + ".")
        else:
            yield key, plain(value)


def plain(value: object) -> str:
    """A value as text: Python's, YAML's and the shell's true, false and null are one."""
    text = str(value).strip().strip("'\"")
    return {"True": "true", "False": "false", "None": "null", "": "null", "~": "null"}.get(text, text)


def _put_in(key: str, value: str, settings: Mapping[str, str]) -> str:
    """``${other.key}`` replaced where that key is given, a few levels deep; OmegaConf's ``${..x}``: x one level up."""
    for _ in range(4):
        named = _USE.fullmatch(value)
        if not named:
            break
        up = len(named[1]) - len(named[1].lstrip("."))
        above = key.split(".")[:-up] if up else []
        other = ".".join([*above, named[1].lstrip(".")])
        if other not in settings:
            break
        key, value = other, settings[other]
    return value


def _read_shell(path: Path, found: Given, inside: tuple[Path, ...] = ()) -> None:
    """``inside``: the scripts that call this one, which is read before them."""
    words = script_words(path)
    named = list(itertools.pairwise([*words, ""]))
    for before, word in itertools.pairwise(["", *words]):
        if word.endswith(".sh") and before in _CALLS and word != path.name:
            beside = path.parent / Path(word).name
            if regular_file(beside) and beside not in (path, *inside) and len(inside) < _DEEPEST:
                _read_shell(beside, found, (path, *inside))
            else:
                found.partial = True
                found.notes.append(f"{word}, which {path.name} calls, was not found beside it: give it before")
    for word, following in named:
        option, equals, value = word.lstrip("-").partition("=")
        if word.startswith("--") and option in _NAMES_A_CONFIG:
            beside = path.parent / (value if equals else following)
            if beside.suffix in (".yaml", ".yml") and beside.is_file():
                _read_config(beside, found)
            elif beside.suffix in (".yaml", ".yml"):
                found.partial = True
                found.notes.append(f"{beside.name}, which {path.name} names, was not found beside it")
    for word, following in named:
        found.words.append(word)
        if pair := _PAIR.fullmatch(word):
            if pair[1] != "~" and ("." in pair[2] or word.startswith("--")):
                found.settings[pair[2]] = plain(pair[3])
        elif flag := _FLAG.fullmatch(word):
            given = bool(following) and not following.startswith("-") and not _is_command(following)
            found.settings[flag[1]] = plain(following) if given else "true"


def _is_command(word: str) -> bool:
    return "=" in word or word in (";", "&&", "|", "\\")


def _read_python(path: Path, found: Given, classes: Sequence[str]) -> None:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MantissaError(f"{path}: cannot be read as Python: {type(error).__name__} {error}") from None
    constants: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = _constant(node.value, constants)
    for node in ast.walk(tree):
        called = _called(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and called in classes:
            found.words.append(called)
            _keywords(node.keywords, "", constants, found, called)
    parsed = [name.id for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node.func) in _PARSERS
              for name in ast.walk(node) if isinstance(name, ast.Name) and name.id in classes]  # fmt: skip
    if parsed and not any(word in parsed for word in found.words):
        found.words += parsed[:1]
        found.partial = True
        found.notes.append(f"{path.name} takes {parsed[0]} from its command line: give that too, as KEY=VALUE or as "
                           "the shell script or YAML that it stands in")  # fmt: skip


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _keywords(given: list[ast.keyword], under: str, constants: dict[str, Any], found: Given, whose: str) -> None:
    for keyword in given:
        value = _constant(keyword.value, constants)
        if keyword.arg is None and isinstance(value, dict):
            found.settings |= dict(_leaves(value, under))
        elif isinstance(value, dict) and value:
            found.settings |= dict(_leaves(value, f"{under}{keyword.arg}."))
        elif value is _UNKNOWN:
            found.notes.append(f"{whose}({keyword.arg or '**'}=...) is no constant, and was not read")
        else:
            found.settings[f"{under}{keyword.arg}"] = plain(value)


_UNKNOWN = object()


def _constant(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """The value of a constant, a name of one, a list or dict of them, or ``torch.float16``; else ``_UNKNOWN``."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return constants.get(node.id, _UNKNOWN)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return f"-{plain(node.operand.value)}"
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return node.attr
    if isinstance(node, ast.List | ast.Tuple):
        inner = [_constant(each, constants) for each in node.elts]
        return _UNKNOWN if _UNKNOWN in inner else str(inner)
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {key.value: _constant(value, constants) for key, value in pairs if isinstance(key, ast.Constant)}
    if isinstance(node, ast.Call) and _called(node.func) == "dict" and not node.args:
        return {each.arg: _constant(each.value, constants) for each in node.keywords if each.arg}
    return _UNKNOWN


def is_verl(given: Given) -> bool:
    """Whether it is verl's."""
    return any(given.has(key) for key in _VERL["keys"]) or any(
        word.startswith(name) for word in given.words for name in _VERL["words"]
    )
