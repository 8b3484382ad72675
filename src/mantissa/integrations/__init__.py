"""Mantissa inside other people's training loops: Lightning, Hugging Face's Trainer, Accelerate.

    from mantissa.integrations import MantissaPrecision      # Lightning: Trainer(plugins=[MantissaPrecision("fp16")])
    from mantissa.integrations import ScalerTelemetry        # transformers: Trainer(..., callbacks=[ScalerTelemetry()])
    from mantissa.integrations import MantissaTrainerMixin   # transformers: class Mine(MantissaTrainerMixin, Trainer)

Each library is an extra, imported when its class is asked for: ``pip install 'mantissa-rl[lightning]'``, and
``'mantissa-rl[accelerate]'``, which transformers' Trainer needs, too. Accelerate's own loop takes ``PrecisionTrainer``
as it is: ``examples/accelerate_loop.py``.

None of them scales, unscales, looks for overflow, repeats a window or clips by itself: that is ``training``'s
``RetryWindow`` over its ``OptimizerStep``, as everywhere.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mantissa.integrations.huggingface import MantissaTrainerMixin, ScalerTelemetry
    from mantissa.integrations.lightning import MantissaPrecision

__all__ = ["MantissaPrecision", "MantissaTrainerMixin", "ScalerTelemetry"]

_HOMES = {"MantissaPrecision": "lightning", "MantissaTrainerMixin": "huggingface", "ScalerTelemetry": "huggingface"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
