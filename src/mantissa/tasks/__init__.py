"""Prompts, verifiers and rewards: generated arithmetic, countdown and code, math datasets, grading with a guard."""

from mantissa.tasks.config import CodeConfig, DatasetConfig, RequestsConfig, TaskConfig
from mantissa.tasks.datasets import read_problems
from mantissa.tasks.functions import batched
from mantissa.tasks.registry import build_task
from mantissa.tasks.requests import Reviews, Script
from mantissa.tasks.rewards import verifier_named
from mantissa.tasks.sandbox.pool import Grader
from mantissa.tasks.types import Message, Problem, Reward, Task, Verifier

__all__ = [
    "CodeConfig", "DatasetConfig", "Grader", "Message", "Problem", "RequestsConfig", "Reviews", "Reward", "Script",
    "Task", "TaskConfig", "Verifier",
    "batched", "build_task", "read_problems", "verifier_named",
]  # fmt: skip
