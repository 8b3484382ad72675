"""From a task's configuration to the task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mantissa.tasks.code import CodeTask
from mantissa.tasks.config import TaskConfig
from mantissa.tasks.datasets import DatasetTask
from mantissa.tasks.generated import Addition, Chain, Countdown, RunningSum
from mantissa.tasks.requests import Requests
from mantissa.tasks.rewards import weighted
from mantissa.tasks.types import Task

TASKS: dict[str, Callable[[Any, int], Task]] = {
    "running_sum": RunningSum,
    "addition": Addition,
    "chain": Chain,
    "countdown": Countdown,
    "requests": Requests,
    "code": CodeTask,
    "dataset": DatasetTask,
}


def build_task(config: TaskConfig, seed: int) -> Task:
    """The task that ``config`` describes; ``seed`` fixes its problems and splits. Datasets are read here.

    A ``reward`` that is a list replaces the task's verifier by its sum.
    Raises ``MantissaError`` for files that cannot be read.
    """
    task = TASKS[config.kind](config, seed)
    if isinstance(config.reward, tuple):
        task.verifier = weighted(config.reward, task.verifier)
    return task
