"""What a check says of settings; and what settings of precision, log-probs and correction do in other frameworks than
verl.

The facts are data (``facts.py``); here is what is done with them. What is verl's alone is in ``check.py``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from mantissa.base.errors import MantissaError
from mantissa.launch.facts import Framework, Key, Part, Rule, Verdict, about_precision, frameworks, programs
from mantissa.launch.scripts import Given, Override, read_given

_SAME = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}
_FORMAT = re.compile(r"(dtype|fp4|fp8|fp16|bf16|quant(?!ile)|precision|\bamp|half|int4|qat)")
_OTHER_MODELS = re.compile(r"(^|[._-])(teacher|critic|value|reward|ref|draft|policy_distillation)([._-]|$)")
_SAMPLES = re.compile(r"(rollout|vllm|sglang|generat|inference|sampl)")
_UNKNOWN = "not known"  # what a configuration says that was not read
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_DONE = ("takes effect", "handed on")
State = Literal["good", "wrong", "unknown"]


@dataclass(frozen=True)
class Setting:
    """One setting and what becomes of it; ``instead``: what would do what was meant. ``read``: file and line that show
    it, where the check names them. The value of one that is missing is null, or what it ought to be."""

    given: Override
    verdict: Verdict
    why: str
    instead: str = ""
    read: str = ""


@dataclass(frozen=True)
class Role:
    """What one part of the run computes in, and why, where that is said."""

    name: str
    active: str
    why: str = ""


@dataclass(frozen=True)
class Answer(ABC):
    """What was found of each setting of precision, and what runs. ``others``: settings about something else."""

    settings: tuple[Setting, ...]
    roles: tuple[Role, ...]
    others: int

    @property
    @abstractmethod
    def text(self) -> str:
        """What ``mantissa check`` prints of it."""

    @property
    def wrong(self) -> list[Setting]:
        """Settings that do not do what they say, or hurt, and those that are missing."""
        return [setting for setting in self.settings if setting.verdict not in _DONE]

    @property
    def state(self) -> State:
        """``wrong`` where a setting does not do what it says, ``unknown`` where that is not known of one."""
        if any(setting.verdict != "unknown" for setting in self.wrong):
            return "wrong"
        return "unknown" if self.wrong else "good"

    def that(self, verdict: Verdict) -> list[Setting]:
        """The settings of one verdict."""
        return [setting for setting in self.settings if setting.verdict == verdict]


def settings_text(parts: Mapping[str, Sequence[Setting]]) -> list[str]:
    """Lines of settings under their titles."""
    lines = []
    for title, settings in parts.items():
        lines += ["", title] if settings else []
        for each in settings:
            verdict = "" if each.verdict in _DONE else f"{each.verdict}: "
            bare = each.verdict == "missing" and each.given.value == "null"
            lines.append(f"  {each.given.key if bare else each.given}")
            lines.append(f"      {verdict}{each.why}" + (f" [{each.read}]" if each.read else ""))
            lines += [f"      instead: {each.instead}"] if each.instead else []
    return lines


def roles_text(roles: Sequence[Role]) -> list[str]:
    """Lines of what runs."""
    width = max(len(role.name) for role in roles)
    lines = [f"  {role.name:<{width}}  {role.active}" + (f"  ({role.why})" if role.why else "") for role in roles]
    return ["", "what runs", *lines]


@dataclass(frozen=True)
class Checked(Answer):
    """The answer for one of the frameworks. ``unknown``: settings that look as if they were about precision and are not
    in the table."""

    name: str
    unknown: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def state(self) -> State:
        """As of any answer; ``unknown`` for keys that are not in the table too."""
        found = super().state
        return "unknown" if found == "good" and self.unknown else found

    @property
    def text(self) -> str:
        """What ``mantissa check`` prints."""
        framework = frameworks()[self.name]
        lines = [f"{self.name}: {self._headline}", f"  read in {framework.project} {framework.version}"]
        lines += [f"  not read: {note}" for note in self.notes]
        lines += settings_text({
            "settings that do not do what they say, or hurt": self.wrong,
            "settings of precision that take effect": self.that("takes effect"),
        })  # fmt: skip
        lines += roles_text(self.roles)
        if self.unknown:
            lines += ["", "what these do is not known", *(f"  {key}  ({self._of(key)})" for key in self.unknown)]
        if self.others:
            one = self.others == 1
            lines += ["", f"{self.others} other setting{' is' if one else 's are'} not about precision"]
        return "\n".join(lines)

    def _of(self, key: str) -> str:
        """What the program's own sources say of a key that the table has not."""
        program = programs()[self.name]
        if key not in program.keys:
            return f"no option that {self.name} {program.version} itself defines"
        kind, default = program.keys[key]
        return f"{self.name} has it: {kind}, by default {default}"

    @property
    def _headline(self) -> str:
        count = len(self.wrong)
        if not count and self.unknown:
            return (
                f"what {len(self.unknown)} setting{'s' if len(self.unknown) > 1 else ''} of precision does is not known"
            )
        if not count:
            return "every setting of precision, log-probs and correction that is known here does what it says"
        kinds = ", ".join(dict.fromkeys(each.verdict for each in self.wrong))
        return f"{count} setting{'s' if count > 1 else ''} to look at ({kinds})"


def told(given: Given, names: Sequence[str]) -> str | None:
    """Whose the settings are, among ``names``: by command words and classes, then by keys that only it has."""
    words = [*given.words, *map(" ".join, pairwise(given.words))]
    for name in names:
        known = frameworks()[name].known_by
        if any(word == each or word.startswith(each + ".") for word in words for each in known.words):
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
    asked = [key for key in given.settings if given.asked is None or key in given.asked]
    settings = [found for key in asked if (found := _judged(key, given, framework, values)) is not None]
    settings += [
        Setting(Override(key, "null"), "missing", rule.why, rule.instead, rule.read)
        for rule in framework.rules if rule.verdict == "missing" and _holds(rule, values)
        for key in rule.about if not _given(key, given)
    ]  # fmt: skip
    known = {each.given.key for each in settings}
    unknown = tuple(
        key for key in asked if key not in known and about_precision(key) and not _by_itself(key, given, name)
    )
    roles = tuple(Role(part.name, _unread(part.name, unknown) or _role(part, values)) for part in framework.roles)
    others = len(asked) - len([key for key in asked if key in known]) - len(unknown)
    return Checked(tuple(settings), roles, others, name, unknown, tuple(dict.fromkeys(given.notes)))


def not_at_default(given: Given, name: str) -> frozenset[str]:
    """The keys of a whole configuration that say something else than the framework does by itself."""
    framework = frameworks()[name]
    values = {key: _value(key, given, framework) for key in {*framework.keys, *given.settings}}
    return frozenset(
        key for key, value in given.settings.items()
        if not (_says_nothing(value, framework.keys[key], values) if key in framework.keys
                else _by_itself(key, given, name))
    )  # fmt: skip


def _by_itself(key: str, given: Given, name: str) -> bool:
    """Whether a key that the table has not says what the program does by itself, as its sources have it."""
    known = programs()[name].keys.get(key)
    return known is not None and same(given.settings[key], known[1])


def _given(key: str, given: Given) -> bool:
    """Whether a key, or one below it, was given, or may have been where it was not read."""
    if given.asked is not None:
        return any(each == key or each.startswith(key + ".") for each in given.asked)
    return given.partial or given.has(key)


def _unread(role: str, unknown: Sequence[str]) -> str:
    """That a role's format is not known, where a key about it is not; empty for the other roles."""
    if role not in ("learner", "rollout"):
        return ""
    about = [key for key in unknown if _FORMAT.search(key.lower()) and not _OTHER_MODELS.search(key)
             and bool(_SAMPLES.search(key)) == (role == "rollout")]  # fmt: skip
    return f"{_UNKNOWN} ({', '.join(about)})" if about else ""


def _judged(key: str, given: Given, framework: Framework, values: Mapping[str, str]) -> Setting | None:
    """What becomes of a key that is given; None where the table has nothing about it."""
    value = given.settings[key]
    written = Override(key, value)
    covers = [each for each in (key, *_above(key)) if each in framework.keys or _ruled(each, framework)]
    if not covers:
        return None
    for rule in framework.rules:
        idle = rule.verdict == "ignored" and _says_nothing(value, framework.keys.get(covers[0]), values)
        if rule.verdict != "missing" and not idle and covers[0] in rule.about and _holds(rule, values):
            return Setting(written, rule.verdict, rule.why, rule.instead, rule.read)
    fact = framework.keys.get(covers[0])
    if fact is None:
        return None
    if fact.values and value != "null" and "$" not in value and not any(same(value, each) for each in fact.values):
        return Setting(written, "wrong value", f"expected one of {', '.join(fact.values)}", read=fact.read)
    return Setting(written, "takes effect", fact.what, read=fact.read)


def _says_nothing(value: str, fact: Key | None, values: Mapping[str, str]) -> bool:
    """Whether a setting would change nothing if it were read."""
    default = "null" if fact is None else fact.default
    named = _REFERENCE.fullmatch(default)
    return value == "null" or same(value, values.get(named[1], "null") if named else default)


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
        default = framework.keys[key].default if key in framework.keys else "null"
        named = _REFERENCE.fullmatch(default)
        if given.partial and (named is None or given.asked is None):
            return _UNKNOWN
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
        return value != "null" and not same(value, wanted.removeprefix("not "))
    return same(value, wanted)


def same(value: str, other: str) -> bool:
    """Whether two values are one: numbers by value, formats by any of their names."""
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
    return re.sub(r"\{([\w.-]+)\}", lambda match: values.get(match[1], "null"), text)


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
