"""Evolution: programs improved against their tests, which run in the sandbox; a world model says which are worth it."""

from mantissa.evolution.archive import Archive, Candidate, parent_weights
from mantissa.evolution.loop import Evolution, EvolutionConfig, TaskResult
from mantissa.evolution.programs import Judge, Task, Verdict, read_tasks, shipped

__all__ = [
    "Archive",
    "Candidate",
    "Evolution",
    "EvolutionConfig",
    "Judge",
    "Task",
    "TaskResult",
    "Verdict",
    "parent_weights",
    "read_tasks",
    "shipped",
]
