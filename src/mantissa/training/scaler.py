"""Dynamic loss scaling: keep fp16 gradients inside the format by multiplying the loss by a power of two.

fp16 holds magnitudes from 2^-24 to 65504. Gradients of a mean loss lie mostly below; multiplied by a scale S they fit,
and dividing by S afterwards is exact. Too small an S flushes small gradients to zero, too large an S overflows to inf:
so S grows by ``growth_factor`` after ``growth_interval`` clean steps and shrinks by ``backoff_factor`` on overflow.
(Overflow means that scale x gradient left the format: the cure is always to *lower* the scale.)

The sequence of scales is that of ``torch.amp.GradScaler`` on the same overflows. Differences: a floor, at which
overflow is no longer a matter of scaling; and a default ``growth_interval`` of 400, because RL runs have 10^2 to 10^3
steps.

A format that needs no scaling gets ``LossScaler.disabled()``, a scaler that scales by 1: no branch anywhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mantissa.errors import MantissaError
from mantissa.precision import NumberFormat


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
            (self.floor > 0 and self.initial >= self.floor, f"initial={self.initial}: expected at least {self.floor}"),
            (self.growth_factor >= 1, f"growth_factor={self.growth_factor}: expected at least 1"),
            (0 < self.backoff_factor < 1, f"backoff_factor={self.backoff_factor}: expected between 0 and 1"),
            (self.growth_interval >= 1, f"growth_interval={self.growth_interval}: expected at least 1"),
            (self.retries >= 0, f"retries={self.retries}: expected 0 or more"),
        )
        for good, message in checks:
            if not good:
                raise MantissaError(f"loss scaling: {message}")


class LossScaler:
    """The scale and its rule. ``scale`` is a float; ``clean_steps`` counts steps since it last changed."""

    def __init__(self, config: ScalerConfig | None = None) -> None:
        self.config = config or ScalerConfig()
        self.scale = self.config.initial
        self.clean_steps = 0

    @classmethod
    def disabled(cls) -> LossScaler:
        """A scaler that scales by 1 and never changes: for formats with the exponent range of fp32."""
        return cls(ScalerConfig(initial=1.0, growth_factor=1.0, floor=1.0, retries=0))

    @classmethod
    def for_format(cls, fmt: NumberFormat, config: ScalerConfig) -> LossScaler:
        """The scaler that ``fmt`` needs: dynamic for fp16, disabled for bf16 and fp32."""
        return cls(config) if fmt.needs_loss_scaling else cls.disabled()

    @property
    def at_floor(self) -> bool:
        """True where the scale cannot be lowered: an overflow here is not a scaling problem."""
        return self.scale <= self.config.floor

    def overflowed(self) -> None:
        """Back off: scale x ``backoff_factor``, not below the floor."""
        self.scale = max(self.scale * self.config.backoff_factor, self.config.floor)
        self.clean_steps = 0

    def stepped(self) -> None:
        """Count a clean step, and grow after ``growth_interval`` of them (never to inf)."""
        self.clean_steps += 1
        if self.clean_steps >= self.config.growth_interval:
            grown = self.scale * self.config.growth_factor
            self.scale = grown if math.isfinite(grown) else self.scale
            self.clean_steps = 0

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self.scale, "clean_steps": self.clean_steps}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.scale, self.clean_steps = float(state["scale"]), int(state["clean_steps"])
