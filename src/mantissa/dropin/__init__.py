"""For a training loop that is not ours, thin over ``training``: the trainer, and inside others' loops.

    from mantissa import PrecisionTrainer                   # your own loop: trainer.step(batch, loss_fn)
    from mantissa.dropin import MantissaPrecision           # Lightning: Trainer(plugins=[MantissaPrecision("fp16")])
    from mantissa.dropin import ScalerTelemetry             # transformers: Trainer(..., callbacks=[ScalerTelemetry()])
    from mantissa.dropin import MantissaTrainerMixin        # transformers: class Mine(MantissaTrainerMixin, Trainer)

Each library is an extra, imported when its class is asked for: ``pip install 'mantissa-rl[lightning]'``, and
``'mantissa-rl[accelerate]'``, which transformers' Trainer needs, too. Accelerate's own loop takes ``PrecisionTrainer``
as it is: ``examples/accelerate_loop.py``. ``compat`` has the names of an older FP16 trainer.

None of them scales, unscales, looks for overflow, repeats a window or clips by itself: that is ``RetryWindow`` over
``training``'s ``OptimizerStep``, as everywhere.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mantissa.dropin.trainer import PrecisionTrainer

if TYPE_CHECKING:
    from mantissa.dropin.huggingface import MantissaTrainerMixin, ScalerTelemetry
    from mantissa.dropin.lightning import MantissaPrecision

__all__ = ["MantissaPrecision", "MantissaTrainerMixin", "PrecisionTrainer", "ScalerTelemetry"]

_HOMES = {"MantissaPrecision": "lightning", "MantissaTrainerMixin": "huggingface", "ScalerTelemetry": "huggingface"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
