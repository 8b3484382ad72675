from __future__ import annotations

import errno
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mantissa.base.errors import MantissaError
from mantissa.runs.directory import RunDirectory
from mantissa.runs.live import TensorBoard, Trackers, from_names, numbers


@pytest.fixture
def run(tmp_path: Path):
    with RunDirectory.create(tmp_path / "run", {"steps": 3}, {}) as run:
        yield run


def read_back(folder: Path, name: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_tensorboard_reads_what_was_logged_each_row_before_the_next_and_a_resume_hides_what_was_rewound(
    run: RunDirectory,
) -> None:
    trackers = from_names(["tensorboard"], run)
    for step in range(1, 8):
        trackers.log(step, {"step": step, "policy/loss": 1 / step, "precision/skipped": 0, "note": "x", "none": None})
    expected = [(step, float(np.float32(1 / step))) for step in range(1, 8)]
    assert read_back(run.tensorboard_path, "policy/loss") == expected, "before it is closed"
    assert read_back(run.tensorboard_path, "precision/skipped") == [(step, 0.0) for step in range(1, 8)]
    trackers.close()
    trackers = from_names(["tensorboard"], run, resume_after=4)
    for step in range(5, 9):
        trackers.log(step, {"policy/loss": 2.0})
    trackers.close()
    assert read_back(run.tensorboard_path, "policy/loss") == expected[:4] + [(step, 2.0) for step in range(5, 9)]


def test_an_absent_package_is_refused(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MantissaError, match=r"wandb is not installed; pip install 'mantissa-rl\[wandb\]'"):
        from_names(["wandb"], run)


def test_a_tracker_that_cannot_begin_leaves_no_file_open(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk its first record is none, and one of several may lack its package."""

    def files() -> list[str]:
        found = [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        return [name for each in found if (name := os.readlink(each)).startswith(str(run.tensorboard_path))]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MantissaError, match="wandb is not installed"):
        from_names(["tensorboard", "wandb"], run)
    assert files() == []
    with monkeypatch.context() as disk:
        disk.setattr(TensorBoard, "_write", full)
        with pytest.raises(OSError, match="No space"):
            from_names(["tensorboard"], run)
    assert files() == []
    trackers = from_names(["tensorboard"], run)
    assert len(files()) == 1
    trackers.close()


@pytest.mark.filterwarnings("default")  # the package's own
def test_wandb_offline(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers = from_names(["wandb"], run)
    trackers.log(1, {"policy/loss": 0.5})
    trackers.close()
    (saved,) = (run.path / "wandb").glob("offline-run-*/*.wandb")
    assert b"policy/loss" in saved.read_bytes()


def test_every_tracker_gets_every_row(run: RunDirectory) -> None:
    calls: list[tuple] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def log(self, step: int, row: dict) -> None:
            calls.append((self.name, step, row))

        def close(self) -> None:
            calls.append((self.name, "closed"))

    for both in (Trackers([Recorder("a"), Recorder("b")]), from_names([], run)):  # no tracker is a tracker
        both.log(3, {"x": 1})
        both.close()
    assert calls == [("a", 3, {"x": 1}), ("b", 3, {"x": 1}), ("a", "closed"), ("b", "closed")]


def test_numbers() -> None:
    picked = numbers({"step": 3, "a": 1, "b": math.inf, "c": "NaN", "d": None, "e": True, "f": 0.5})
    assert picked == {"a": 1.0, "b": math.inf, "f": 0.5}
