"""The guard: thresholds as code at which a run leaves a low precision, its decisions and what it did about them."""

from mantissa.guard.config import GuardConfig, ReferenceRun
from mantissa.guard.log import GuardLog, GuardSettings, Judge, open_guard
from mantissa.guard.rules import ACTIONS, Decision, Guard, noteworthy, replay

__all__ = [
    "ACTIONS",
    "Decision",
    "Guard",
    "GuardConfig",
    "GuardLog",
    "GuardSettings",
    "Judge",
    "ReferenceRun",
    "noteworthy",
    "open_guard",
    "replay",
]
