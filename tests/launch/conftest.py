"""A recipe that every engine of verl takes, and what becomes of it with sections replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from mantissa.launch import LaunchOptions, Plan
from mantissa.launch.export import export
from mantissa.rl import RunConfig, make_config
from mantissa.rl.config.run import apply_overrides

RECIPE: dict[str, Any] = {
    "name": "launched",
    "steps": 10,
    "precision": "bf16",
    "model": {"path": "Qwen/Qwen3-8B"},
    "task": {"kind": "dataset", "files": "dapo.parquet", "heldout_files": "aime.parquet", "verifier": "dapo"},
    "rollout": {"prompts": 32, "samples": 8, "max_tokens": 1024},
    "algorithm": {"advantage": "grpo", "loss": "ppo_clip", "correction": "token_tis"},
    "optimizer": {"lr": 1e-6, "updates_per_batch": 4, "micro_batch_tokens": 16384},
}
CAPABLE: dict[str, Any] = {"hardware": "h100", "cuda": "12.9"}


@pytest.fixture
def recipe() -> Callable[..., RunConfig]:
    """The recipe with ``key=value`` applied."""

    def made(*overrides: str) -> RunConfig:
        return make_config(apply_overrides(copy.deepcopy(RECIPE), overrides), "test")

    return made


@pytest.fixture
def planned(recipe: Callable[..., RunConfig]) -> Callable[..., Plan]:
    """The plan for the recipe with ``key=value`` applied, on H100s with CUDA 12.9 unless options say otherwise."""

    def made(*overrides: str, **options: Any) -> Plan:
        return export(recipe(*overrides), LaunchOptions(**(CAPABLE | options)))

    return made


@pytest.fixture
def values(planned: Callable[..., Plan]) -> Callable[..., dict[str, Any]]:
    """That plan's overrides, value by key."""

    def made(*overrides: str, **options: Any) -> dict[str, Any]:
        return {
            one.key.removeprefix("actor_rollout_ref."): one.value for one in planned(*overrides, **options).overrides
        }

    return made
