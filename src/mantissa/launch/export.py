"""From a recipe to what verl is to be told: ``export(config, options)`` applies the table of ``verl_fields.yaml``.

No field is passed over in silence. Each is said by an override, or is *fixed* (verl does just that and has no key), is
*unused* (it is about Mantissa's own engine), *differs* (verl does nearly that, and how it differs is written), or the
recipe is refused. ``Draft.finish`` asserts that every field of the recipe has been accounted for.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jinja2
from pydantic import BaseModel

import mantissa
from mantissa.base.errors import MantissaError
from mantissa.base.hub import hub_name, is_gguf
from mantissa.launch.facts import FACTS, full, read_table, short
from mantissa.launch.options import LaunchOptions
from mantissa.precision.schemes import SCHEMES
from mantissa.rl.config.run import RunConfig
from mantissa.rl.config.sections import LossScalingConfig
from mantissa.rollout.support import ignored

ENTRY = "verl.trainer.main_ppo"
PACKAGE = Path(mantissa.__file__).parent
_WIDE = 96  # an override longer than this has its source on a line of its own
_PLAIN = re.compile(r"[A-Za-z_/~][\w./~:@-]*")
_WORDS = frozenset({"true", "false", "null", "none", "inf", "nan", "yes", "no", "on", "off"})


def hydra_value(value: Any) -> str:
    """``value`` in hydra's override grammar; text that it could take for something else is quoted."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(hydra_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra_value(item)}" for key, item in value.items()) + "}"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


@dataclass(frozen=True)
class Override:
    """One ``key=value`` for verl, and the field of the recipe (or the ``--option``) that it says."""

    key: str
    value: Any
    source: str
    new: bool = False

    def __str__(self) -> str:
        return f"{'+' if self.new else ''}{self.key}={hydra_value(self.value)}"


@dataclass(frozen=True)
class Variable:
    """An environment variable that every node needs."""

    name: str
    value: str
    source: str


Kind = Literal["fixed", "unused", "differs"]
_HEADINGS: dict[Kind, str] = {
    "differs": "verl does nearly this",
    "unused": "not used on verl",
    "fixed": "verl does just this, by no key",
}


@dataclass(frozen=True)
class Remark:
    """What became of a field that no override says."""

    kind: Kind
    field: str
    text: str


@dataclass(frozen=True)
class Plan:
    """What to submit, and what to know about it."""

    name: str
    options: LaunchOptions
    overrides: tuple[Override, ...]
    environment: tuple[Variable, ...]
    remarks: tuple[Remark, ...]

    @property
    def arguments(self) -> list[str]:
        """The program that the cluster runs, word by word."""
        return ["python3", "-m", ENTRY, *map(str, self.overrides)]

    def runtime_env(self, working_dir: Path | None) -> dict[str, Any]:
        """Ray's ``runtime_env``, what every process of the job has on every node: the variables that precision needs,
        and this package for the reward workers."""
        variables = {one.name: one.value for one in self.environment}
        folder = {} if working_dir is None else {"working_dir": str(working_dir)}
        return {"env_vars": variables, "py_modules": [str(PACKAGE)]} | folder

    def submit_command(self, address: str | None, working_dir: Path | None) -> str:
        """The same submission by Ray's own command line."""
        environment = json.dumps(self.runtime_env(working_dir))
        words = ["ray", "job", "submit", "--address", address or "URL", "--runtime-env-json", environment, "--"]
        return shlex.join([*words, *self.arguments])

    def warnings(self) -> str:
        """What verl does otherwise than the recipe says: to be known before a job starts."""
        rows = [(remark.field, remark.text) for remark in self.remarks if remark.kind == "differs"]
        return "\n".join(["verl does otherwise than the recipe says:", *_two_columns(rows)]) if rows else ""

    def dry_run(self, address: str | None, working_dir: Path | None) -> str:
        """Everything that a launch would do, and where each part of it comes from."""
        options = self.options
        machine = ", ".join(part for part in (options.hardware, options.cuda and f"CUDA {options.cuda}") if part)
        lines = [
            f"{self.name} on verl {options.version}: {options.engine} learner, {options.rollout} rollout, "
            f"{options.nodes} x {options.gpus} GPUs" + (f" ({machine})" if machine else ""),
            "",
            "overrides, and the field that each says",
            *_two_columns([(str(one), one.source) for one in self.overrides]),
            "",
            "environment of every node (runtime_env)",
            *_two_columns([(f"{one.name}={one.value}", one.source) for one in self.environment]),
            *_two_columns([("py_modules: mantissa", "task.verifier")]),
        ]
        for kind, heading in _HEADINGS.items():
            remarks = [(remark.field, remark.text) for remark in self.remarks if remark.kind == kind]
            if remarks:
                lines += ["", heading, *_two_columns(remarks)]
        return "\n".join([*lines, "", "command", "  " + self.submit_command(address, working_dir)])


def _two_columns(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Rows with their second column aligned, but for those whose first is too long for that."""
    width = max((len(first) for first, _ in rows if len(first) <= _WIDE), default=0)
    for first, second in rows:
        yield f"  {first:<{width}}  {second}".rstrip()


NO_BOUND = 1e9  # beyond exp(20), where every log-ratio is clamped: a bound that no ratio reaches
_GROUPS = ("model_engine",)  # hydra's groups of defaults: no keys of the tree


def export(config: RunConfig, options: LaunchOptions) -> Plan:
    """Translate every field of a recipe to keys that this verl, with these engines, reads.

    Raises ``MantissaError`` with every reason at once where something that the recipe asks for would be ignored there,
    is hard-coded, or is beyond the hardware.
    """
    draft = Draft(config, options)
    for row in table()["rows"]:
        draft.apply(row)
    return draft.finish()


def _nested(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Sections that a plugin's engine takes whole, as verl's dictionaries hold them."""
    asked = config.precision.reference or config.precision.train
    policy, loss = config.precision.model_dump(), config.algorithm.loss
    formats = {"preset", "train", "rollout", "reference", "kv_cache"}
    reference = {name: value for name, value in policy.items() if name not in formats}
    for section, needed in (("fp8", asked == "fp8"), ("quantized", asked in SCHEMES)):
        reference.pop(section, None)
        if needed and (chosen := getattr(config.precision, section).model_dump(exclude_defaults=True)):
            reference[section] = chosen
    scaling = config.loss_scaling or LossScalingConfig()
    found = {
        "policy": policy,
        "of_reference": {"train": asked, "rollout": asked, "kernels": "fast"} | reference,
        "partitioned": loss.model_dump(exclude={"kind"}, exclude_none=True),
        "scaling": scaling.model_dump(exclude_defaults=scaling.rule == "auto"),
    }
    return {name: _lists(value) for name, value in found.items()}


def _lists(value: Any) -> Any:
    """Tuples as lists, which is what a dictionary of verl's has."""
    if isinstance(value, dict):
        return {name: _lists(each) for name, each in value.items()}
    return [_lists(each) for each in value] if isinstance(value, (list, tuple)) else value


@functools.cache
def table() -> dict[str, Any]:
    """``verl_fields.yaml``: how each field of a recipe is said to verl, or why it is not."""
    return read_table("verl_fields.yaml")


def _bound(value: float | None, none: float = NO_BOUND) -> float:
    """A bound as verl can read it."""
    return value if value is not None and math.isfinite(value) else none


_JINJA = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
_JINJA.globals |= {"ignored": ignored}
_JINJA.filters |= {"bound": _bound, "hub_name": hub_name, "is_gguf": is_gguf}


@functools.cache
def _expression(source: str) -> Callable[..., Any]:
    return _JINJA.compile_expression(source, undefined_to_none=False)


@functools.cache
def _template(source: str) -> jinja2.Template:
    return _JINJA.from_string(source)


@dataclass
class Draft:
    """A plan in the making: what the table's rows write to."""

    config: RunConfig
    options: LaunchOptions
    overrides: list[Override] = field(default_factory=list)
    environment: list[Variable] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sections = {name: getattr(self.config, name) for name in RunConfig.model_fields}
        self._names: dict[str, Any] = sections | {"options": self.options} | _nested(self.config)
        for name, source in table()["names"].items():
            self._names[name] = self._evaluate(source)

    def apply(self, row: dict[str, Any], about: str = "") -> bool:
        """Apply a row of the table to the fields ``about``, unless it names its own; whether its condition held."""
        about = self._text(row.get("field", about))
        fields = about.split(", ")
        self._names["value"] = self._value(fields[0])
        if "when" in row and not self._evaluate(row["when"]):
            if "otherwise" in row:
                self.remark("fixed", fields[0], self._text(row["otherwise"]))
            return False
        for key, value in row.get("set", {}).items():
            self.set(self._text(key), value, about)
        for name, key in self._evaluate(row.get("keys", "{}")).items():
            path = f"{about}.{name}"
            self.set(key, f"({path})|bound" if isinstance(self._value(path), float) else path, path)
        for name, value in row.get("variables", {}).items():
            self.environment.append(Variable(name, str(self._evaluate(value)), about))
        for one in fields:
            for kind in _HEADINGS:
                if kind in row:
                    self.remark(kind, one, self._text(row[kind]))
            if "refuse" in row:
                self.refusals[one] = self._text(row["refuse"])
        if "only" in row:
            self._only(about, self._evaluate(row["only"]), self._text(row["why"]))
        for inner in row.get("rows", ()):
            self.apply(inner, about)
        any(self.apply(inner, about) for inner in row.get("first", ()))
        return True

    def set(self, key: str, value: Any, source: str) -> None:
        """Say ``source`` by ``key=value`` where this engine and version read the key, which the table must hold."""
        fact = None if key in _GROUPS else FACTS[key]
        if fact is not None:
            read_by = self.options.rollout in fact.rollouts and self.options.version in fact.versions
            if self.options.engine not in fact.engines or not read_by:
                return
        value = self._evaluate(value)
        assert not (fact and fact.values) or hydra_value(value).strip("'") in fact.values, (
            f"{key}={value}: not of {fact}"
        )
        assert all(one.key != full(key) for one in self.overrides), f"{key} is set twice"
        self.overrides.append(Override(full(key), value, source, fact is not None and fact.new))

    def remark(self, kind: Kind, field: str, text: str) -> None:
        self.remarks.append(Remark(kind, field, text))

    def _only(self, field: str, one: Any, why: str) -> None:
        """A field for which verl has one value: fixed where that is asked for, refused or noted where it is not."""
        value = self._names["value"]
        if value == one:
            self.remark("fixed", field, why)
        elif self._given(field):
            self.refusals[field] = f"{value} was asked for, and {why}"
        else:
            self.remark("differs", field, f"{value} here; {why}")

    def _evaluate(self, source: Any) -> Any:
        """A value of the table: text is an expression."""
        found = _expression(source)(self._names) if isinstance(source, str) else source
        assert not isinstance(found, jinja2.Undefined), f"{source}: {found._undefined_message}"
        return found

    def _text(self, source: str) -> str:
        return _template(source).render(self._names) if "{" in source else source

    def _value(self, path: str) -> Any:
        """The value of a field by its dotted name; None where a section is null, or for an option of the launch."""
        first, *rest = path.split(".")
        found = self._names.get(first)
        for part in rest:
            found = getattr(found, part, None)
        return found

    def _given(self, path: str) -> bool:
        """Whether the recipe itself says this field, rather than leaving it at its default."""
        found: Any = self.config
        for part in path.split("."):
            if part not in found.model_fields_set:
                return False
            found = getattr(found, part)
        return True

    def finish(self) -> Plan:
        """The plan, or one error with every reason why there is none."""
        missing = sorted(set(fields_of(self.config)) - set(self._accounted()))
        assert not missing, f"not accounted for: {missing}"
        if self.refusals:
            reasons = [f"{field}: {reason}" for field, reason in self.refusals.items()]
            said = reasons[0] if len(reasons) == 1 else "; ".join(f"({i}) {r}" for i, r in enumerate(reasons, 1))
            more = "" if len(reasons) == 1 else f" ({len(reasons)} reasons)"
            raise MantissaError(f"this recipe cannot run on verl {self.options.version}{more}: {said}")
        for key in self.options.overrides:
            taken = next((one for one in self.overrides if short(one.key) == short(key.lstrip("+~"))), None)
            if taken is not None:
                raise MantissaError(f"overrides: {key} is decided by {taken.source}; change it there")
        extra = [
            Override(full(key.lstrip("+")), value, "overrides", key.startswith("+"))
            for key, value in self.options.overrides.items()
        ]
        own = [Variable(name, value, "environment") for name, value in self.options.environment.items()]
        overrides, environment = (*self.overrides, *extra), (*self.environment, *own)
        return Plan(self.config.name, self.options, overrides, environment, tuple(self.remarks))

    def _accounted(self) -> Iterator[str]:
        """Fields that an override names, and those that a remark or a refusal is about, sections included."""
        said = {source for one in self.overrides for source in one.source.split(", ")}
        said |= {variable.source for variable in self.environment}
        whole = {one.source for one in self.overrides if isinstance(one.value, dict)}
        about = {remark.field for remark in self.remarks} | set(self.refusals) | whole
        for path in fields_of(self.config):
            parts = path.split(".")
            if path in said or any(".".join(parts[:i]) in about for i in range(1, len(parts) + 1)):
                yield path


def fields_of(config: RunConfig) -> list[str]:
    """Every field of a recipe by its dotted name; a null section is one."""

    def walk(model: BaseModel, prefix: str) -> Iterator[str]:
        for name in type(model).model_fields:
            value = getattr(model, name)
            path = prefix + name
            if isinstance(value, BaseModel):
                yield from walk(value, path + ".")
            else:
                yield path

    return list(walk(config, ""))
