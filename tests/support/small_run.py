"""A run small enough for tests (27k parameters, seconds in all), and what such a run left, to be compared."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import yaml

from mantissa.rl import RunConfig, make_config
from mantissa.rl.config.run import apply_overrides
from mantissa.runs.directory import RunDirectory, deterministic

SMALL: dict[str, Any] = yaml.safe_load("""
name: small
steps: 4
device: cpu
precision: fp16
model:
  fresh: {hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, head_dim: 16, intermediate_size: 64, max_positions: 64}
  tokenizer: characters
task: {kind: running_sum, min_digits: 1, max_digits: 3, train_size: 200, heldout_size: 32, warm_start_size: 512}
warm_start: {steps: 40, batch: 32, lr: 0.003, evaluate_every: 20, problems: 16}
rollout: {prompts: 8, samples: 4, max_tokens: 6, slots: 16}
algorithm: {correction: token_tis}
optimizer: {lr: 0.001, updates_per_batch: 2}
evaluation: {every: 2, problems: 16, samples: 2}
checkpoint: {every: 2}
""")
QUICK = ("steps=2", "warm_start.steps=4", "warm_start.evaluate_every=4", "task.reward=prefix")
REPORT = "mantissa.rl.session.build_report"  # has tests of its own, and takes longer than these runs


def no_report(run: Any) -> Path:
    """In the place of ``build_report``."""
    path: Path = run.report_path
    return path


def recipe(*overrides: str) -> dict[str, Any]:
    """Plain values of the small run's recipe with ``key=value`` overrides; a fresh copy."""
    return apply_overrides(copy.deepcopy(SMALL), overrides)


def configure(*overrides: str) -> RunConfig:
    """The same, as a configuration."""
    return make_config(recipe(*overrides), "test")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """A run's metrics less what the clock says."""
    return [deterministic(row) for row in RunDirectory.open(path).metrics.read()]


def contents(folder: Path) -> dict[str, Any]:
    """Everything in a run's folder that must be equal to the last bit: rows less the clock's, and whole files."""
    run = RunDirectory.open(folder)
    files = [*folder.glob("checkpoints/*/*"), *folder.glob("policy/*"), *folder.glob("base/*")]
    files += [*folder.glob("adapter/*.safetensors"), folder / "config.yaml", *folder.glob("guard.json*")]
    return {
        "metrics": rows_of(folder),
        "warm start": run.warm_start.read(),
        "rollouts": {step: run.read_rollouts(step) for step in run.rollout_steps()},
        "fell back": run.environment.get("fell_back"),
        "leftovers": [str(path) for path in folder.rglob(".*.tmp")],
    } | {str(path.relative_to(folder)): path.read_bytes() for path in files}


def stopped(run: Path | str, step: int, to: Path) -> Path:
    """A copy of a finished run as if it had been stopped right after the checkpoint of ``step``."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("policy", "adapter", "run.lock"))
    for later in RunDirectory.open(to).checkpoint_steps():
        if later > step:
            shutil.rmtree(to / "checkpoints" / f"step-{later}")
    return to
