"""Prompts, verifiers and rewards: generated arithmetic, countdown and code, math datasets, grading with a guard."""

from mantissa.tasks.config import (
    AdditionConfig,
    ChainConfig,
    CodeConfig,
    CountdownConfig,
    DatasetConfig,
    RewardTerm,
    RunningSumConfig,
    TaskConfig,
)
from mantissa.tasks.dapo_data import Preparation, prepare_dapo
from mantissa.tasks.datasets import DatasetSummary, DatasetTask, read_problems
from mantissa.tasks.functions import batched
from mantissa.tasks.registry import build_task
from mantissa.tasks.rewards import VERIFIERS, verifier_named
from mantissa.tasks.sandbox.pool import Grader, WorkerStartError
from mantissa.tasks.types import Message, Problem, Reward, SplitName, Task, Verifier

__all__ = [
    "VERIFIERS",
    "AdditionConfig",
    "ChainConfig",
    "CodeConfig",
    "CountdownConfig",
    "DatasetConfig",
    "DatasetSummary",
    "DatasetTask",
    "Grader",
    "Message",
    "Preparation",
    "Problem",
    "Reward",
    "RewardTerm",
    "RunningSumConfig",
    "SplitName",
    "Task",
    "TaskConfig",
    "Verifier",
    "WorkerStartError",
    "batched",
    "build_task",
    "prepare_dapo",
    "read_problems",
    "verifier_named",
]
