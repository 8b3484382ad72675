"""From a task's configuration to the task."""

from __future__ import annotations

from typing import assert_never

from mantissa.tasks.arithmetic import Addition, Chain, RunningSum
from mantissa.tasks.config import (
    AdditionConfig,
    ChainConfig,
    CountdownConfig,
    DatasetConfig,
    RunningSumConfig,
    TaskConfig,
)
from mantissa.tasks.countdown import Countdown
from mantissa.tasks.datasets import DatasetTask
from mantissa.tasks.types import Task
from mantissa.tasks.verifiers import verifier_named


def build_task(config: TaskConfig, seed: int) -> Task:
    """The task that ``config`` describes; ``seed`` fixes its problems and splits. Datasets are read here.

    Raises ``MantissaError`` for files that cannot be read.
    """
    match config:
        case RunningSumConfig():
            return RunningSum(
                config.sizes,
                seed,
                config.min_digits,
                config.max_digits,
                config.modulus,
                config.reward,
                config.aligned,
            )
        case AdditionConfig():
            return Addition(config.sizes, seed, config.digits, config.reward)
        case ChainConfig():
            return Chain(config.sizes, seed, config.terms, config.reward)
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
        case DatasetConfig():
            return DatasetTask(
                config.files,
                seed,
                verifier_named(config.verifier),
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
