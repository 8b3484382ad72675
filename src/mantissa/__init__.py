"""Mantissa: reinforcement learning of language models in the precision you choose for each role.

Importing this package is cheap: rooms are imported by name (``mantissa.precision``, ``mantissa.rollout``, ...), and the
drop-in's names (``from mantissa import PrecisionTrainer``) when they are first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mantissa.training import GuardConfig, PrecisionTrainer, distribute

__version__ = "0.1.0"
__all__ = ["GuardConfig", "PrecisionTrainer", "__version__", "distribute"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mantissa' has no attribute {name!r}")
    import mantissa.training

    return getattr(mantissa.training, name)
