"""What somebody else's script or configuration sets, by dotted key, and whose it is. Nothing of it is run.

A shell script's words are looked at: ``key=value``, ``--key value`` and ``--flag``, variables that it sets put in where
they are used. For verl's own check what looks like an override (a dotted key, then ``=``) is one, wherever it stands,
arrays included, and what the script gives to every node is read too. Of a Python script, the arguments of calls to a
framework's configuration class, where they are constants or names of such (read by ``ast``); and of a model that the
script loads itself and hands to its trainer, whose configuration says nothing of it, its format and whether it has
adapters. A model that comes about in a way that is not known here has a format that is not known. Of YAML and TOML, its
tree. Of several files, and of a key given twice, the last counts; a configuration that a script names, or that another
builds on, is read before it.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mantissa.base.bounds import Budget, Limits, boundary, regular_file, require_size
from mantissa.base.errors import MantissaError
from mantissa.base.readers.toml import read_toml
from mantissa.base.readers.yaml import parse_yaml, read_yaml

_LARGEST = 400_000  # bytes of a script
_MADE, _FILES = 16_000_000, 64  # that reading one command may make, and read
_CONFIGS = (".yaml", ".yml", ".json", ".toml")
_BASES = 8  # configurations that build on one another
_CONFIG = Limits(400_000, 2_000, 20_000)
_PAIR = re.compile(r"(?:--)?(\+\+|\+|~)?([A-Za-z_][\w/@-]*(?:\.[\w@/-]+)*)=(.*)", re.S)
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)")
_USE = re.compile(r"\$\{([\w.]+)\}")
_OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_]\w*(?:\.[\w@/-]+)+|model_engine)=(.*)", re.S)
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_CONFIG_NAME = re.compile(r"--config-name(?:=(.*))?")
_COMMENT = re.compile(r"(^|\s)#[^\n]*", re.M)
_ENDS_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\s*\Z")
_PRINTS = ("echo", "printf")
_DEEPEST, _LONGEST = 4, 100_000  # of variables that hold variables
_SUCH_AS = "actor_rollout_ref.rollout.dtype=float16"
_VARIABLE_USE = re.compile(r"\$\{([A-Za-z_]\w*|\d+)(?::?[-=]([^{}]*))?\}|\$([A-Za-z_]\w*)")
_CALLS = ("bash", "sh", "source", ".", "exec")
_PARSERS = ("TrlParser", "HfArgumentParser")
_TRAINERS = ("GRPOTrainer", "RLOOTrainer")
_ADAPTERS = "get_peft_model"
_UNREAD = "$dtype"  # a value that no constant gives
_DEEPEST_NAME = 8  # names that stand for names
_Constant = Callable[[ast.expr], str | None]
_NAMES_A_CONFIG = ("config", "config-path", "config_path")
_VERL = {"words": ["verl.trainer.main_ppo", "verl.trainer"], "keys": ["actor_rollout_ref"]}


def _budget() -> Budget:
    """Of one command's scripts, whose names and variables are written out: a few lines can ask for any amount."""
    return Budget(files=_FILES, made=_MADE, times=0)


@dataclass
class Given:
    """``settings``: key to value, as text (true, false and null so, in any language). ``words``: of command lines, and
    the classes that a Python script calls. ``notes``: what was not read. ``partial``: it builds on a configuration that
    was not read, so what is not given is not known. ``shell``: shell scripts among the files. ``asked``: of a whole
    configuration that a framework saved, the keys that are not at their default, which alone are judged.
    """

    settings: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    partial: bool = False
    shell: list[Path] = field(default_factory=list)
    budget: Budget = field(default_factory=_budget)
    asked: frozenset[str] | None = None

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
    require_size(path, _LARGEST)
    if path.suffix in _CONFIGS:
        read_config(path, found)
    elif path.suffix == ".py":
        _read_python(path, found, classes)
    else:
        found.shell.append(path)
        _read_shell(path, found)


def read_config(path: Path, found: Given, inside: tuple[Path, ...] = ()) -> None:
    """The leaves of a configuration, put into ``found``; W&B's without what it puts around each value. ``inside``: the
    files that build on this one, which is read before them. ``MantissaError`` for what is no configuration."""
    found.budget.draw("files", 1, path)
    tree = read_toml(path, _CONFIG) if path.suffix == ".toml" else read_yaml(path, _CONFIG)
    if not isinstance(tree, Mapping):
        raise MantissaError(
            f"{path}: expected keys and values, got {'nothing' if tree is None else type(tree).__name__}"
        )
    tree = _unwrapped(tree)
    bases = tree.get("defaults") or []
    for base in bases if isinstance(bases, list) else [bases]:
        below = path.parent / base if isinstance(base, str) and base.endswith((".yaml", ".yml")) else None
        if below is None or not below.is_file() or below in (path, *inside) or len(inside) >= _BASES:
            if base != "_self_":
                found.partial = True
                found.notes.append(f"{path.name} builds on {plain(base)}, which was not read")
        else:
            read_config(below, found, (path, *inside))
    found.settings |= {key: value for key, value in leaves(tree) if key.partition(".")[0] != "defaults"}


def _unwrapped(tree: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """W&B's configuration has every value below ``value``, and keys of its own."""
    own = {name: value for name, value in tree.items() if name not in ("_wandb", "wandb_version")}
    if not own or not all(isinstance(value, Mapping) and {"value"} <= set(value) <= {"value", "desc"}
                          for value in own.values()):  # fmt: skip
        return tree
    return {name: value["value"] for name, value in own.items()}


def leaves(tree: Mapping[Any, Any], under: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and value, as text, of everything in a tree that holds nothing below it."""
    for name, value in tree.items():
        if value is _UNKNOWN:
            continue
        key = f"{under}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, key + ".")
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
    found.budget.draw("files", 1, path)
    words = script_words(path, found.budget)
    named = list(itertools.pairwise([*words, ""]))
    for before, word in itertools.pairwise(["", *words]):
        if word.endswith(".sh") and before in _CALLS and word != path.name:
            beside = _beside(path, word)
            if beside is not None and beside not in (path, *inside) and len(inside) < _BASES:
                _read_shell(beside, found, (path, *inside))
            else:
                found.partial = True
                found.notes.append(f"{word}, which {path.name} calls, was not found beside it: give it before")
    for word, following in named:
        option, equals, value = word.lstrip("-").partition("=")
        if word.startswith("--runtime-env-json"):
            found.settings |= {name: plain(each) for name, each in _variables_of(value or following).items()}
        if word.startswith("--") and option in _NAMES_A_CONFIG:
            beside = path.parent / (value if equals else following)
            if beside.suffix in _CONFIGS and beside.is_file():
                read_config(beside, found)
            elif beside.suffix in _CONFIGS:
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


def _beside(path: Path, word: str) -> Path | None:
    """The script that another names: beside it, or below its folder where the folder is a variable's."""
    named = re.sub(r"^(.*[)}]|\$[^/]*)/", "", word)
    below = [Path(named)] if ".." not in Path(named).parts and not Path(named).is_absolute() else []
    return next(
        (path.parent / each for each in (*below, Path(Path(word).name)) if regular_file(path.parent / each)), None
    )


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
            constants[node.targets[0].id] = _bounded(_constant(node.value, constants), found.budget)
    for node in ast.walk(tree):
        called = _called(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and called in classes:
            found.words.append(called)
            _keywords(node.keywords, "", constants, found, called)
    if found.words:
        found.settings |= _model_settings(tree, lambda node: _text(_constant(node, constants)))
    parsed = [name.id for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node.func) in _PARSERS
              for name in ast.walk(node) if isinstance(name, ast.Name) and name.id in classes]  # fmt: skip
    if parsed and not any(word in parsed for word in found.words):
        found.words += parsed[:1]
        found.partial = True
        found.notes.append(f"{path.name} takes {parsed[0]} from its command line: give that too, as KEY=VALUE or as "
                           "the shell script or YAML that it stands in")  # fmt: skip


def _text(value: Any) -> str | None:
    return plain(value) if isinstance(value, str) else None


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _keywords(given: list[ast.keyword], under: str, constants: dict[str, Any], found: Given, whose: str) -> None:
    for keyword in given:
        value = _bounded(_constant(keyword.value, constants), found.budget)
        if keyword.arg is None and isinstance(value, dict):
            found.settings |= dict(leaves(value, under))
        elif isinstance(value, dict) and value:
            found.settings |= dict(leaves(value, f"{under}{keyword.arg}."))
        elif value is _UNKNOWN:
            found.notes.append(f"{whose}({keyword.arg or '**'}=...) is no constant, and was not read")
        else:
            found.settings[f"{under}{keyword.arg}"] = plain(value)


_UNKNOWN = object()


def _bounded(value: Any, budget: Budget) -> Any:
    """The constant, unless what it makes written out is more than one may be."""
    size = _written(value, {})
    if size > _LONGEST:
        return _UNKNOWN
    budget.draw("made", size, "a constant")
    return value


def _written(value: Any, known: dict[int, int]) -> int:
    """Characters of a constant written out; dictionaries are shared, so each is counted once. ``known``: by id."""
    if not isinstance(value, dict):
        return len(value) if isinstance(value, str) else 1
    if id(value) not in known:
        known[id(value)] = 1 + sum(len(str(key)) + _written(inner, known) for key, inner in value.items())
    return known[id(value)]


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
        known: dict[int, int] = {}
        if _UNKNOWN in inner or sum(_written(each, known) for each in inner) > _LONGEST:
            return _UNKNOWN
        return str(inner)
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {key.value: _constant(value, constants) for key, value in pairs if isinstance(key, ast.Constant)}
    if isinstance(node, ast.Call) and _called(node.func) == "dict" and not node.args:
        return {each.arg: _constant(each.value, constants) for each in node.keywords if each.arg}
    return _UNKNOWN


def _model_settings(tree: ast.Module, constant: _Constant) -> dict[str, str]:
    """``trainer.model`` (object), ``from_pretrained.dtype`` and ``use_peft`` of the trainer that a script makes; none
    where it makes none, or names the model. ``constant``: an expression's value as text, or None."""
    found: dict[str, str] = {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node.func) in _TRAINERS):
        given = {each.arg: each.value for each in call.keywords}
        model = given.get("model", call.args[0] if call.args else None)
        made = list(_made_by(model, list(_assigned(tree)), _DEEPEST_NAME)) if model is not None else []
        adapters = given.get("peft_config")
        if any(_called(each.func) == _ADAPTERS for each in made) or (adapters is not None and not _is_none(adapters)):
            found["use_peft"] = "true"
        loaded = next((each for each in made if _called(each.func) == "from_pretrained"), None)
        if loaded is not None:
            found |= {"trainer.model": "object", "from_pretrained.dtype": _format(loaded, constant)}
        elif made:
            found |= {"trainer.model": "object", "from_pretrained.dtype": _UNREAD}
    return found


def _made_by(value: ast.expr, assigned: list[tuple[str, ast.expr]], left: int) -> Iterator[ast.Call]:
    """The calls that a model comes from, the last first; none for a text or for what is not assigned in the script."""
    if isinstance(value, ast.Name) and left:
        last = max((place for place, (name, _) in enumerate(assigned) if name == value.id), default=None)
        if last is not None:
            yield from _made_by(assigned[last][1], assigned[:last], left - 1)
    elif isinstance(value, ast.Call) and left:
        name = _called(value.func)
        if name == _ADAPTERS:
            yield value
            yield from _made_by(value.args[0], assigned, left - 1) if value.args else ()
        elif name == "from_pretrained" or _makes_a_model(value.func):
            yield value


def _makes_a_model(function: ast.expr) -> bool:
    """Whether a call's name says that it gives a model, and not the name of one: ``load_model(...)``, ``x.half()``."""
    name = _called(function)
    return name in ("to", "half", "bfloat16", "float") or ("model" in name.lower() and "name" not in name.lower())


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Each name that is assigned, in the script's order; ``model, tokenizer = ...`` gives the first."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and len(node.targets) == 1]
    for node in sorted(nodes, key=lambda each: each.lineno):
        target = node.targets[0]
        first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
        if isinstance(first, ast.Name):
            yield first.id, node.value


def _format(loaded: ast.Call, constant: _Constant) -> str:
    given = {each.arg: each.value for each in loaded.keywords}
    dtype = given.get("dtype", given.get("torch_dtype"))
    if dtype is None:
        return _UNREAD if None in given else "auto"  # of **more nothing is known
    return constant(dtype) or _UNREAD


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def is_verl(given: Given) -> bool:
    """Whether it is verl's."""
    return any(given.has(key) for key in _VERL["keys"]) or any(
        word.startswith(name) for word in given.words for name in _VERL["words"]
    )


# The words of a shell script, and verl's overrides among them.


@dataclass(frozen=True)
class Override:
    """One override as it was written: ``mark`` is what stood before it, ``+``, ``++`` or nothing."""

    key: str
    value: str
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.mark}{self.key}={self.value}"


@dataclass
class Words:
    """What was found: overrides by key, the name of the configuration, environment variables."""

    overrides: dict[str, Override] = field(default_factory=dict)
    config_name: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    submitted: bool = False  # through ``ray job submit``, which leaves the shell's variables behind
    job: dict[str, str] = field(default_factory=dict)  # what its runtime_env holds
    runtime_env_file: str | None = None  # named, and not found
    order: list[Override] = field(default_factory=list)  # every override as it stands, ``~`` too
    modules: list[str] = field(default_factory=list)  # what ``python -m`` starts
    branches: bool = False  # a script with ``if`` or ``case``, of which every branch is read
    saved: dict[str, str] = field(default_factory=dict)  # a job's whole configuration, by the table's keys
    strangers: list[str] = field(default_factory=list)  # keys that no verl known here has

    def value(self, key: str) -> str | None:
        """The value given for a key, or None."""
        saved = self.saved.get(key)
        return self.overrides[key].value if key in self.overrides else None if saved == "null" else saved


def read_overrides(arguments: Sequence[str]) -> Words:
    """Overrides from ``arguments``: a script's path, or the overrides themselves.

    Raises ``MantissaError`` where there is none, and for a script whose quotes do not close.
    """
    if len(arguments) != 1 or "=" in arguments[0]:
        return _overrides(arguments, script=False)
    path = Path(arguments[0])
    if not path.is_file():
        raise MantissaError(f"{path}: expected overrides such as {_SUCH_AS}, or a script")
    words = script_words(path)
    found = _overrides(words, script=True)
    _job(found, words, path.parent)
    if not found.overrides:
        raise MantissaError(f"{path}: found no override, such as {_SUCH_AS}")
    return found


def script_words(path: Path, budget: Budget | None = None) -> list[str]:
    """The words of a shell script, variables put in where they are known, comments left out."""
    budget = budget or _budget()
    variables: dict[str, str] = {}
    words = []
    for word in _split(path):
        word = _expanded(word, variables)
        budget.draw("made", len(word), path)
        if match := _VARIABLE.fullmatch(word):
            variables[match[1]] = match[2].lstrip("(")
        words.append(word)
    return words


def _split(path: Path) -> list[str]:
    text = _COMMENT.sub(r"\1", path.read_text(errors="replace").replace("\\\n", " "))
    if _ENDS_ESCAPED.search(text):  # a last line that was to go on, with nothing after it
        text = text.rstrip()[:-1]
    try:
        words = shlex.split(text)
        inner = [shlex.split(word) if before == "-c" else [word] for before, word in itertools.pairwise(["", *words])]
    except ValueError as error:
        raise MantissaError(f"{path}: cannot be read as a shell script: {error}") from None
    # What is printed sets nothing; what is given to bash -c is a script too.
    return [word for each, before in zip(inner, ["", *words], strict=False) if before not in _PRINTS for word in each]


def _overrides(words: Sequence[str], script: bool) -> Words:
    result = Words()
    named = False
    result.branches = script and any(word in ("if", "case") for word in words)
    result.modules = [word for before, word in itertools.pairwise(words) if before == "-m"]
    for word in words:
        name = _CONFIG_NAME.fullmatch(word)
        if named or (name and name[1]):
            result.config_name, named = (word if named else str(name and name[1])), False
        elif name:
            named = True
        elif match := _OVERRIDE.fullmatch(word.rstrip(")") if word.count("(") < word.count(")") else word):
            mark, key, value = match.groups()
            result.order.append(Override(key, value, mark or ""))
            if mark != "~":
                result.overrides[key] = Override(key, value.strip("'\""), mark or "")
        elif match := _VARIABLE.fullmatch(word):
            result.variables[match[1]] = match[2].lstrip("(")
        elif not script:
            raise MantissaError(f"{word!r}: expected key=value, such as {_SUCH_AS}")
    return result


def _job(words: Words, split: list[str], folder: Path) -> None:
    """What a ``ray job submit`` in the script gives to every node."""
    words.submitted = any(split[i : i + 3] == ["ray", "job", "submit"] for i in range(len(split)))
    for word, following in zip(split, [*split, ""][1:], strict=True):
        option, equals, value = word.partition("=")
        value = value if equals else following
        if option == "--runtime-env-json":
            words.job |= _variables_of(value)
        elif option == "--runtime-env":
            found = next((path for path in (folder / value, value) if os.path.isfile(path)), None)
            words.runtime_env_file = None if found else value
            words.job |= _variables_of(Path(found).read_text(errors="replace")) if found else {}


def _variables_of(text: str) -> dict[str, str]:
    """``env_vars`` of a runtime_env in YAML or JSON; none where it is neither."""
    try:
        held = parse_yaml(text, "runtime_env")
    except MantissaError:
        return {}
    held = held.get("env_vars") if isinstance(held, dict) else None
    return {str(name): str(value) for name, value in held.items()} if isinstance(held, dict) else {}


def _expanded(word: str, variables: dict[str, str]) -> str:
    """The word with the variables that are known put in; a default where one is not, else as it stands."""

    def known(match: re.Match[str]) -> str:
        default = match[2] if match[2] is not None else match[0]
        return variables.get(match[1] or match[3], default)

    for _ in range(_DEEPEST):  # a default may hold a variable
        if len(word) + sum(len(known(match)) for match in _VARIABLE_USE.finditer(word)) > _LONGEST:
            break  # before it is made: variables that double each other would fill the memory
        put_in = _VARIABLE_USE.sub(known, word)
        if put_in == word:
            break
        word = put_in
    return word
