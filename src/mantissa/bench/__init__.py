"""``mantissa bench``: training in each precision, timed and measured in turn, on a task whose best loss is known."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mantissa.bench.command import Result, run_bench
    from mantissa.bench.options import BenchConfig
    from mantissa.bench.rows import COLUMNS, Crossover, crossover
    from mantissa.bench.runner import Contender, RefusedError, Runner
    from mantissa.bench.workload import BEST_LOSS, ResidualMLP, Source, Workload, family_workload

_HOMES = {  # imported when asked for: the options of the command are to be had without torch
    "command": ["Result", "run_bench"],
    "options": ["BenchConfig"],
    "rows": ["COLUMNS", "Crossover", "crossover"],
    "runner": ["RefusedError", "Contender", "Runner"],
    "workload": ["BEST_LOSS", "ResidualMLP", "Source", "Workload", "family_workload"],
}
__all__ = [
    "BEST_LOSS",
    "COLUMNS",
    "BenchConfig",
    "Contender",
    "Crossover",
    "RefusedError",
    "ResidualMLP",
    "Result",
    "Runner",
    "Source",
    "Workload",
    "crossover",
    "family_workload",
    "run_bench",
]


def __getattr__(name: str) -> Any:
    for room, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"mantissa.bench.{room}"), name)
    raise AttributeError(f"module 'mantissa.bench' has no attribute {name!r}")
