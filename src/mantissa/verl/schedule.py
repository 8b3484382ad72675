"""verl's learning rates, as functions of its own count of steps.

verl moves the schedule once a step of its trainer, whatever the number of updates in it, and whether they were applied
or not; so a rate is a function of that count, and not of the updates. Both rise linearly from 0 in ``warmup`` steps:
the rate of a warm-up's first step is 0. Formulas of verl's ``get_constant_schedule_with_warmup`` and
``get_cosine_schedule_with_warmup`` (0.9.1), with which a test compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from mantissa.base.errors import MantissaError


@dataclass(frozen=True)
class Schedule:
    """``lr`` times a factor that ``factor`` gives. ``total``: steps of the job, of which ``warmup`` rise."""

    lr: float
    kind: Literal["constant", "cosine"] = "constant"
    warmup: int = 0
    total: int = -1
    least: float = 0.0
    cycles: float = 0.5
    from_zero: bool = True

    @classmethod
    def of(cls, optim: Any) -> Schedule:
        """From verl's section ``actor.optim``. ``MantissaError``: a cosine without an end, or an unknown kind."""
        kind, total, warmup = optim.lr_scheduler_type, int(optim.total_training_steps), optim.lr_warmup_steps
        if kind not in ("constant", "cosine"):
            raise MantissaError(f"actor.optim.lr_scheduler_type={kind}: expected constant or cosine")
        if warmup is None or warmup <= 0:
            warmup = int(optim.lr_warmup_steps_ratio * total)
        if kind == "cosine" and total < 1:
            raise MantissaError(
                f"actor.optim.lr_scheduler_type=cosine with total_training_steps={total}: a cosine needs its end; set "
                "trainer.total_training_steps"
            )
        least = optim.min_lr_ratio or 0.0
        if not 0 <= least <= 1:
            raise MantissaError(f"actor.optim.min_lr_ratio={least}: expected 0 to 1")
        return cls(optim.lr, kind, max(int(warmup), 0), total, least, optim.num_cycles, optim.zero_indexed_step)

    def factor(self, step: int) -> float:
        """What the rate of trainer step ``step`` (0 for the first) is multiplied by."""
        if self.kind == "constant":
            return step / max(1.0, self.warmup) if step < self.warmup else 1.0
        if not self.from_zero:
            step += 1
        if step < self.warmup:
            return step / max(1, self.warmup)
        progress = (step - self.warmup) / max(1, self.total - self.warmup)
        wave = math.cos(math.pi * self.cycles * 2.0 * progress)
        return max(self.least, wave * (1 - self.least) * 0.5 + (1 + self.least) * 0.5)

    def rate(self, step: int) -> float:
        """The learning rate of trainer step ``step``."""
        return self.lr * self.factor(step)
