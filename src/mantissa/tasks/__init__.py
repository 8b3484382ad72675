"""Prompts, verifiers and rewards: generated arithmetic, countdown and code, math datasets, grading with a guard."""

from mantissa.tasks.config import CodeConfig, DatasetConfig, TaskConfig
from mantissa.tasks.datasets import DatasetTask, read_problems
from mantissa.tasks.functions import batched
from mantissa.tasks.registry import build_task
from mantissa.tasks.rewards import verifier_named
from mantissa.tasks.sandbox.pool import Grader, WorkerStartError
from mantissa.tasks.types import Message, Problem, Reward, SplitName, Task, Verifier

__all__ = [
    "CodeConfig", "DatasetConfig", "DatasetTask", "Grader", "Message", "Problem", "Reward", "SplitName", "Task",
    "TaskConfig", "Verifier", "WorkerStartError", "batched", "build_task", "read_problems", "verifier_named",
]  # fmt: skip
