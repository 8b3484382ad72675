"""Evolution: programs improved against their tests, which run in the sandbox; a world model says which are worth it."""

from mantissa.genesis.evolution.archive import Archive, Candidate, parent_weights
from mantissa.genesis.evolution.loop import Evolution, EvolutionConfig, TaskResult
from mantissa.genesis.evolution.programs import Judge, ProgramResult, Task, read_tasks, shipped

__all__ = [
    "Archive",
    "Candidate",
    "Evolution",
    "EvolutionConfig",
    "Judge",
    "ProgramResult",
    "Task",
    "TaskResult",
    "parent_weights",
    "read_tasks",
    "shipped",
]
