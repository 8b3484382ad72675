"""What the integrations share: a missing library in one clear line, and a schedule that waits for the weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from mantissa.base.errors import MantissaError, pip_install


def require(library: str, extra: str) -> None:
    """Import ``library``; where it is not installed, ``MantissaError`` names the extra that brings it."""
    try:
        importlib.import_module(library)
    except ModuleNotFoundError as error:
        if not f"{library}.".startswith(f"{error.name}."):
            raise  # the library is there, and something that it needs is not
        raise MantissaError(
            f"{library.partition('.')[0]} is not installed; this integration needs it: {pip_install(extra)}"
        ) from None


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
