"""``mantissa bench``: training in each precision, timed and measured in turn, on a task whose best loss is known."""

from mantissa.bench.command import BenchConfig, Result, run_bench
from mantissa.bench.family import BEST_LOSS, ResidualMLP, family_workload
from mantissa.bench.rows import COLUMNS
from mantissa.bench.runner import RefusedError, Request, Runner
from mantissa.bench.timing import Crossover, Spread, crossover
from mantissa.bench.workload import Source, Workload

__all__ = [
    "BEST_LOSS",
    "COLUMNS",
    "BenchConfig",
    "Crossover",
    "RefusedError",
    "Request",
    "ResidualMLP",
    "Result",
    "Runner",
    "Source",
    "Spread",
    "Workload",
    "crossover",
    "family_workload",
    "run_bench",
]
