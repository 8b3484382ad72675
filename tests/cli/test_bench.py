"""``mantissa bench`` from end to end on tiny models: files, sentences, refusals, and a user's own model."""

from __future__ import annotations

import csv
import functools
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mantissa.base.errors import MantissaError
from mantissa.bench import COLUMNS, runner
from mantissa.bench.rows import scenario_table, size_table
from mantissa.bench.runner import training_peak
from mantissa.dropin.trainer import PrecisionTrainer

MODEL = """
import torch
torch.manual_seed(0)
def make_batch(n, generator): return {"x": torch.randn(n, 6, generator=generator)}
def loss_fn(model, batch): return (model(batch["x"]).float() - batch["x"][:, :2]).square().mean()
def factory(): return torch.nn.Linear(6, 2), make_batch, loss_fn
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder with a user's model in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cli_users_model.py").write_text(MODEL)
    yield tmp_path
    sys.modules.pop("cli_users_model", None)


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is measured in processes, of seconds each: tests/bench/test_runner.py, and here of a user's model."""
    monkeypatch.setattr(runner, "training_peak", lambda *_: 1)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "bench.jsonl").read_text().splitlines()]


def test_the_whole_command(here: Path, mantissa: Callable) -> None:
    result = mantissa("bench", "--device", "cpu", "--sizes", "2k,8k", "--scenarios", "warmup", "--repeats", 2,
                      "--threads", 1, "--precision", "fp32,fp16", "--out", "found", "--profile")  # fmt: skip
    assert result.code == 0, result
    found = here / "found"
    rows = rows_of(found)
    precisions = ["fp32", "fp16"]
    assert [(row["scenario"], row["precision"]) for row in rows] == [
        (scenario, precision) for scenario in ("warmup", "size", "size") for precision in precisions
    ]
    with (found / "bench.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == list(COLUMNS)
    assert len(table) == 6
    assert {row["active"] for row in rows} == set(precisions)
    assert all(row["evidence"] for row in rows)
    assert (found / "bench.png").read_bytes().startswith(b"\x89PNG")
    for precision in precisions:
        assert (found / f"trace-{precision}.json").stat().st_size > 0
        assert "backward" in (found / f"profile-{precision}.txt").read_text()
    said = " ".join(result.out.split())
    assert "fp16 (simulated)" in said
    assert "Simulated precision costs time" in said
    assert "x fp32's" in said
    console = Console(file=(drawn := io.StringIO()), width=80)
    for table in (scenario_table(rows), size_table(rows)):
        console.print(table)
    assert "…" not in drawn.getvalue()
    assert "retries" in drawn.getvalue()
    assert f"({rows[0]['speed_up_low']:.2f}..{rows[0]['speed_up_high']:.2f})" in drawn.getvalue(), "whole in 80 columns"
    summary = " ".join((found / "summary.txt").read_text().split())
    assert "of 2.42k to 6.74k parameters" in summary or "than fp32" in summary
    assert summary in said


def test_a_users_own_model(here: Path, mantissa: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "training_peak", functools.cache(training_peak))
    result = mantissa("bench", "--device", "cpu", "--model", "cli_users_model:factory", "--precision", "fp32",
                      "--scenarios", "warmup", "--repeats", 1, "--batch", 32)  # fmt: skip
    assert result.code == 0, result
    (folder,) = (here / "runs").iterdir()
    assert folder.name.startswith("bench-")
    rows = rows_of(folder)
    assert [(row["scenario"], row["precision"]) for row in rows] == [("warmup", "fp32"), ("size", "fp32")]
    assert all(row["model"] == "cli_users_model:factory" and row["parameters"] == 14 for row in rows)
    assert all(row["peak_memory_bytes"] > 0 for row in rows)
    assert all(row["best_loss"] is None and row["excess_loss"] is None for row in rows)
    assert "unknown" in result.out
    assert "imulated" not in result.out, "fp32 alone says nothing of simulation"


def test_a_refused_row_is_named_and_the_others_are_kept(
    here: Path, mantissa: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoFp16(PrecisionTrainer):
        def __init__(self, model: Any, optimizer: Any, precision: str, **options: Any) -> None:
            if precision == "fp16":
                raise MantissaError("precision: fp16 is not active on cpu: it should show that it overflows")
            super().__init__(model, optimizer, precision, **options)

    monkeypatch.setattr(runner, "PrecisionTrainer", NoFp16)
    result = mantissa("bench", "--device", "cpu", "--sizes", "2k", "--scenarios", "warmup", "--repeats", 1,
                      "--out", "found")  # fmt: skip
    message = result.error()
    assert "row refused (fp16, residual MLP of 2k, on cpu): precision: fp16 is not active on cpu" in message
    assert "The other rows are in found" in message
    assert {row["precision"] for row in rows_of(here / "found")} == {"fp32", "bf16"}
    with (here / "found" / "bench.csv").open() as table:  # a processor's flags may speak of fp16
        assert {row["precision"] for row in csv.DictReader(table)} == {"fp32", "bf16"}
