"""A disk that fills up, wherever the run is: one line, and with space again it ends as if never full."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mantissa.model import load_model
from mantissa.runs.directory import Log, RunDirectory, deterministic
from small_run import contents

Mantissa = Callable[..., Any]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, in memory, whose size the test sets by ``resize``."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system in memory")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def resize(disk: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


# In pages of 4 KiB: at creation, in the warm start, in a checkpoint, in the metrics, and so on.
SOME, MORE = ["4k", "84k"], ["20k", "40k", "72k", "160k"]


@pytest.mark.parametrize("sizes", [SOME, pytest.param([*SOME, *MORE], marks=pytest.mark.variants)], ids=len)
def test_a_full_disk_costs_nothing_but_time(
    sizes: list[str], mantissa: Mantissa, recipe: Callable[..., Path], disk: Path, tmp_path: Path
) -> None:
    path = recipe(trackers=["tensorboard"], steps=3)
    calm = tmp_path / "calm"
    assert mantissa("train", path, f"run_dir={calm}").code == 0
    expected = [deterministic(row) for row in RunDirectory.open(calm).metrics.read()]
    full = set()
    for size in sizes:
        run = disk / size
        resize(disk, size)
        result = mantissa("train", path, f"run_dir={run}")
        if result.code:
            message = result.error()
            assert "free some space or choose another folder" in message
            written = message.removeprefix("cannot write ").split(": ")[0]
            full.add(written.removeprefix(f"{run}/").split("/")[0])
        resize(disk, "4m")
        again = ("--resume", run) if (run / "config.yaml").exists() else (path, f"run_dir={run}")
        assert mantissa("train", *again).code == 0
        assert [deterministic(row) for row in RunDirectory.open(run).metrics.read()] == expected
        weights = [dict(load_model(folder / "policy").named_parameters()) for folder in (run, calm)]
        assert all(weight.equal(weights[1][name]) for name, weight in weights[0].items())
        assert not list(run.rglob(".*.tmp"))
        subprocess.run(["rm", "-r", str(run)], check=True)
    assert len(full) == len(sizes) if sizes is SOME else len(full) >= 5, full
    assert sizes is SOME or {"environment.json", "warm_start.jsonl", "checkpoints"} <= full, full


@pytest.mark.parametrize("more", [(), ("rollout.max_policy_lag=4",)], ids=["in turn", "ahead"])
def test_a_disk_that_fills_keeps_the_steps_of_a_run_that_was_to_save_at_its_end(
    more: tuple[str, ...], mantissa: Mantissa, recipe: Callable[..., Path], disk: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = recipe(trackers=["tensorboard"], steps=6, checkpoint={"every": 6, "keep": 1})
    calm, run, ballast = tmp_path / "calm", disk / "run", disk / "ballast"
    assert mantissa("train", path, f"run_dir={calm}", *more).code == 0
    resize(disk, "4m")
    append = Log.append

    def filled(self: Log, row: Any) -> None:
        if row["step"] == 3 and not ballast.exists():  # something else takes what is left, to the last page
            free = shutil.disk_usage(disk).free
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, free)
        append(self, row)

    monkeypatch.setattr(Log, "append", filled)
    result = mantissa("train", path, f"run_dir={run}", *more)
    assert result.code == 2
    message = result.error()
    assert re.search(r"No space left on device; free some space or choose another folder; step [345] is kept", message)
    kept = RunDirectory.open(run).checkpoint_steps()[-1]
    assert f"step {kept} is kept: --resume goes on after it" in message
    assert len(RunDirectory.open(run).metrics.read()) == kept >= 3
    ballast.unlink()
    assert mantissa("train", "--resume", run).code == 0
    both = [contents(folder) for folder in (calm, run)]
    assert both[0] == both[1]


def test_a_disk_without_room_for_the_next_checkpoint_is_said_before_a_step_is_taken(
    mantissa: Mantissa, recipe: Callable[..., Path], disk: Path
) -> None:
    resize(disk, "96k")  # of these weights, and no second time
    message = mantissa("train", recipe(steps=3, warm_start=None), f"run_dir={disk / 'run'}").error()
    assert "checkpoints, where room for the next checkpoint is kept: No space left on device; free" in message
    assert RunDirectory.open(disk / "run").checkpoint_steps() == [0]
