"""Mantissa inside other people's training loops: Lightning, Hugging Face's Trainer, Accelerate.

    from mantissa.integrations import MantissaPrecision      # Lightning: Trainer(plugins=[MantissaPrecision("fp16")])
    from mantissa.integrations import ScalerTelemetry        # transformers: Trainer(..., callbacks=[ScalerTelemetry()])
    from mantissa.integrations import MantissaTrainerMixin   # transformers: class Mine(MantissaTrainerMixin, Trainer)

Each library is an extra, imported when its class is asked for: ``pip install 'mantissa[lightning]'`` and
``'mantissa[accelerate]'`` (which transformers' Trainer needs, too). Accelerate's own loop takes ``PrecisionTrainer`` as
it is: ``examples/accelerate_loop.py``.

None of them scales, unscales, looks for overflow, repeats a window or clips by itself: that is ``training``'s
``RetryWindow`` over its ``OptimizerStep``, as everywhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mantissa.errors import MantissaError

if TYPE_CHECKING:
    from mantissa.integrations.huggingface import MantissaTrainerMixin, ScalerTelemetry
    from mantissa.integrations.lightning import MantissaPrecision

__all__ = ["MantissaPrecision", "MantissaTrainerMixin", "ScalerTelemetry"]

_HOMES = {"MantissaPrecision": "lightning", "MantissaTrainerMixin": "huggingface", "ScalerTelemetry": "huggingface"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def require(library: str, extra: str) -> None:
    """Import ``library``; where it is not installed, ``MantissaError`` names the extra that brings it."""
    try:
        importlib.import_module(library)
    except ModuleNotFoundError as error:
        if not f"{library}.".startswith(f"{error.name}."):
            raise  # the library is there, and something that it needs is not
        raise MantissaError(
            f"{library.partition('.')[0]} is not installed; this integration needs it: pip install 'mantissa[{extra}]'"
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
