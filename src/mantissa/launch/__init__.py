"""The same recipe on a cluster: verl's configuration, submitted as a Ray job, and what other people's overrides do.

Each name is imported when it is asked for: what checks a script needs neither torch nor recipes. ``export`` is the
module of that name, whose function it is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mantissa.launch.check import Report, check_verl
    from mantissa.launch.export import Plan
    from mantissa.launch.options import LaunchOptions, launch_file, load_options

__all__ = ["LaunchOptions", "Plan", "Report", "check_verl", "launch_file", "load_options"]

_HOMES = {"Plan": "export", "Report": "check", "check_verl": "check"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'options')}"), name)
