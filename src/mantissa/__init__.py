"""Mantissa: reinforcement learning of language models in the precision you choose for each role.

Importing this package is cheap: rooms are imported by name (``mantissa.precision``, ``mantissa.rollout``, ...), and the
drop-in's names (``from mantissa import PrecisionTrainer``) when they are first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mantissa.dropin import GuardConfig, PrecisionTrainer
    from mantissa.training import distribute

__version__ = "0.1.0"
__all__ = ["GuardConfig", "PrecisionTrainer", "__version__", "distribute"]


_HOMES = {"GuardConfig": "mantissa.dropin", "PrecisionTrainer": "mantissa.dropin", "distribute": "mantissa.training"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mantissa' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
