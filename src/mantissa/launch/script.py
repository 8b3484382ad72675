"""Overrides as people have them: on a command line, or somewhere in a shell script.

A script is not run. Its words are looked at: variables that it sets are put in where they are used, and what looks
like an override (a dotted key, then ``=``) is one, wherever it stands, arrays included. Of a key given twice the last
counts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mantissa
from mantissa.errors import MantissaError
from mantissa.launch.check import Report
from mantissa.launch.plan import Kind, Plan
from mantissa.launch.ray_job import runtime_env
from mantissa.rl.recipe import parse_yaml

PACKAGE = Path(mantissa.__file__).parent
_WIDE = 96  # an override longer than this has its source on a line of its own
_HEADINGS: dict[Kind, str] = {
    "differs": "verl does nearly this",
    "unused": "not used on verl",
    "fixed": "verl does just this, by no key",
}


def environment_of(plan: Plan, working_dir: Path | None) -> dict[str, object]:
    """The job's ``runtime_env``: the variables that precision needs, and this package for the reward workers."""
    return runtime_env({one.name: one.value for one in plan.environment}, working_dir, [PACKAGE])


def submit_command(plan: Plan, address: str | None, working_dir: Path | None) -> str:
    """The same submission by Ray's own command line."""
    environment = json.dumps(environment_of(plan, working_dir))
    words = ["ray", "job", "submit", "--address", address or "URL", "--runtime-env-json", environment, "--"]
    return shlex.join([*words, *plan.arguments])


def dry_run(plan: Plan, address: str | None, working_dir: Path | None) -> str:
    """Everything that a launch would do, and where each part of it comes from."""
    options = plan.options
    machine = ", ".join(part for part in (options.hardware, options.cuda and f"CUDA {options.cuda}") if part)
    lines = [
        f"{plan.name} on verl {options.version}: {options.engine} learner, {options.rollout} rollout, "
        f"{options.nodes} x {options.gpus} GPUs" + (f" ({machine})" if machine else ""),
        "",
        "overrides, and the field that each says",
        *_two_columns([(str(one), one.source) for one in plan.overrides]),
        "",
        "environment of every node (runtime_env)",
        *_two_columns([(f"{one.name}={one.value}", one.source) for one in plan.environment]),
        *_two_columns([("py_modules: mantissa", "task.verifier")]),
    ]
    for kind, heading in _HEADINGS.items():
        remarks = plan.of(kind)
        if remarks:
            lines += ["", heading, *_two_columns([(remark.field, remark.text) for remark in remarks])]
    lines += ["", "command", "  " + submit_command(plan, address, working_dir)]
    return "\n".join(lines)


def report_text(report: Report) -> str:
    """What ``check-verl`` prints."""
    lines = [f"verl {report.version}, {report.engine} learner, {report.rollout} rollout"]
    lines += [f"  taken for granted: {said}" for said in report.assumed]
    for title, settings in (
        ("precision settings without effect", report.wrong),
        ("precision settings that take effect", [s for s in report.settings if s.verdict == "takes effect"]),
        ("handed to another program as they are", [s for s in report.settings if s.verdict == "handed on"]),
    ):
        if not settings:
            continue
        lines += ["", title]
        for setting in settings:
            verdict = "" if setting.verdict in ("takes effect", "handed on") else f"{setting.verdict}: "
            lines += [f"  {setting.given}", f"      {verdict}{setting.why}"]
            if setting.instead:
                lines.append(f"      instead: {setting.instead}")
    lines += ["", "what runs"]
    width = max(len(role.name) for role in report.roles)
    lines += [f"  {role.name:<{width}}  {role.active}  ({role.why})" for role in report.roles]
    lines += ["", "what is cast on the way", *(f"  {cast}" for cast in report.casts)]
    if report.meant:
        lines += ["", "for the format that was asked for, in every role", *(f"  {one}" for one in report.meant)]
    if report.others:
        lines += ["", f"{report.others} other settings are not about precision"]
    return "\n".join(lines)


def _two_columns(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Rows with their second column aligned, but for those whose first is too long for that."""
    width = max((len(first) for first, _ in rows if len(first) <= _WIDE), default=0)
    for first, second in rows:
        yield f"  {first:<{width}}  {second}".rstrip()


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
