"""A learning-rate schedule that waits while optimiser steps are given up, for loops that step it regardless."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class HeldScheduler:
    """``scheduler``, except that ``step`` does nothing while ``applied()`` is False: where the optimiser step before it
    was given up, the weights have not moved, so neither does the rate. Everything else is the scheduler's own."""

    def __init__(self, scheduler: Any, applied: Callable[[], bool]) -> None:
        self.scheduler = scheduler
        self._applied = applied

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self._applied():
            self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # asked for before __init__, as copying does
            raise AttributeError(name)
        return getattr(self.scheduler, name)
