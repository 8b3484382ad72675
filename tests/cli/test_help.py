"""What ``--help`` says, at the widths people have, and the two tables that need no run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.main import get_command

from mantissa import cli
from mantissa.precision import PRESETS
from mantissa.runs.metrics import METRICS

COMMANDS = tuple(get_command(cli.app).commands)  # type: ignore[attr-defined]


def call(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    """The exit code of ``mantissa argv``, run here."""
    monkeypatch.setattr(sys, "argv", ["mantissa", *argv])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("width", ["80", "120"])
@pytest.mark.parametrize("command", ["", *COMMANDS, "data dapo"])
def test_help_fits_and_names_the_command(
    command: str, width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", int(width))
    assert call(monkeypatch, *command.split(), "--help") == 0
    text = capsys.readouterr().out
    assert f"Usage: mantissa {command or '[OPTIONS]'}" in text
    assert max(map(len, text.splitlines())) <= int(width)
    if not command:
        assert all(f" {name} " in text for name in COMMANDS)


def test_each_example_of_train_has_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    call(monkeypatch, "train", "--help")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    examples = [line for line in lines if line.startswith("mantissa train ")]
    assert len(examples) == 5
    assert "mantissa train recipes/demo.yaml precision=fp16 precision.rollout=bf16" in examples


def test_without_arguments_it_helps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch) == 0
    assert "Usage: mantissa [OPTIONS] COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("width", ["60", "90", "200"])
def test_metrics_prints_the_whole_catalogue_at_any_width(
    width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert call(monkeypatch, "metrics") == 0
    text = capsys.readouterr().out
    flat = "".join(text.split())
    assert max(map(len, text.splitlines())) <= int(width)
    for metric in METRICS:
        assert metric.name in text
        assert metric.unit in text
        if width != "200":  # in the table a long formula is folded beside its neighbours
            assert "".join(metric.formula.split()) in flat
            assert "".join(metric.source.split()) in flat


def test_precision_shows_every_preset_each_role_and_the_evidence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert call(monkeypatch, "precision", "--device", "cpu") == 0
    text = capsys.readouterr().out
    for name in PRESETS:
        assert f"{name} on cpu" in text
    assert call(monkeypatch, "precision", "bf16-train-fp16-rollout", "--device", "cpu") == 0
    rows = {line.split()[0]: line.split()[1:4] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["learner"] == ["bf16", "bf16", "simulated"]
    assert rows["rollout"] == ["fp16", "fp16", "simulated"]
    assert rows["master"] == ["fp32", "fp32", "native"]


def test_python_dash_m_and_the_end_of_a_pipe() -> None:
    command = [sys.executable, "-m", "mantissa", "metrics"]
    piped = subprocess.run(f"{' '.join(command)} | head -1", shell=True, capture_output=True, text=True, check=True)
    assert piped.stdout.startswith("reward/accuracy")
    assert piped.stderr == ""
