"""What ``--help`` says, at the widths people have, and the two tables that need no run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from typer.main import get_command

from mantissa import cli
from mantissa.precision import PRESETS
from mantissa.runs.metrics import METRICS

COMMANDS = tuple(get_command(cli.app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", ["", *COMMANDS, "data dapo", "worldmodel train", "worldmodel eval"])
def test_help_fits_and_names_the_command(command: str, mantissa: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    result = mantissa(*command.split(), "--help")
    lines = [line.strip() for line in result.out.splitlines()]
    assert result.code == 0
    assert f"Usage: mantissa {command or '[OPTIONS]'}" in result.out
    assert max(map(len, lines)) <= 80
    if not command:
        assert all(f" {name} " in result.out for name in COMMANDS)
        assert mantissa().out == result.out, "without arguments it helps"
    if command == "train":  # each example has a line of its own
        examples = [line for line in lines if line.startswith("mantissa train ")]
        assert len(examples) == 5
        assert "mantissa train recipes/demo.yaml precision=fp16 precision.rollout=bf16" in examples


@pytest.mark.parametrize("width", ["60", "200"])
def test_metrics_prints_the_whole_catalogue_at_any_width(
    width: str, mantissa: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    text = mantissa("metrics").out
    flat = "".join(text.split())
    assert max(map(len, text.splitlines())) <= int(width)
    for metric in METRICS:
        assert metric.name in text
        assert metric.unit in text
        assert "".join(metric.formula.split()) in flat
        assert "".join(metric.source.split()) in flat


def test_precision_shows_every_preset_each_role_and_the_evidence(
    mantissa: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = mantissa("precision", "--device", "cpu").out
    for name in PRESETS:
        assert f"{name} on cpu" in text
    text = text[text.index("bf16-train-fp16-rollout on cpu") :].split("\n\n")[0]
    rows = {line.split()[0]: line.split()[1:4] for line in text.splitlines()}
    assert rows["learner"] == ["bf16", "bf16", "simulated"]
    assert rows["rollout"] == ["fp16", "fp16", "simulated"]
    assert rows["master"] == ["fp32", "fp32", "native"]


def test_python_dash_m_and_the_end_of_a_pipe() -> None:
    command = [sys.executable, "-m", "mantissa", "metrics"]
    piped = subprocess.run(f"{' '.join(command)} | head -1", shell=True, capture_output=True, text=True, check=True)
    assert piped.stdout.startswith("reward/accuracy")
    assert piped.stderr == ""
