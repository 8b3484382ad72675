"""Overrides as people have them: on a command line, or somewhere in a shell script.

A script is not run. Its words are looked at: variables that it sets are put in where they are used, and what looks
like an override (a dotted key, then ``=``) is one, wherever it stands, arrays included. Of a key given twice the last
counts.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mantissa.errors import MantissaError
from mantissa.rl.recipe import parse_yaml

_OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_]\w*(?:\.[\w@/-]+)+|model_engine)=(.*)", re.S)
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_CONFIG_NAME = re.compile(r"--config-name(?:=(.*))?")
_COMMENT = re.compile(r"(^|\s)#[^\n]*", re.M)
_ENDS_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\s*\Z")
_DEEPEST, _LONGEST = 4, 100_000
_USE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?[-=]([^{}]*))?\}|\$([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Given:
    """One override as it was written: ``mark`` is what stood before it, ``+``, ``++`` or nothing."""

    key: str
    value: str
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.mark}{self.key}={self.value}"


@dataclass
class Words:
    """What was found: overrides by key, the name of the configuration, environment variables."""

    overrides: dict[str, Given] = field(default_factory=dict)
    config_name: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    submitted: bool = False  # through ``ray job submit``, which leaves the shell's variables behind
    job: dict[str, str] = field(default_factory=dict)  # what its runtime_env holds
    runtime_env_file: str | None = None  # named, and not found

    def value(self, key: str) -> str | None:
        """The value given for a key, or None."""
        return self.overrides[key].value if key in self.overrides else None


def read_words(arguments: Sequence[str]) -> Words:
    """Overrides from ``arguments``: a script's path, or the overrides themselves.

    Raises ``MantissaError`` where there is none, and for a script whose quotes do not close.
    """
    if len(arguments) == 1 and "=" not in arguments[0]:
        path = Path(arguments[0])
        if not path.is_file():
            raise MantissaError(
                f"{path}: expected overrides such as actor_rollout_ref.rollout.dtype=float16, or a script"
            )
        split = _split(path)
        words = _found(split, script=True)
        _job(words, [_expanded(word, words.variables) for word in split], path.parent)
        if not words.overrides:
            raise MantissaError(f"{path}: found no override, such as actor_rollout_ref.rollout.dtype=float16")
        return words
    words = _found(list(arguments), script=False)
    return words


def _split(path: Path) -> list[str]:
    text = _COMMENT.sub(r"\1", path.read_text(errors="replace").replace("\\\n", " "))
    if _ENDS_ESCAPED.search(text):  # a last line that was to go on, with nothing after it
        text = text.rstrip()[:-1]
    try:
        return shlex.split(text)
    except ValueError as error:
        raise MantissaError(f"{path}: cannot be read as a shell script: {error}") from None


def _found(words: list[str], script: bool) -> Words:
    result = Words()
    named = False
    for word in words:
        word = _expanded(word, result.variables) if script else word
        name = _CONFIG_NAME.fullmatch(word)
        if named or (name and name[1]):
            result.config_name, named = (word if named else str(name and name[1])), False
        elif name:
            named = True
        elif match := _OVERRIDE.fullmatch(word.rstrip(")") if word.count("(") < word.count(")") else word):
            mark, key, value = match.groups()
            if mark != "~":
                result.overrides[key] = Given(key, value.strip("'\""), mark or "")
        elif match := _VARIABLE.fullmatch(word):
            result.variables[match[1]] = match[2].lstrip("(")
        elif not script:
            raise MantissaError(f"{word!r}: expected key=value, such as actor_rollout_ref.rollout.dtype=float16")
    return result


def _job(words: Words, split: list[str], folder: Path) -> None:
    """What a ``ray job submit`` in the script gives to every node."""
    words.submitted = any(split[i : i + 3] == ["ray", "job", "submit"] for i in range(len(split)))
    for word, following in zip(split, [*split[1:], ""], strict=True):
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
        if len(word) + sum(len(known(match)) for match in _USE.finditer(word)) > _LONGEST:
            break  # before it is made: variables that double each other would fill the memory
        put_in = _USE.sub(known, word)
        if put_in == word:
            break
        word = put_in
    return word
