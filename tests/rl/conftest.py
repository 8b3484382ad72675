"""The small run: its configuration, its parts, and whole runs, of which those that nobody changes are shared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import small_run
from mantissa.kernels import ExactPlan, plan_exact
from mantissa.rl import RunConfig, start
from mantissa.rl import assemble as building
from mantissa.rl.assemble import Parts, assemble
from mantissa.runs.directory import RunDirectory


@pytest.fixture
def with_report() -> None:
    """Asked for by tests that read the report."""


@pytest.fixture(autouse=True)
def _no_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "with_report" not in request.fixturenames:
        monkeypatch.setattr(small_run.REPORT, small_run.no_report)


@pytest.fixture(autouse=True)
def _one_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact kernels are planned once for each shape: a plan has tests of its own, and takes longer than these runs."""
    monkeypatch.setattr(building, "plan_exact", lambda *given: _planned(torch.get_num_threads(), *given))


@functools.cache
def _planned(threads: int, *given: Any) -> ExactPlan:
    return plan_exact(*given)


@pytest.fixture
def small() -> dict[str, Any]:
    """Plain values of a small run's recipe; a fresh copy."""
    return small_run.recipe()


@pytest.fixture(scope="session")
def configure() -> Callable[..., RunConfig]:
    """The small recipe with ``key=value`` overrides, as a configuration."""
    return small_run.configure


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
def made(parts_of: Callable[[RunConfig], Parts]) -> Callable[..., Parts]:
    """Parts of the small recipe whose weights have opinions, in the engine, and in the reference where there is one."""

    def build(*overrides: str) -> Parts:
        parts = parts_of(small_run.configure("model.fresh.initializer_range=0.2", *overrides))
        parts.sampler.engine.sync(parts.learner.weights, 0)
        if parts.reference is not None and parts.reference.teacher is None:
            parts.reference.take(parts.learner.weights, 0)
        return parts

    return build


def _run(folder: Path, *overrides: str) -> RunDirectory:
    """From start to end; no trackers, which cost more than the run."""
    start(small_run.configure("trackers=[]", f"run_dir={folder}", *overrides))
    return RunDirectory.open(folder)


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., RunDirectory]:
    """Runs the small recipe with overrides; the n-th run of a test is in ``tmp_path / "run-<n>"``."""
    return lambda *overrides: _run(tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}", *overrides)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunDirectory]:
    """A finished run of these overrides, made when it is first asked for. To be read, or copied, and never changed."""
    runs: dict[tuple[str, ...], RunDirectory] = {}

    def run(*overrides: str) -> RunDirectory:
        if overrides not in runs:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(small_run.REPORT, small_run.no_report)
                runs[overrides] = _run(tmp_path_factory.mktemp("finished") / "run", *overrides)
        return runs[overrides]

    return run
