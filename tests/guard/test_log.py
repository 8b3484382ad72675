"""What a guarded run leaves on disk, and that a killed and resumed one leaves the same."""

from __future__ import annotations

import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from mantissa.base.errors import MantissaError
from mantissa.base.files import JsonLines
from mantissa.guard import Decision, GuardConfig, GuardLog, GuardSettings, Judge, noteworthy, open_guard, replay
from toys import quiet

Rows = list[dict[str, Any]]
CONFIG = GuardConfig(window=6, min_steps=3, max_fall_backs=2, gates={"gap/kl": (None, 0.1)}, good_after=2)


def run_rows(seed: int, steps: int = 60) -> Rows:
    """A run with trouble of every kind."""
    draw = random.Random(seed)
    return [
        {
            "step": step,
            "train/loss": draw.choice([1.0, 1.2, math.nan, 1.1, math.nan]) if step % 9 < 4 else 1.0,
            "precision/overflows": int(draw.random() < 0.1),
            "gap/kl": draw.choice([0.0, 0.2]),
        }
        for step in range(1, steps + 1)
    ]


def drive(folder: Path, rows: Rows, config: GuardConfig = CONFIG) -> list[Decision]:
    """What the trainer does: observe, and log."""
    guard, log = open_guard(folder, config)
    decisions = []
    for row in rows:
        decisions.append(guard.observe(row))
        assert log.add(decisions[-1]) == (decisions[-1] in noteworthy(decisions))
    return decisions


@pytest.mark.parametrize("seed", [0, 1])
def test_the_log_holds_what_a_replay_says(tmp_path: Path, seed: int) -> None:
    decisions = drive(tmp_path, run_rows(seed))
    assert {"ok", "warn", "fall back"} <= {d.action for d in decisions}
    logged = GuardLog(tmp_path).read()
    assert logged == noteworthy(replay(run_rows(seed), CONFIG))
    assert 0 < len(logged) < len(decisions)
    settings = GuardSettings.read(tmp_path)
    assert settings is not None
    assert settings.config == CONFIG


@pytest.mark.parametrize(("kill_at", "checkpoint_at"), [(1, 0), (17, 10), (33, 0), (60, 30)])
def test_killed_and_resumed_leaves_the_same_files(tmp_path: Path, kill_at: int, checkpoint_at: int) -> None:
    rows, calm, killed = run_rows(1), tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        folder.mkdir()
    drive(calm, rows)
    first = Judge(killed, CONFIG, quiet)
    for row in rows[:kill_at]:
        first.judge(row)
    with open(killed / "guard.jsonl", "a") as file:
        file.write('{"step": 61, "act')  # a line that the kill cut short
    second = Judge(killed, CONFIG, quiet)
    second.rewind(checkpoint_at, rows[:checkpoint_at])
    for row in rows[checkpoint_at:]:
        second.judge(row)
    for name in ("guard.json", "guard.jsonl"):
        assert (killed / name).read_bytes() == (calm / name).read_bytes()


def test_a_resumed_run_keeps_its_settings(tmp_path: Path) -> None:
    drive(tmp_path, [])
    assert drive(tmp_path, run_rows(0, 3)) == replay(run_rows(0, 3), CONFIG)
    with pytest.raises(MantissaError) as raised:
        open_guard(tmp_path, GuardConfig(window=7, gates=CONFIG.gates, min_steps=3, good_after=2))
    message = str(raised.value)
    assert "was guarded with window=6, now 7; max_fall_backs=2, now 1: go on with the settings it has" in message


def test_the_reference_is_the_one_that_was_read_at_the_start(tmp_path: Path) -> None:
    theirs = tmp_path / "fp32"
    theirs.mkdir()
    metrics = JsonLines(theirs / "metrics.jsonl")
    for step in range(1, 5):
        metrics.append({"step": step, "train/loss": 1.0})
    ours, config = tmp_path / "fp16", GuardConfig(reference=str(theirs), min_steps=1)
    ours.mkdir()
    rows = [{"step": step, "train/loss": 1.1} for step in range(1, 9)]
    first = drive(ours, rows, config)
    metrics.append({"step": 5, "train/loss": 0.5})  # the reference goes on: it is not read on
    guard, _ = open_guard(ours, config)
    assert guard.reference is not None
    assert (guard.reference.rows, len(guard.reference.loss)) == (4, 4)
    assert [guard.observe(row) for row in rows] == first
    settings = GuardSettings.read(ours)
    assert settings is not None
    moved = shutil.move(theirs, tmp_path / "moved")
    with pytest.raises(MantissaError, match="is not there; give the folder that it was moved to"):
        open_guard(ours, config)
    found = settings.read_reference(moved)
    assert found is not None
    assert found.digest == guard.reference.digest
    text = (tmp_path / "moved" / "metrics.jsonl").read_text()
    (tmp_path / "moved" / "metrics.jsonl").write_text(text.replace("1.0", "1.5", 1))
    with pytest.raises(MantissaError, match="has changed: its first 4 rows are not those"):
        settings.read_reference(moved)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected the settings of a guard"),
        ('{"format": "mantissa-guard", "version": 1, "config": 3}', "expected the settings of a guard"),
        ('{"format": "mantissa-guard", "version": 2, "config": {}}', "has version 2; this Mantissa reads version 1"),
        ('{"format": "mantissa-guard", "version": 1, "config": {"window": 0}}', "guard.json: guard: window=0"),
        ('{"format": "mantissa-guard", "version": 1, "config": {"windwo": 3}}', "did you mean 'window'?"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
def test_settings_that_are_none(tmp_path: Path, text: str | bytes, message: str) -> None:
    (tmp_path / "guard.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(MantissaError) as raised:
        GuardSettings.read(tmp_path)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "row",
    [
        '{"step": 1}',
        '{"step": 1, "action": "panic", "reasons": ""}',
        '{"step": 1, "action": "warn", "reasons": 3}',
        '{"step": 1, "action": "warn", "reasons": "", "steps": "many"}',
    ],
)
def test_rows_that_are_no_decisions(tmp_path: Path, row: str) -> None:
    (tmp_path / "guard.jsonl").write_text(row + "\n")
    with pytest.raises(MantissaError, match=r"guard\.jsonl: step 1: expected a decision of the guard"):
        GuardLog(tmp_path)


def test_a_folder_that_is_none_says_so(tmp_path: Path) -> None:
    (tmp_path / "guard.jsonl").mkdir()
    with pytest.raises(MantissaError, match=r"guard\.jsonl: expected a file, found a folder"):
        GuardLog(tmp_path)
