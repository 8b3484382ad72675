"""Prompts, verifiers and rewards: generated arithmetic, countdown and code, math datasets, grading with a guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from mantissa.base.config import first_mistake
from mantissa.base.errors import MantissaError
from mantissa.tasks.code import CodeConfig, CodeTask
from mantissa.tasks.datasets import DatasetConfig, DatasetTask
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
from mantissa.tasks.sandbox.pool import Pool
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


class Grader:
    """Grades lists of (problem, completion) with a verifier. A context manager; not for use by two threads.

    A verifier that cannot hang is asked here, in line; another in worker processes (``sandbox/pool.py``), which end
    with ``close``, with the Grader, at exit, and by themselves where this process is killed.
    ``timeout_s``: wall-clock seconds for one call of theirs: one sample, or one batch of a batched verifier.
    ``workers``: processes at most. ``memory_gib``: address space of each.
    """

    def __init__(self, verifier: Verifier, timeout_s: float = 10.0, workers: int = 2, memory_gib: float = 4.0):
        if not timeout_s > 0 or workers < 1:
            raise MantissaError(
                f"grader: timeout_s={timeout_s}, workers={workers}: expected more than 0 and at least 1"
            )
        self._verifier = verifier
        self._pool = Pool(verifier, timeout_s, workers, memory_gib) if verifier.isolated else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the verifier says of its guards, once a worker has started."""
        return () if self._pool is None else self._pool.notes

    def start(self) -> None:
        """Start one worker now, where there will be any, so that a mistake shows before a run begins.

        Raises ``MantissaError`` for a user's mistake, ``WorkerStartError`` for any other reason not to start.
        """
        if self._pool is not None:
            self._pool.grade([])

    def grade(self, samples: Sequence[tuple[Problem, str]]) -> list[Reward]:
        """One reward for each sample, in order. ``Reward.error`` says where the verifier failed, and how."""
        if self._pool is not None:
            return self._pool.grade(samples) if samples else []
        replies = [self._verifier.tried(*sample) for sample in samples]
        return [reply if isinstance(reply, Reward) else self._verifier.failed(reply) for reply in replies]

    def close(self) -> None:
        """End the worker processes. Safe to call twice."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


__all__ = [
    "TASKS", "CodeConfig", "DatasetConfig", "DatasetTask", "Grader", "Message", "Problem", "RequestsConfig", "Reviews",
    "Reward", "Script", "Task", "TaskConfig", "Verifier",
    "batched", "build_task", "verifier_named",
]  # fmt: skip
