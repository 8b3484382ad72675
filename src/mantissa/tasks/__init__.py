"""Prompts, verifiers and rewards: generated arithmetic, countdown and code, math datasets, grading with a guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from mantissa.base.config import first_mistake
from mantissa.base.errors import MantissaError
from mantissa.tasks.code import CodeConfig, CodeTask
from mantissa.tasks.datasets import DatasetConfig, DatasetTask, read_problems
from mantissa.tasks.functions import batched
from mantissa.tasks.generated import (
    Addition,
    AdditionConfig,
    Chain,
    ChainConfig,
    Countdown,
    CountdownConfig,
    RunningSum,
    RunningSumConfig,
)
from mantissa.tasks.requests import Requests, RequestsConfig, Reviews, Script
from mantissa.tasks.rewards import verifier_named, weighted
from mantissa.tasks.sandbox.pool import Grader
from mantissa.tasks.types import Message, Problem, Reward, Task, Verifier

# The sections of a recipe, told apart by ``kind``, and what each builds.
TaskConfig = Annotated[
    RunningSumConfig | AdditionConfig | ChainConfig | CountdownConfig | RequestsConfig | CodeConfig | DatasetConfig,
    Field(discriminator="kind"),
]
_SECTION: TypeAdapter[TaskConfig] = TypeAdapter(TaskConfig)
TASKS: dict[str, Callable[[Any, int], Task]] = {
    "running_sum": RunningSum,
    "addition": Addition,
    "chain": Chain,
    "countdown": Countdown,
    "requests": Requests,
    "code": CodeTask,
    "dataset": DatasetTask,
}


def build_task(config: TaskConfig | Mapping[str, Any], seed: int) -> Task:
    """The task that ``config`` describes: a recipe's section, or its plain values.

    ``seed`` fixes its problems and splits. Datasets are read here. A ``reward`` that is a list replaces the task's
    verifier by its sum. Raises ``MantissaError`` for files that cannot be read.
    """
    if isinstance(config, Mapping):
        try:
            config = _SECTION.validate_python(dict(config))
        except ValidationError as error:
            where, text, first = first_mistake(error, ())
            raise MantissaError(f"task: {where}: {text}, got {first['input']!r}") from None
    task = TASKS[config.kind](config, seed)
    if isinstance(config.reward, tuple):
        task.verifier = weighted(config.reward, task.verifier)
    return task


__all__ = [
    "TASKS", "CodeConfig", "DatasetConfig", "DatasetTask", "Grader", "Message", "Problem", "RequestsConfig", "Reviews",
    "Reward", "Script", "Task", "TaskConfig", "Verifier",
    "batched", "build_task", "read_problems", "verifier_named",
]  # fmt: skip
