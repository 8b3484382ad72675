"""From a task's configuration to the task."""

from __future__ import annotations

from typing import Any, assert_never

from mantissa.tasks.code import CodeTask, CodeVerifier
from mantissa.tasks.config import (
    AdditionConfig,
    ChainConfig,
    CodeConfig,
    CountdownConfig,
    DatasetConfig,
    RunningSumConfig,
    TaskConfig,
)
from mantissa.tasks.datasets import DatasetTask
from mantissa.tasks.generated import Addition, Chain, Countdown, GeneratedTask, RunningSum
from mantissa.tasks.rewards import verifier_named, weighted
from mantissa.tasks.types import Task


def build_task(config: TaskConfig, seed: int) -> Task:
    """The task that ``config`` describes; ``seed`` fixes its problems and splits. Datasets are read here.

    A ``reward`` that is a list replaces the task's verifier by its sum.
    Raises ``MantissaError`` for files that cannot be read.
    """
    task = _build(config, seed)
    if isinstance(task, GeneratedTask) and not isinstance(config, DatasetConfig):
        task.template = config.prompt_template
        if task.template is not None:
            task.alphabet = None  # it brings characters of its own
    if isinstance(config.reward, tuple):
        task.verifier = weighted(config.reward, task.verifier)
    return task


def _named(reward: object, default: str) -> Any:
    """The task's own kind of reward; where a list was given, the default, for whichever term is the task's own."""
    return reward if isinstance(reward, str) else default


def _build(config: TaskConfig, seed: int) -> Task:
    match config:
        case RunningSumConfig():
            return RunningSum(
                config.sizes,
                seed,
                config.min_digits,
                config.max_digits,
                config.modulus,
                _named(config.reward, "exact"),
                config.aligned,
            )
        case AdditionConfig():
            return Addition(config.sizes, seed, config.digits, _named(config.reward, "exact"))
        case ChainConfig():
            return Chain(config.sizes, seed, config.terms, _named(config.reward, "exact"))
        case CountdownConfig():
            return Countdown(
                config.sizes,
                seed,
                config.numbers,
                config.max_number,
                config.max_target,
                config.operations,
                config.style,
            )
        case CodeConfig():
            verifier = CodeVerifier(
                _named(config.reward, "all"), config.time_limit_s, config.memory_mib, config.isolation
            )
            return CodeTask(
                config.sizes,
                seed,
                config.variables,
                config.max_coefficient,
                config.product,
                config.style,
                verifier,
            )
        case DatasetConfig():
            return DatasetTask(
                config.files,
                seed,
                verifier_named(config.verifier or "math_verify"),
                config.heldout_files,
                config.heldout_fraction,
                config.row_schema,
                config.template,
                config.chat,
                config.on_bad_row,
                config.limit,
            )
        case _:
            assert_never(config)
