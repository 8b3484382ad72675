"""A run small enough for tests: 27k parameters, seconds from start to report."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mantissa.rl import make_config
from mantissa.rl.assemble import Parts, assemble
from mantissa.rl.config import RunConfig
from mantissa.rl.recipe import apply_overrides
from mantissa.rl.session import start
from mantissa.runs.directory import RunDirectory

SMALL: dict[str, Any] = {
    "name": "small",
    "steps": 4,
    "device": "cpu",
    "precision": "fp16",
    "model": {
        "fresh": {
            "hidden_size": 32,
            "layers": 2,
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 16,
            "intermediate_size": 64,
            "max_positions": 64,
        },
        "tokenizer": "characters",
    },
    "task": {
        "kind": "running_sum",
        "min_digits": 1,
        "max_digits": 3,
        "train_size": 200,
        "heldout_size": 32,
        "warm_start_size": 512,
    },
    "warm_start": {"steps": 40, "batch": 32, "lr": 3e-3, "evaluate_every": 20, "problems": 16},
    "rollout": {"prompts": 8, "samples": 4, "max_tokens": 6, "slots": 16},
    "algorithm": {"correction": "token_tis"},
    "optimizer": {"lr": 1e-3, "updates_per_batch": 2},
    "evaluation": {"every": 2, "problems": 16, "samples": 2},
    "checkpoint": {"every": 2},
}


@pytest.fixture
def with_report() -> None:
    """Asked for by tests that read the report."""


@pytest.fixture(autouse=True)
def _no_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has tests of its own, and takes longer than these runs."""
    if "with_report" not in request.fixturenames:
        monkeypatch.setattr("mantissa.rl.session.build_report", lambda run: run.report_path)


@pytest.fixture
def small() -> dict[str, Any]:
    """Plain values of a small run's recipe; a fresh copy."""
    return copy.deepcopy(SMALL)


@pytest.fixture
def configure(small: dict[str, Any]) -> Callable[..., RunConfig]:
    """The small recipe with ``key=value`` overrides, as a configuration."""
    return lambda *overrides: make_config(apply_overrides(small, overrides), "test")


@pytest.fixture
def parts_of() -> Iterator[Callable[[RunConfig], Parts]]:
    """Assembles the parts of a configuration; their processes end with the test."""
    made: list[Parts] = []

    def build(config: RunConfig) -> Parts:
        made.append(assemble(config))
        return made[-1]

    yield build
    for parts in made:
        parts.close()


@pytest.fixture
def train(configure: Callable[..., RunConfig], tmp_path: Path) -> Callable[..., RunDirectory]:
    """Runs the small recipe with overrides, from start to report; no trackers, which cost more than the run."""

    def run(*overrides: str) -> RunDirectory:
        folder = tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}"
        start(configure("trackers=[]", f"run_dir={folder}", *overrides))
        return RunDirectory.open(folder)

    return run
