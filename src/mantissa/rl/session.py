"""Starting and resuming a run: what surrounds the loop. The command line is a thin layer over these two functions."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mantissa.errors import StoppedError
from mantissa.rl.assemble import Parts, assemble
from mantissa.rl.config import RunConfig
from mantissa.rl.loop import Loop
from mantissa.rl.recipe import make_config
from mantissa.runs.directory import RunDirectory, default_path
from mantissa.runs.environment import environment
from mantissa.runs.live import Live
from mantissa.runs.report import build_report
from mantissa.runs.trackers import from_names


def start(config: RunConfig) -> Path:
    """Run ``config`` from its beginning in a new folder; returns the path of its report."""
    parts = assemble(config)
    try:
        path = config.run_dir or default_path(config.name)
        plain = config.model_dump(mode="json", exclude={"run_dir"})
        run = RunDirectory.create(path, plain, _environment(parts))
        with run, _resumable(run):
            return _go(config, parts, run, resumed=False)
    finally:
        parts.close()


def resume(path: str | Path) -> Path:
    """Continue the run in ``path`` from its newest checkpoint; returns the path of its report.

    The promise of equal bits holds where the machine, versions and thread count are those of the start: what differs
    is printed and recorded.
    """
    with RunDirectory.open(path, write=True) as run, _resumable(run):
        config = make_config(run.config, f"{path}/config.yaml")
        parts = assemble(config)
        try:
            return _go(config, parts, run, resumed=True)
        finally:
            parts.close()


def _go(config: RunConfig, parts: Parts, run: RunDirectory, *, resumed: bool) -> Path:
    steps = run.checkpoint_steps() if resumed else []
    done = steps[-1] if steps else 0
    trackers = from_names(config.trackers, run, done if resumed else None)
    try:
        with Live(config.steps, done=done) as live:
            live.precision(parts.precision.rows())
            live.note(f"run {run.path}   device {parts.device}   parameters {_parameters(parts)}")
            for line in parts.plan.lines() if parts.plan else ():
                live.note(f"exact: {line}")
            for note in parts.sampler.grader.notes:
                live.note(note)
            if resumed:
                _note_changes(live, run.record_resume(done, _environment(parts)))
            Loop(config, parts, run, trackers, live).go()
    finally:
        trackers.close()
    return build_report(run)


@contextmanager
def _resumable(run: RunDirectory) -> Iterator[None]:
    """Ctrl-C at any time from here on ends with the command that continues the run."""
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedError(
            f"interrupted; continue with: mantissa train --resume {shlex.quote(str(run.path))}"
        ) from None


def _note_changes(live: Live, changed: dict[str, list[Any]]) -> None:
    for key, (then, now) in changed.items():
        live.note(f"warning: {key} was {then}, now {now}: numbers may differ in their last bits from the first run's")


def _environment(parts: Parts) -> dict[str, Any]:
    """Where the run runs, and the precision table with what the probes saw."""
    rows = parts.precision.rows()
    for row in rows:
        row["evidence"] = parts.evidence.get(row["role"], "")
    guards = list(parts.sampler.grader.notes)
    exact = {"exact": parts.plan.lines()} if parts.plan else {}
    return environment() | {"precision": rows, "training_device": str(parts.device), "grading": guards} | exact


def _parameters(parts: Parts) -> str:
    total = sum(parameter.numel() for parameter in parts.model.parameters())
    training = sum(parameter.numel() for parameter in parts.learner.trained.values())
    return f"{total:,}" if training == total else f"{total:,}, of which {training:,} train"
