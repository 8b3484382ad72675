"""What settings of precision, log-probs and correction do in TRL, OpenRLHF, NeMo-RL, SkyRL and AReaL.

The facts are data, ``settings.yaml``, which says there what its columns are; here is what is done with them. verl has a
table and a check of its own (``check.py``), to which its scripts are given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import BaseModel, ConfigDict

from mantissa.base.errors import MantissaError
from mantissa.launch.facts import read_table
from mantissa.launch.scripts import Given, read_given

Verdict = Literal["takes effect", "ignored", "changed", "refused", "harmful", "missing", "wrong value"]
_SAME = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}
_ABOUT = re.compile(
    r"(dtype|fp8|fp16|bf16|fp32|precision|logprob|log_prob|importance|is_correction|_tis|off_policy|rejection|quant"
    r"|kv_cache_dtype|decoupled|lm_head|autocast|temperature|top_p|top_k|min_p)"
)
_UNKNOWN = "not known"  # what a configuration says that was not read
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Fact(_Row):
    """A key that is read."""

    what: str
    read: str
    default: str = "null"
    values: tuple[str, ...] = ()


class Rule(_Row):
    """What happens to the keys ``about`` where ``when`` holds."""

    about: tuple[str, ...]
    verdict: Verdict
    why: str
    read: str
    when: dict[str, tuple[str, ...]] = {}
    differ: tuple[str, ...] = ()
    instead: str = ""


class Case(_Row):
    """What a part of the run is where ``when`` holds."""

    is_: str
    when: dict[str, tuple[str, ...]] = {}


class Part(_Row):
    """A part of the run."""

    name: str
    cases: tuple[Case, ...]


class KnownBy(_Row):
    """How a framework's script is told."""

    words: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()


class Framework(_Row):
    """One framework's rows."""

    project: str
    version: str
    known_by: KnownBy
    keys: dict[str, Fact]
    rules: tuple[Rule, ...]
    roles: tuple[Part, ...]


@cache
def frameworks() -> dict[str, Framework]:
    """The table, by the framework's name."""
    table = read_table("settings.yaml")
    for each in table.values():
        for part in each["roles"]:
            part["cases"] = [{"is_": case["is"], "when": case.get("when", {})} for case in part["cases"]]
    return {name: Framework(**each) for name, each in table.items()}


@dataclass(frozen=True)
class Judged:
    """One setting and what becomes of it. ``value``: null where it is missing. ``read``: file and line that show it."""

    key: str
    value: str
    verdict: Verdict
    why: str
    read: str
    instead: str = ""


@dataclass(frozen=True)
class Checked:
    """The whole answer. ``unknown``: settings that look as if they were about precision and are not in the table."""

    name: str
    framework: Framework
    settings: tuple[Judged, ...]
    roles: tuple[tuple[str, str], ...]
    unknown: tuple[str, ...]
    others: int
    notes: tuple[str, ...]

    @property
    def wrong(self) -> list[Judged]:
        """Settings that do not do what they say, or hurt, and those that are missing."""
        return [each for each in self.settings if each.verdict != "takes effect"]


def told(given: Given, names: Sequence[str]) -> str | None:
    """Whose the settings are, among ``names``: by command words and classes, then by keys that only it has."""
    for name in names:
        known = frameworks()[name].known_by
        if any(word == each or word.startswith(each + ".") for word in given.words for each in known.words):
            return name
        if any(word in known.classes for word in given.words):
            return name
    for name in names:
        if any(all(map(given.has, keys)) for keys in frameworks()[name].known_by.keys):
            return name
    return None


def read_settings(arguments: Sequence[str]) -> Given:
    """What files and overrides set; see ``scripts.read_given``."""
    classes = [each for framework in frameworks().values() for each in framework.known_by.classes]
    return read_given(arguments, classes)


def check_settings(given: Given, name: str) -> Checked:
    """Say what settings do in the framework of this name."""
    framework = frameworks()[name]
    keys = {*framework.keys, *given.settings, *(key for rule in framework.rules for key in (*rule.when, *rule.differ))}
    values = {key: _value(key, given, framework) for key in keys}
    settings = [found for key in given.settings if (found := _judged(key, given, framework, values)) is not None]
    settings += [
        Judged(key, "null", "missing", rule.why, rule.read, rule.instead)
        for rule in framework.rules if rule.verdict == "missing" and _holds(rule, values)
        for key in rule.about if not given.has(key) and not given.partial
    ]  # fmt: skip
    known = {each.key for each in settings}
    unknown = tuple(key for key in given.settings if key not in known and _ABOUT.search(key))
    roles = tuple((part.name, _role(part, values)) for part in framework.roles)
    others = len(given.settings) - len([key for key in given.settings if key in known]) - len(unknown)
    return Checked(name, framework, tuple(settings), roles, unknown, others, tuple(dict.fromkeys(given.notes)))


def _judged(key: str, given: Given, framework: Framework, values: Mapping[str, str]) -> Judged | None:
    """What becomes of a key that is given; None where the table has nothing about it."""
    value = given.settings[key]
    covers = [each for each in (key, *_above(key)) if each in framework.keys or _ruled(each, framework)]
    if not covers:
        return None
    for rule in framework.rules:
        idle = rule.verdict == "ignored" and _says_nothing(value, framework.keys.get(covers[0]), values)
        if rule.verdict != "missing" and not idle and covers[0] in rule.about and _holds(rule, values):
            return Judged(key, value, rule.verdict, rule.why, rule.read, rule.instead)
    fact = framework.keys.get(covers[0])
    if fact is None:
        return None
    if fact.values and value != "null" and "$" not in value and not any(_same(value, each) for each in fact.values):
        return Judged(key, value, "wrong value", f"expected one of {', '.join(fact.values)}", fact.read)
    return Judged(key, value, "takes effect", fact.what, fact.read)


def _says_nothing(value: str, fact: Fact | None, values: Mapping[str, str]) -> bool:
    """Whether a setting would change nothing if it were read."""
    default = "null" if fact is None else fact.default
    named = _REFERENCE.fullmatch(default)
    return value == "null" or _same(value, values.get(named[1], "null") if named else default)


def _above(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def _ruled(key: str, framework: Framework) -> bool:
    return any(key in rule.about for rule in framework.rules)


def _value(key: str, given: Given, framework: Framework) -> str:
    """A key's value, or its default; a section's is its leaves in a few words."""
    settings = given.settings
    for _ in range(4):
        if key in settings:
            return _UNKNOWN if "$" in settings[key] else settings[key]  # a variable that is given elsewhere
        below = [f"{each.removeprefix(key + '.')}={value}" for each, value in settings.items()
                 if each.startswith(key + ".")]  # fmt: skip
        if below:
            return ", ".join(below)
        if given.partial:
            return _UNKNOWN
        default = framework.keys[key].default if key in framework.keys else "null"
        named = _REFERENCE.fullmatch(default)
        if named is None:
            return default
        key = named[1]
    return "null"


def _holds(rule: Rule, values: Mapping[str, str]) -> bool:
    differing = {_normal(values.get(key, "null")) for key in rule.differ}
    differ = not rule.differ or (len(differing) > 1 and _UNKNOWN not in differing)
    return differ and _all(rule.when, values)


def _all(when: Mapping[str, Sequence[str]], values: Mapping[str, str]) -> bool:
    return all(any(_fits(values.get(key, "null"), each) for each in wanted) for key, wanted in when.items())


def _fits(value: str, wanted: str) -> bool:
    if value == _UNKNOWN:
        return False
    if wanted == "set":
        return value != "null"
    if wanted == "unset":
        return value == "null"
    if wanted.startswith("not "):
        return value != "null" and not _same(value, wanted.removeprefix("not "))
    return _same(value, wanted)


def _same(value: str, other: str) -> bool:
    return _normal(value) == _normal(other)


def _normal(value: str) -> str:
    """A value as it is compared: numbers by value, formats by one name, a backend without its sizes (``vllm:d4``)."""
    text = value.removeprefix("torch.").partition(":")[0]
    text = text.lower() if text.lower() in ("true", "false", "null") else _SAME.get(text, text)
    try:
        return repr(float(text))
    except ValueError:
        return text


def _role(part: Part, values: Mapping[str, str]) -> str:
    for case in part.cases:
        if any(values.get(key) == _UNKNOWN for key in case.when):
            return _UNKNOWN
        if _all(case.when, values):
            return _filled(case.is_, values)
    return _UNKNOWN


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{([\w.]+)\}", lambda match: values.get(match[1], "null"), text)


def settings_text(found: Checked) -> str:
    """What ``mantissa check`` prints."""
    framework = found.framework
    lines = [f"{found.name}: {_headline(found)}", f"  read in {framework.project} {framework.version}"]
    lines += [f"  not read: {note}" for note in found.notes]
    titles = ("settings that do not do what they say, or hurt", "settings of precision that take effect")
    for title, settings in zip(
        titles, (found.wrong, [s for s in found.settings if s.verdict == "takes effect"]), strict=True
    ):
        if settings:
            lines += ["", title]
        for each in settings:
            verdict = "" if each.verdict == "takes effect" else f"{each.verdict}: "
            lines.append(f"  {each.key}" + ("" if each.verdict == "missing" else f"={each.value}"))
            lines.append(f"      {verdict}{each.why} [{each.read}]")
            if each.instead:
                lines.append(f"      instead: {each.instead}")
    width = max(len(name) for name, _ in found.roles)
    lines += ["", "what runs", *(f"  {name:<{width}}  {what}" for name, what in found.roles)]
    if found.unknown:
        lines += ["", f"not in the table, so nothing is said of: {', '.join(found.unknown)}"]
    if found.others:
        one = found.others == 1
        lines += ["", f"{found.others} other setting{' is' if one else 's are'} not about precision"]
    return "\n".join(lines)


def _headline(found: Checked) -> str:
    count = len(found.wrong)
    if not count:
        return "every setting of precision, log-probs and correction that is known here does what it says"
    kinds = ", ".join(dict.fromkeys(each.verdict for each in found.wrong))
    return f"{count} setting{'s' if count > 1 else ''} to look at ({kinds})"


def whose(given: Given, named: str | None) -> str:
    """The framework, as named or as told; ``MantissaError`` where it cannot be told."""
    names = list(frameworks())
    if named is not None and named not in names:
        raise MantissaError(f"--framework {named}: expected one of verl, {', '.join(names)}")
    found = named or told(given, names)
    if found is None:
        some = ", ".join(list(given.settings)[:6])
        raise MantissaError(
            f"whose settings these are cannot be told ({some}); expected those of verl, {', '.join(names)}: say "
            "--framework NAME"
        )
    return found
