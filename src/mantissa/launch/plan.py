"""A recipe said in verl's words: overrides with the field that each came from, and what became of every other field.

No field is passed over in silence. Each is said by an override, or is *fixed* (verl does just that and has no key), is
*unused* (it is about Mantissa's own engine), *differs* (verl does nearly that, and how it differs is written), or the
recipe is refused. ``Draft.finish`` asserts that every field of the recipe has been accounted for.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from mantissa.errors import MantissaError
from mantissa.launch.facts import FACTS, full
from mantissa.launch.options import LaunchOptions, same_key
from mantissa.precision import PrecisionPolicy
from mantissa.rl.config import RunConfig

ENTRY = "verl.trainer.main_ppo"
NO_BOUND = 1e9  # beyond exp(20), where every log-ratio is clamped: a bound that no ratio reaches
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

    def of(self, kind: Kind) -> list[Remark]:
        return [remark for remark in self.remarks if remark.kind == kind]


@dataclass
class Draft:
    """A plan in the making: what the translators write to."""

    config: RunConfig
    options: LaunchOptions
    overrides: list[Override] = field(default_factory=list)
    environment: list[Variable] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    refusals: list[tuple[str, str]] = field(default_factory=list)

    @property
    def policy(self) -> PrecisionPolicy:
        return self.config.precision_policy

    @property
    def megatron(self) -> bool:
        return self.options.engine == "megatron"

    def set(self, key: str, value: Any, source: str) -> None:
        """Say ``source`` by ``key=value``. The table must hold the key, and this engine and version must read it."""
        fact = FACTS[key]
        assert self.options.engine in fact.engines, f"{key} is not read by {self.options.engine}"
        assert self.options.rollout in fact.rollouts, f"{key} is not read by {self.options.rollout}"
        assert self.options.version in fact.versions, f"{key} is not read by verl {self.options.version}"
        assert not fact.values or hydra_value(value) in fact.values, f"{key}={value}: not one of {fact.values}"
        assert all(one.key != full(key) for one in self.overrides), f"{key} is set twice"
        self.overrides.append(Override(full(key), value, source, fact.new))

    def group(self, group: str, choice: str, source: str) -> None:
        """Choose one of hydra's groups of defaults."""
        self.overrides.append(Override(group, choice, source))

    def variable(self, name: str, value: str, source: str) -> None:
        self.environment.append(Variable(name, value, source))

    def fixed(self, field: str, text: str) -> None:
        self.remarks.append(Remark("fixed", field, text))

    def unused(self, field: str, text: str) -> None:
        self.remarks.append(Remark("unused", field, text))

    def differs(self, field: str, text: str) -> None:
        self.remarks.append(Remark("differs", field, text))

    def refuse(self, field: str, reason: str) -> None:
        self.refusals.append((field, reason))

    def given(self, path: str) -> bool:
        """Whether the recipe itself says this field, rather than leaving it at its default."""
        first, *rest = path.split(".")
        if first == "precision":
            value: Any = self.config.precision
            for part in rest:
                if not isinstance(value, dict) or part not in value:
                    return False
                value = value[part]
            return True
        model: Any = self.config
        for part in (first, *rest):
            if not isinstance(model, BaseModel) or part not in model.model_fields_set:
                return False
            model = getattr(model, part)
        return True

    def only(self, field: str, value: Any, what_verl_does: Any, why: str) -> None:
        """A field for which verl has one value: fixed where that is asked for, refused or noted where it is not."""
        if value == what_verl_does:
            self.fixed(field, why)
        elif self.given(field):
            self.refuse(field, f"{value} was asked for, and {why}")
        else:
            self.differs(field, f"{value} here; {why}")

    def finish(self) -> Plan:
        """The plan, or one error with every reason why there is none."""
        missing = sorted(set(fields_of(self.config)) - set(self._accounted()))
        assert not missing, f"not accounted for: {missing}"
        if self.refusals:
            reasons = [f"{field}: {reason}" for field, reason in dict(self.refusals).items()]
            said = reasons[0] if len(reasons) == 1 else "; ".join(f"({i}) {r}" for i, r in enumerate(reasons, 1))
            more = "" if len(reasons) == 1 else f" ({len(reasons)} reasons)"
            raise MantissaError(f"this recipe cannot run on verl {self.options.version}{more}: {said}")
        for key in self.options.overrides:
            taken = next((one for one in self.overrides if same_key(one.key, key)), None)
            if taken is not None:
                raise MantissaError(f"overrides: {key} is decided by {taken.source}; change it there")
        extra = [
            Override(full(key.lstrip("+")), value, "overrides", key.startswith("+"))
            for key, value in self.options.overrides.items()
        ]
        own = [Variable(name, value, "environment") for name, value in self.options.environment.items()]
        return Plan(
            self.config.name,
            self.options,
            (*self.overrides, *extra),
            (*self.environment, *own),
            tuple(self.remarks),
        )

    def _accounted(self) -> Iterator[str]:
        """Fields that an override names, and those that a remark or a refusal is about, sections included."""
        said = {source for one in self.overrides for source in one.source.split(", ")}
        said |= {variable.source for variable in self.environment}
        about = {remark.field for remark in self.remarks} | {field for field, _ in self.refusals}
        for path in fields_of(self.config):
            parts = path.split(".")
            if path in said or any(".".join(parts[:i]) in about for i in range(1, len(parts) + 1)):
                yield path


def fields_of(config: RunConfig) -> list[str]:
    """Every field of a recipe by its dotted name, those of its precision policy included; a null section is one."""

    def walk(model: BaseModel, prefix: str) -> Iterator[str]:
        for name in type(model).model_fields:
            value = getattr(model, name)
            path = prefix + name
            if isinstance(value, BaseModel):
                yield from walk(value, path + ".")
            elif path != "precision":
                yield path

    policy = config.precision_policy
    names = [f"precision.{f.name}" for f in dataclasses.fields(policy) if f.name != "fp8" or policy.fp8 is None]
    if policy.fp8 is not None:
        names += [f"precision.fp8.{f.name}" for f in dataclasses.fields(policy.fp8)]
    return [*walk(config, ""), *names]


def finite(value: float) -> float:
    """A bound as verl can read it: none is one that no ratio reaches."""
    return value if math.isfinite(value) else NO_BOUND
