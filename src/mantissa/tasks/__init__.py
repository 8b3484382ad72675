"""Prompts, verifiers and rewards: generated arithmetic, countdown and code, math datasets, grading with a guard."""

from mantissa.tasks.config import CodeConfig, DatasetConfig, TaskConfig
from mantissa.tasks.datasets import read_problems
from mantissa.tasks.functions import batched
from mantissa.tasks.registry import build_task
from mantissa.tasks.rewards import verifier_named
from mantissa.tasks.sandbox.pool import Grader
from mantissa.tasks.types import Message, Problem, Reward, Task, Verifier

__all__ = [
    "CodeConfig", "DatasetConfig", "Grader", "Message", "Problem", "Reward", "Task", "TaskConfig", "Verifier",
    "batched", "build_task", "read_problems", "verifier_named",
]  # fmt: skip
