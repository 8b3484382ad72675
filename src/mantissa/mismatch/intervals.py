"""A figure and the interval that says how well it is known. Numbers alone: nothing here needs torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure and an interval around it, both ends None where there is none; ``how``: in words, whence or why not."""

    value: float
    low: float | None
    high: float | None
    how: str = ""

    @property
    def interval(self) -> str:
        """``0.412 to 0.585``, or ``no interval``."""
        if self.low is None or self.high is None:
            return "no interval"
        return f"{self.low:.3f} to {self.high:.3f}"

    def fields(self, name: str, unit: str = "") -> dict[str, float | None]:
        """``name``, ``name_low`` and ``name_high`` of a row, each with ``unit`` at its end."""
        return {f"{name}{unit}": self.value, f"{name}_low{unit}": self.low, f"{name}_high{unit}": self.high}


def student_interval(value: float, error: float, freedom: int) -> tuple[float, float]:
    """value -+ t ``error``, t the quantile of Student's t at ``LEVEL`` with ``freedom`` degrees: 12.706 for one."""
    from scipy.special import stdtrit  # the whole of scipy.stats takes a second to import

    half = float(stdtrit(freedom, (1 + LEVEL) / 2)) * error
    return value - half, value + half


def jackknife_interval(value: float, without_U: NDArray[np.float64]) -> tuple[float, float]:
    """value +- t sqrt((U - 1) / U sum (x_u - mean x)^2), t of U - 1 degrees of freedom."""
    count = len(without_U)
    error = math.sqrt((count - 1) / count * float(np.square(without_U - without_U.mean()).sum()))
    return student_interval(value, error, count - 1)
