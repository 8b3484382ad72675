"""``mantissa guard``: what it prints is what was decided, its exit code says how bad, and bad input is one line."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mantissa.base.files import JsonLines
from mantissa.guard import GuardConfig, GuardLog, open_guard, replay

Mantissa = Callable[..., Any]
CONFIG = GuardConfig(window=10, min_steps=5)


def row_of(step: int, **others: Any) -> dict[str, Any]:
    usual = {"train/loss": 1.0, "precision/format": "fp16", "precision/overflows": 0, "time/step": 0.5}
    return {"step": step} | usual | {name.replace("_", "/", 1): value for name, value in others.items()}


def write(folder: Path, rows: list[dict[str, Any]], config: GuardConfig | None = CONFIG) -> Path:
    """A run's folder as the trainer leaves it; without a config, of a run that was not guarded."""
    folder.mkdir()
    metrics = JsonLines(folder / "metrics.jsonl")
    guarded = open_guard(folder, config) if config else None
    for row in rows:
        metrics.append(row)
        if guarded:
            guarded[1].add(guarded[0].observe(row))
    return folder


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide enough for a rule's line not to be folded."""
    monkeypatch.setenv("COLUMNS", "250")


@pytest.fixture
def fp16(tmp_path: Path) -> Path:
    """Two overflows from step 9 on: alerts until they leave the window."""
    return write(tmp_path / "fp16", [row_of(step, precision_overflows=int(step in (9, 11))) for step in range(1, 31)])


@pytest.fixture
def fp32(tmp_path: Path) -> Path:
    rows = [row_of(step, train_loss=0.9, time_step=0.25, precision_format="fp32") for step in range(1, 31)]
    return write(tmp_path / "fp32", rows, None)


def printed(text: str) -> list[tuple[int, str]]:
    """(step, action) of each decision in the output."""
    return [(int(m[1]), m[2]) for m in re.finditer(r"^step +(\d+)  (ok|warn|alert|fall back|stop)$", text, re.M)]


def rules(text: str) -> dict[str, str]:
    """The table of rules: name -> what it saw."""
    lines = text[text.index("\nrule ") :].split("\n\n")[0].splitlines()[2:]
    return {parts[0]: parts[1] for parts in (re.split(r" {2,}", line.strip()) for line in lines)}


def test_every_decision_is_printed_with_its_numbers(mantissa: Mantissa, fp16: Path) -> None:
    result = mantissa("guard", fp16, "--all")
    decisions = replay(JsonLines(fp16 / "metrics.jsonl").read(), CONFIG)
    assert printed(result.out) == [(d.step, d.action) for d in decisions]
    for decision in decisions:
        assert all(reason in result.out for reason in decision.reasons)
        assert ", ".join(f"{name} {value:.6g}" for name, value in decision.numbers.items()) in result.out
    assert result.code == 0  # nothing worse than an alert
    assert "the replay equals guard.jsonl: 13 decisions" in result.out
    assert "after step 30: ok; a checkpoint may not yet be called good" in result.out


def test_alike_decisions_are_folded_between_their_first_and_last(mantissa: Mantissa, fp16: Path) -> None:
    result = mantissa("guard", fp16)
    expected = {9: "alert", 10: "warn", 11: "alert", 18: "alert", 19: "warn", 20: "warn", 21: "ok"}
    assert printed(result.out) == list(expected.items())  # 1 of 9 is 11%, 1 of 10 is 10%, 2 of 10 are 20%
    assert "and 6 like it between these two (--all shows them)" in result.out


def test_other_settings_are_tried_and_not_compared(mantissa: Mantissa, fp16: Path) -> None:
    result = mantissa("guard", fp16, "--window", 2, "overflow_fall_back=0.4", "to=fp32")
    assert result.code == 3
    assert "guard.json, but for window=2, overflow_fall_back=0.4, to=fp32" in " ".join(result.out.split())
    assert printed(result.out) == [(9, "fall back"), (10, "ok"), (11, "stop"), (12, "stop"), (13, "ok")]
    assert "fall back: to fp32, from the last good checkpoint" in result.out
    assert "not compared with guard.jsonl: these settings are not the run's" in result.out


def test_a_run_that_was_not_guarded(mantissa: Mantissa, fp16: Path, fp32: Path) -> None:
    for name in ("guard.json", "guard.jsonl"):
        (fp16 / name).unlink()
    result = mantissa("guard", fp16, "--reference", fp32)
    assert result.code == 0
    assert "no guard.json, so the default settings" in result.out
    assert "a loss on 30 of 30 steps, 0.25 s a step (median), fp32" in result.out
    assert "the run was not guarded: there is no log to compare with" in result.out
    table = rules(result.out)
    assert table["overflow"] == "10.0% of steps at step 20"
    assert table["loss"] == "+11.1% at step 20"
    assert table["speed"] == "0.50 x at step 20"
    assert table["nonfinite"] == "all are finite"
    assert table["divergence"] == "off"
    assert any(name.endswith("more gates") and "no data" in seen for name, seen in table.items())
    without = rules(mantissa("guard", fp16).out)
    assert without["loss"] == without["speed"] == "no data: no reference"
    assert rules(mantissa("guard", fp16, "--window", 50, "min_steps=40").out)["overflow"] == (
        "too few steps: 30 with precision/overflows, 40 are needed"
    )


def test_a_reference_that_was_moved_is_still_the_runs_own(mantissa: Mantissa, fp32: Path, tmp_path: Path) -> None:
    rows = [row_of(step) for step in range(1, 31)]
    run = write(tmp_path / "run", rows, GuardConfig(reference=str(fp32)))
    assert "the replay equals guard.jsonl: 11 decisions" in mantissa("guard", run).out
    moved = shutil.move(fp32, tmp_path / "elsewhere")
    assert "is not there; give the folder that it was moved to" in mantissa("guard", run).error()
    assert "the replay equals guard.jsonl: 11 decisions" in mantissa("guard", run, "--reference", moved).out
    other = write(tmp_path / "other", rows, None)
    result = mantissa("guard", run, "--reference", other)
    assert "not compared with guard.jsonl" in result.out
    assert rules(result.out)["loss"] == "+0.0% at step 20"
    assert rules(mantissa("guard", run, "reference=null").out)["loss"] == "no data: no reference"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda log: [*log[:2], *log[3:]], "step 11 is alert here and has no row there"),
        (lambda log: log[:-1], "step 21 is ok here and has no row there"),
        (lambda log: [*log, log[-1] | {"step": 25}], "step 25 is ok there and has no row here"),
        (lambda log: [*log[:3], log[3] | {"action": "warn"}, *log[4:]], "step 12 is alert here and warn there"),
        (lambda log: [log[0] | {"steps": 8}, *log[1:]], "step 9: steps is 9 here and 8 there"),
        (lambda log: [log[0] | {"reasons": "mood: bad"}, *log[1:]], "step 9: the reasons are ['overflow:"),
    ],
)
def test_a_log_that_is_not_the_replay(
    mantissa: Mantissa, fp16: Path, change: Callable[[list[Any]], list[Any]], message: str
) -> None:
    log = JsonLines(fp16 / "guard.jsonl")
    rows = change(log.read())
    log.truncate(0)
    for row in rows:
        log.append(row)
    result = mantissa("guard", fp16)
    assert result.code == 1
    assert f"the replay differs from guard.jsonl: {message}" in result.out


def test_a_run_killed_between_its_two_files(mantissa: Mantissa, tmp_path: Path) -> None:
    run = write(tmp_path / "run", [row_of(1), row_of(2, train_loss=math.nan), row_of(3, train_loss=math.nan)])
    assert mantissa("guard", run).code == 3
    GuardLog(run).truncate(2)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "tra')  # and a torn line
    result = mantissa("guard", run)
    assert (result.code, "which ends before the newest step" in result.out) == (3, True)
    assert "1 decisions" in result.out


def test_a_run_of_reinforcement_learning(mantissa: Mantissa, finished: Path, tmp_path: Path) -> None:
    assert rules(mantissa("guard", finished).out)["overflow"].startswith("too few steps: 2 with precision/overflows")
    run = tmp_path / "run"
    run.mkdir()
    for row in JsonLines(finished / "metrics.jsonl").read():
        JsonLines(run / "metrics.jsonl").append(row | {"policy/loss": math.nan})
    result = mantissa("guard", run, "min_steps=2")
    table = rules(result.out)
    assert result.code == 3  # a loss has no scale there, and yet must be finite
    assert table["loss"] == "no data: no reference"
    assert table["nonfinite"] == "2 in a row at step 2"
    assert table["accuracy"] == table["reward"] == "+0.0% at step 2"
    rows = JsonLines(finished / "metrics.jsonl").read()
    share = sum(row["precision/overflows"] > 0 for row in rows) / 2
    assert table["overflow"] == f"{share:.1%} of steps at step 2"
    assert table["gate gap/k3_kl"] == "outside on 0% at step 2"
    assert "gate correction/ess" in table
    compared = mantissa("guard", finished, "min_steps=2", "--reference", finished)
    assert rules(compared.out)["speed"] == "1.00 x at step 2"
    assert rules(compared.out)["loss"] == "no data: no train/loss there"
    assert rules(compared.out)["nonfinite"] == "no data: no row has train/loss"  # nor policy/loss: nothing was learned


def test_the_worst_of_each_rule_is_the_one_nearest_to_its_bound(mantissa: Mantissa, tmp_path: Path) -> None:
    """By hand: losses of 1, 4, 2 and 2 have the means 1, 2.5, 3 and 2 over two steps; the lowest speed is 1 / 4."""
    losses, seconds = (1.0, 1.0, 4.0, 2.0, 2.0), (1.0, 1.0, 4.0, 4.0, 2.0)
    rows = [row_of(n + 1, train_loss=losses[n], time_step=seconds[n]) for n in range(5)]
    fp32 = write(tmp_path / "fp32", [row_of(n + 1, time_step=1.0, precision_format="fp32") for n in range(5)], None)
    result = mantissa("guard", write(tmp_path / "run", rows, None), "--reference", fp32, "window=2", "divergence=5",
                      "loss_warn=9", "loss_fall_back=9")  # fmt: skip
    table = rules(result.out)
    assert table["divergence"] == "3 (best 1) at step 4"
    assert table["speed"] == "0.25 x at step 4"
    assert table["loss"] == "+200.0% at step 4"
    assert "fall back above 5 times" in result.out
    assert "warn at 1 in a row, fall back at 2 in a row" in result.out


def test_a_gate_that_was_open_too_often(mantissa: Mantissa, tmp_path: Path) -> None:
    rows = [row_of(step, gap_kl=0.5 if step % 2 else 0.0) for step in range(1, 31)]
    run = write(tmp_path / "run", rows, None)
    result = mantissa("guard", run, "gates={gap/kl: [null, 0.1]}", "min_steps=5")
    assert rules(result.out)["gate gap/kl"] == "outside on 60% at step 5"
    assert "gate: gap/kl outside -inf to 0.1 on 60% of 5 steps (warn above 50%)" in result.out


def test_the_metrics_file_itself_will_do_and_a_narrow_screen(
    mantissa: Mantissa, fp16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = mantissa("guard", fp16 / "metrics.jsonl").out
    assert "the replay equals guard.jsonl: 13 decisions" in text
    table = text[text.index("\nrule ") :].split("\n\n")[0]
    assert max(map(len, table.splitlines())) <= 60
    assert (9, "alert") in printed(text)
