"""From a recipe's YAML and ``key=value`` overrides to a ``RunConfig``, with one clear line for each mistake."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from mantissa.algorithms import LOSSES
from mantissa.base.bounds import boundary
from mantissa.base.config import PLAIN
from mantissa.base.errors import MantissaError, nearest
from mantissa.base.readers.yaml import parse_yaml, read_yaml
from mantissa.base.shipped import find_recipe
from mantissa.precision import SCHEMES
from mantissa.rl.config.run import RunConfig


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, nproc: int | None = None) -> RunConfig:
    """Read a recipe and apply ``key=value`` overrides (dotted keys, YAML values), then validate the whole.

    ``path``: a YAML file, or the name of a recipe that comes with Mantissa, such as ``demo``.
    ``nproc``: where the recipe does not say, there are this many processes.

    Relative paths of datasets and models in a recipe are relative to the current folder, as on a command line.
    Raises ``MantissaError`` for a missing file, bad YAML, unknown keys (with the nearest right one) and bad values.
    """
    with boundary(f"recipe {path}", "expected a YAML file of UTF-8 text, such as recipes/demo.yaml"):
        path = find_recipe(path)
        values = read_yaml(path)
    if not isinstance(values, dict):
        raise MantissaError(f"{path}: expected keys and values, got {type(values).__name__}")
    there = {} if nproc is None else {"nproc": nproc}
    return make_config(there | apply_overrides(values, overrides), str(path))


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set ``a.b.c=value`` in nested mappings; shorter keys first: ``precision=fp16`` comes before its fields.

    ``warm_start=null`` leaves out what an override before it set there.
    """
    result = dict(values)
    pairs: list[tuple[list[str], Any]] = []
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise MantissaError(f"override {item!r}: expected key=value, such as steps=20 or precision.rollout=bf16")
        keys, value = key.split("."), parse_yaml(text, f"override {item!r}")
        if value is None:
            pairs = [(other, before) for other, before in pairs if other[: len(keys)] != keys]
        pairs.append((keys, value))
    for keys, value in sorted(pairs, key=lambda pair: len(pair[0])):
        _set(result, keys, value, ".".join(keys))
    return result


def _set(values: dict[str, Any], keys: list[str], value: Any, dotted: str) -> None:
    """Set one nested key, copying mappings on the way; a name in a mapping's place becomes that mapping."""
    if len(keys) == 1:
        values[keys[0]] = value
        return
    inner = values.get(keys[0])
    if isinstance(inner, str):
        # precision: fp16 and loss: ppo_clip are names that stand for a mapping.
        names = {"precision": "preset", "loss": "kind"}
        if keys[0] not in names:
            raise MantissaError(f"override {dotted}: {keys[0]} is {inner!r}, which has no field {keys[1]!r}")
        inner = {names[keys[0]]: inner}
    if inner is not None and not isinstance(inner, dict):
        raise MantissaError(f"override {dotted}: {keys[0]} is {inner!r}, which has no fields")
    values[keys[0]] = dict(inner or {})
    _set(values[keys[0]], keys[1:], value, dotted)


def make_config(values: dict[str, Any], where: str) -> RunConfig:
    """Validate plain values into a ``RunConfig``; the first mistake becomes a ``MantissaError``."""
    with boundary(where, "expected a recipe's keys and values"):
        try:
            return RunConfig.model_validate(values)
        except ValidationError as error:
            raise MantissaError(f"{where}: {_describe(error)}") from None


def widened(config: RunConfig, to: str) -> RunConfig:
    """``config`` with learner and rollout at least as wide as ``to``, checked as any recipe is.

    The reference stays what it is, format and all: what the policy is held to does not move.
    """
    policy = config.precision

    def wide(role: str) -> str:
        return "fp32" if "fp32" in (role, to) else to

    values: dict[str, Any] = {"train": wide(policy.train), "rollout": wide(policy.rollout)}
    kept = ("kernels", "on_mismatch", "check_every", "backend", "fallback")
    values |= {name: value for name, value in policy if name in kept}
    if config.algorithm.reference is not None:
        values["reference"] = policy.reference or policy.train
    if values.get("reference") == "fp8" and policy.fp8 is not None:
        values["fp8"] = policy.fp8
    if values.get("reference") in SCHEMES and policy.quantized is not None:
        values["quantized"] = policy.quantized
    if {values["train"], values["rollout"], values.get("reference", "fp32")} == {"fp32"}:
        values["backend"] = "auto"  # fp32 is never simulated
    plain = config.model_dump(mode="json") | {"precision": values, "loss_scaling": None}
    return make_config(plain, "the run after a fall back of its guard")


def _describe(error: ValidationError) -> str:
    """The first mistake in words: an unknown key if there is one (the others often follow from it), else the first."""
    mistakes = error.errors(include_url=False)
    first = next((m for m in mistakes if m["type"] == "extra_forbidden"), mistakes[0])
    path = [str(part) for part in first["loc"]]
    key = ".".join(part for part in path if part not in _UNION_TAGS)
    more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
    if first["type"] == "extra_forbidden":
        known = _siblings(path)
        listed = f" (known here: {', '.join(known)})" if known else ""
        return f"unknown key {key!r}{nearest(path[-1], known)}{listed}{more}"
    if first["type"] == "missing":
        return f"missing key {key!r}{more}"
    if first["type"] == PLAIN:
        return f"{key + '.' if key else ''}{first['msg']}{more}"
    message = first["msg"].removeprefix("Value error, ").strip()
    given = first["input"]
    got = f", got {given!r}" if isinstance(given, (str, int, float, bool, type(None))) and key else ""
    message = message[0].lower() + message[1:] if message.startswith(("Input", "Expected")) else message
    return f"{key + ': ' if key else ''}{message}{got}{more}"


_REWARDS = {"name", "terms"}  # a reward by its name, or as a list
_UNION_TAGS = {"running_sum", "addition", "chain", "countdown", "requests", "code", "dataset", *LOSSES, *_REWARDS}


def _siblings(path: list[str]) -> list[str]:
    """The keys that are known beside the last part of an error's path."""
    model: Any = RunConfig
    options: list[type[BaseModel]] = []
    for part in path[:-1]:
        if part in model.model_fields:
            options = _models_in(model.model_fields[part].annotation)
            model = options[0] if options else model
        elif part in _UNION_TAGS:
            kinds = [m for m in options if "kind" in m.model_fields]  # a list of terms has none
            model = next((m for m in kinds if part in get_args(m.model_fields["kind"].annotation)), model)
    return list(model.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Every configuration model inside an annotation: ``X | None``, ``Annotated[A | B, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
