"""``mantissa bench``: training in each precision, timed and measured in turn, on a task whose best loss is known."""

from mantissa.bench.command import BenchConfig, Result, run_bench
from mantissa.bench.rows import COLUMNS, Crossover, crossover
from mantissa.bench.runner import RefusedError, Request, Runner
from mantissa.bench.workload import BEST_LOSS, ResidualMLP, Source, Workload, family_workload

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
    "Workload",
    "crossover",
    "family_workload",
    "run_bench",
]
