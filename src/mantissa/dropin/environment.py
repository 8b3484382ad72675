"""The environment variables of a known FP16 training utility, and the configuration that they describe.

What the process's own environment does not say, a ``.env`` file in the working directory may.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import TypeAdapter, ValidationError

from mantissa.base.bounds import BELOW_ONE, LARGEST_SIZE, SMALLEST_FLOAT, boundary, check_values, number, regular_file
from mantissa.base.errors import MantissaError
from mantissa.training.scaler import ScalerConfig

_LARGEST_DOTENV = 2**20
_SWITCH = "ENABLE_FP16_TRAINING"
# Environment variable -> field of the configuration: what ``from_environment`` reads, and what the docs show.
ENVIRONMENT = {
    _SWITCH: "enabled",
    "FP16_LOSS_SCALE": "loss_scale",
    "FP16_GROWTH_FACTOR": "growth_factor",
    "FP16_BACKOFF_FACTOR": "backoff_factor",
    "FP16_GROWTH_INTERVAL": "growth_interval",
}
_EXPECTED = {
    bool: "true or false (or 1, 0, yes, no, on, off)",
    int: "a whole number, or auto",
    float: "a number",
}


class FP16Config:
    """What the two configurations share: their environment, their checks and the scaling rule they describe."""

    enabled: bool
    loss_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int | Literal["auto"]
    max_grad_norm: float | None
    adaptive_clip: float | None

    def __post_init__(self) -> None:
        """Refuse what makes no sense now, not at the first step."""
        bound, clip, counted = self.max_grad_norm, self.adaptive_clip, "a whole number from 1 on"
        interval, auto = self.growth_interval, self.growth_interval == "auto"
        check_values(type(self).__name__, vars(self), {
            "enabled": (isinstance(self.enabled, bool), "True or False"),
            "loss_scale": (number(self.loss_scale, SMALLEST_FLOAT), "a finite number above 0"),
            "growth_factor": (number(self.growth_factor, 1), "a finite number, 1 or more"),
            "backoff_factor": (number(self.backoff_factor, SMALLEST_FLOAT, BELOW_ONE),
                               "between 0 and 1: an overflow lowers the scale"),
            "growth_interval": (auto or number(interval, 1, LARGEST_SIZE, whole=True), f"{counted}, or 'auto'"),
            "gradient_accumulation_steps": (number(self.accumulate, 1, LARGEST_SIZE, whole=True), counted),
            "max_grad_norm": (bound is None or number(bound, 0, math.inf), "0 or more, or None"),
            "adaptive_clip": (clip is None or number(clip, SMALLEST_FLOAT), "more than 0, or None"),
        })  # fmt: skip
        for name in ("loss_scale", "growth_factor", "backoff_factor"):
            if auto and getattr(self, name) != getattr(type(self), name):
                raise MantissaError(
                    f"{type(self).__name__}: {name} does nothing with growth_interval='auto', where the scale follows "
                    "the gradients' observed range; leave it out"
                )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **fields: Any) -> Self:
        """The configuration with every variable of ``ENVIRONMENT`` that is set; ``fields`` come first.

        ``environment``: by default that of the process, now, and below it a ``.env`` file's. A value that makes no
        sense is a ``MantissaError`` that names the variable.
        """
        environment = current_environment() if environment is None else environment
        types = {each.name: type(each.default) for each in dataclasses.fields(FP16TrainingConfig)}
        found = {v: name for v, name in ENVIRONMENT.items() if v in environment and name not in fields}
        for variable, name in found.items():
            fields[name] = _parsed(variable, environment[variable], types[name])
        try:
            return cls(**fields)
        except MantissaError as error:
            given = ", ".join(f"{variable}={environment[variable]!r}" for variable in found)
            raise MantissaError(f"{error} (the environment says {given})" if given else str(error)) from None

    @property
    def number_format(self) -> str:
        """The format that is asked for."""
        return "fp16" if self.enabled else "fp32"

    @property
    def accumulate(self) -> int:
        """Batches to an optimiser step."""
        return 1

    @property
    def scale(self) -> ScalerConfig | Literal["auto"]:
        """The scaling rule that these numbers mean, as ``PrecisionTrainer`` takes it."""
        if self.growth_interval == "auto":
            return "auto"
        return ScalerConfig(
            initial=self.loss_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            floor=min(1.0, self.loss_scale),
        )


@dataclass(frozen=True)
class FP16TrainingConfig(FP16Config):
    """``enabled``: fp16, else fp32. ``loss_scale``: the first scale; the other three are the dynamic rule, or with
    ``growth_interval="auto"`` the scale follows the gradients' observed range (``mantissa.training.AutoScaler``).

    ``max_grad_norm``: bound on the unscaled gradient's norm; None and 0 never clip. ``adaptive_clip``, ``backend`` and
    ``fallback``: as ``PrecisionTrainer``. A device without fp16 arithmetic computes in fp32, with a warning, as in the
    older utility: that is every CPU, unless ``backend="simulated"`` is given; ``fallback="error"`` refuses instead.
    """

    enabled: bool = True
    loss_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int | Literal["auto"] = 2000
    max_grad_norm: float | None = field(default=1.0, kw_only=True)
    adaptive_clip: float | None = field(default=None, kw_only=True)
    backend: Literal["auto", "native", "simulated"] = field(default="auto", kw_only=True)
    fallback: Literal["error", "warn"] = field(default="warn", kw_only=True)


def switch(environment: Mapping[str, str] | None = None) -> bool | None:
    """What ``ENABLE_FP16_TRAINING`` says; None where nothing sets it."""
    text = (current_environment() if environment is None else environment).get(_SWITCH)
    return None if text is None else bool(_parsed(_SWITCH, text, bool))


def switched_off() -> bool:
    """Whether ``ENABLE_FP16_TRAINING`` says no: then fp32 stands in for fp16, whatever a configuration says."""
    return switch() is False


def _parsed(variable: str, text: str, kind: type) -> Any:
    if ENVIRONMENT[variable] == "growth_interval" and text.strip() == "auto":
        return "auto"
    try:
        return TypeAdapter(kind).validate_python(text.strip())
    except ValidationError:
        raise MantissaError(f"{variable}={text!r}: expected {_EXPECTED[kind]}") from None


def current_environment() -> dict[str, str]:
    """The variables of ``ENVIRONMENT``: the process's own, and where it has none those of ``.env`` in this folder.

    Its lines are ``KEY=value``, or ``export KEY=value``; a value may be quoted, and what stands behind `` #`` is a
    comment. Other lines, and variables that are not ours, are passed over. ``MantissaError`` for a file that cannot be
    read.
    """
    own = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    path = Path(".env")
    with boundary(".env", "mend it, or set the variables in the environment"):
        if not regular_file(path) or path.stat().st_size > _LARGEST_DOTENV:
            return own
        text = path.read_text("utf-8-sig")
    return dict(match for line in text.splitlines() if (match := _assigned(line)) is not None) | own


def _assigned(line: str) -> tuple[str, str] | None:
    """The variable of ours that a line of ``.env`` sets, and its value; None where it sets none."""
    key, equals, value = line.strip().partition("=")
    name = key.removeprefix("export ").strip()
    if not equals or name not in ENVIRONMENT:
        return None
    value = value.strip()
    if value[:1] in ("'", '"'):
        inside, closed, _ = value[1:].partition(value[0])
        if not closed:
            raise MantissaError(f".env: {name} has a quote that nothing closes; close it")
        return name, inside
    return name, re.split(r"(?:^|\s)#", value, maxsplit=1)[0].rstrip()
