"""Loss scaling: keep fp16 gradients inside the format by multiplying the loss by a power of two.

fp16 holds magnitudes from 2^-24 to 65504. Gradients of a mean loss lie mostly below; multiplied by a scale S they fit,
and dividing by S afterwards is exact. Too small an S flushes small gradients to zero, too large an S overflows to inf.
(Overflow means that scale x gradient left the format: the cure is always to *lower* the scale.) Three rules:

- ``dynamic``: S grows by ``growth_factor`` after ``growth_interval`` clean steps, shrinks by ``backoff_factor`` on
  overflow. The sequence of scales, steps and skips is that of ``torch.amp.GradScaler`` on the same gradients (with
  ``retries=0``). Differences: a floor, at which overflow is no longer a matter of scaling; and a default
  ``growth_interval`` of 400, because RL runs have 10^2 to 10^3 steps.
- ``auto``: S follows the observed range of the gradients (``auto_scale.AutoScaler``).
- a number: S never changes (``LossScaler.fixed``). A format that needs no scaling has ``LossScaler.disabled()``, which
  scales by 1: no branch anywhere else.

S is a Python float that always holds an fp32 value, as GradScaler's does: it multiplies an fp32 loss, so a wider S
would not be the S applied, and one above 3.4e38 would be inf. Factors that are not powers of two are allowed, rounded
to fp32 at each change, and inexact: the loss times S, and the gradient times 1/S, are then each off by a rounding
(2^-24 in fp32, half a unit in the last place of fp16 where the value passes through it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mantissa.bounds import BELOW_ONE, LARGEST_SIZE, SMALLEST_FLOAT, count, number
from mantissa.errors import MantissaError, nearest
from mantissa.precision import NumberFormat

_FP32 = torch.finfo(torch.float32)


@dataclass(frozen=True)
class ScalerConfig:
    """``initial``: the first scale. ``floor``: never lower. ``retries``: backward passes repeated on one batch."""

    initial: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 400
    floor: float = 1.0
    retries: int = 4

    def __post_init__(self) -> None:
        checks = (
            (number(self.floor, SMALLEST_FLOAT), f"floor={self.floor}: expected a positive number that fp32 holds"),
            (
                number(self.floor, SMALLEST_FLOAT) and number(self.initial, self.floor),
                f"initial={self.initial}: expected at least the floor, {self.floor}, and that fp32 holds it",
            ),
            (number(self.growth_factor, 1), f"growth_factor={self.growth_factor}: expected a number of at least 1"),
            (
                number(self.backoff_factor, SMALLEST_FLOAT, BELOW_ONE),
                f"backoff_factor={self.backoff_factor}: expected between 0 and 1",
            ),
            (
                number(self.growth_interval, 1, LARGEST_SIZE, whole=True),
                f"growth_interval={self.growth_interval}: expected a whole number, at least 1",
            ),
            (
                number(self.retries, 0, LARGEST_SIZE, whole=True),
                f"retries={self.retries}: expected a whole number, 0 or more",
            ),
        )
        for good, message in checks:
            if not good:
                raise MantissaError(f"loss scaling: {message}")


class LossScaler:
    """The scale and the dynamic rule. ``scale`` holds an fp32 value; ``clean_steps`` counts since it last changed."""

    def __init__(self, config: ScalerConfig | None = None) -> None:
        self.config = config or ScalerConfig()
        self.floor = as_fp32(self.config.floor)
        self.scale = as_fp32(self.config.initial)
        self.clean_steps = 0

    @classmethod
    def fixed(cls, scale: float) -> LossScaler:
        """A scaler whose scale never changes; see ``FixedScaler``."""
        return FixedScaler(scale)

    @classmethod
    def disabled(cls) -> LossScaler:
        """A scaler that scales by 1 and never changes: for formats with the exponent range of fp32."""
        return FixedScaler(1.0)

    @classmethod
    def for_format(cls, fmt: NumberFormat, config: ScalerConfig) -> LossScaler:
        """The scaler that ``fmt`` needs: dynamic for fp16, disabled for bf16 and fp32."""
        return LossScaler(config) if fmt.needs_loss_scaling else cls.disabled()

    @property
    def at_floor(self) -> bool:
        """True where the scale cannot be lowered: an overflow here is not a scaling problem."""
        return self.scale <= self.floor

    def overflowed(self) -> None:
        """Back off: scale x ``backoff_factor``, not below the floor."""
        self.scale = max(as_fp32(self.scale * self.config.backoff_factor), self.floor)
        self.clean_steps = 0

    def stepped(self, max_scaled_grad: float) -> None:
        """Count a clean step, and grow after ``growth_interval`` of them (never to inf).

        ``max_scaled_grad``: the largest finite |scale x gradient| of the step as a fraction of the format's largest
        value, 0..1 (dimensionless). The dynamic rule ignores it.
        """
        self.clean_steps += 1
        if self.clean_steps >= self.config.growth_interval:
            grown = as_fp32(self.scale * self.config.growth_factor)
            self.scale = grown if math.isfinite(grown) else self.scale
            self.clean_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the next scale, as JSON numbers (and, for ``auto``, a list of them)."""
        return {"scale": self.scale, "clean_steps": self.clean_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. A state saved by another rule gives its scale, and what both rules know."""
        self.scale, self.clean_steps = check_scale(state["scale"]), count(state["clean_steps"], "clean_steps")


class FixedScaler(LossScaler):
    """A scale that never changes. An overflow costs the step, and is reported as any other.

    Repeating the backward at the same scale would overflow again, so there are no retries: the step is skipped and
    training goes on. It does not go on for ever: after as many overflows in a row as a dynamic scaler would have
    needed to halve this scale down to 1 (ceil(log2 scale); none for scales up to 1), ``at_floor`` says that the
    problem is not one of scaling. Loading a state keeps the scale given here: the caller fixed it.
    """

    def __init__(self, scale: float) -> None:
        good = math.isfinite(scale) and _FP32.tiny <= scale <= _FP32.max
        if not good:
            raise MantissaError(
                f"a fixed loss scale of {scale}: expected a positive number that fp32 holds "
                f"({_FP32.tiny:.3g} to {_FP32.max:.3g}); 1024 is a common choice, 'dynamic' finds one"
            )
        scale = as_fp32(scale)
        super().__init__(ScalerConfig(initial=scale, growth_factor=1.0, floor=scale, retries=0))
        self.overflows_in_a_row = 0

    @property
    def at_floor(self) -> bool:
        return 2.0**self.overflows_in_a_row >= self.scale

    def overflowed(self) -> None:
        self.overflows_in_a_row += 1
        self.clean_steps = 0

    def stepped(self, max_scaled_grad: float) -> None:
        self.overflows_in_a_row = 0
        self.clean_steps += 1

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"overflows_in_a_row": self.overflows_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clean_steps = count(state["clean_steps"], "clean_steps")
        self.overflows_in_a_row = count(state.get("overflows_in_a_row", 0), "overflows_in_a_row")


def check_scale(scale: Any) -> float:
    """A saved scale: a positive number that fp32 holds."""
    if not number(scale, SMALLEST_FLOAT):
        raise MantissaError(f"loss scale {scale!r}: expected a positive number that fp32 holds; the state is damaged")
    return float(scale)


def as_fp32(scale: float) -> float:
    """The fp32 value nearest to ``scale``, as a Python float; inf beyond fp32's largest."""
    return float(torch.tensor(scale, dtype=torch.float32))


def scaler_for(scale: str | float | ScalerConfig, fmt: NumberFormat, retries: int | None = None) -> LossScaler:
    """The scaler that a user asked for, in the format that computes.

    ``scale``: "dynamic" (``ScalerConfig()``), "auto" (``AutoScaler``), a ``ScalerConfig`` (dynamic), or a number
    (fixed). The first three are disabled where ``fmt`` needs no scaling (bf16, fp32); a number is applied in any
    format, because it was asked for. A number that is not a power of two is allowed and inexact (see the module).
    ``retries``: replaces the configuration's; a fixed scale never retries. Raises ``MantissaError``.
    """
    from mantissa.training.auto_scale import AutoScaler  # here, because that module imports this one

    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        return LossScaler.fixed(scale)
    if not isinstance(scale, ScalerConfig) and scale not in ("dynamic", "auto"):
        hint = nearest(scale, ("dynamic", "auto")) if isinstance(scale, str) else ""
        raise MantissaError(
            f"loss scale {scale!r}: expected 'dynamic', 'auto', a positive number or a ScalerConfig{hint}"
        )
    config = scale if isinstance(scale, ScalerConfig) else ScalerConfig()
    if retries is not None:
        config = replace(config, retries=retries)
    if not fmt.needs_loss_scaling:
        return LossScaler.disabled()
    return AutoScaler(config) if scale == "auto" else LossScaler(config)
