"""Rows of scenarios and of the sweep: counts, losses and ratios against what they must be."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mantissa.bench import runner
from mantissa.bench.rows import COLUMNS, write_csv, write_jsonl
from mantissa.bench.runner import SCENARIOS, Request, Runner, run_scenario, run_size, training_peak
from mantissa.bench.workload import BEST_LOSS, Source
from mantissa.errors import MantissaError

SMALL = Source(parameters=5_000)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not measured (in processes, of seconds each): what a test asks is something else."""
    monkeypatch.setattr(runner, "training_peak", lambda *_: 1)


def test_a_scenarios_rows(setting: Callable, unmeasured: None) -> None:
    shared, refused = setting()
    rows = run_scenario(SCENARIOS["standard"], SMALL, 32, shared)
    assert not refused
    known = {name: (s.epochs, s.samples) for name, s in SCENARIOS.items()}
    assert known == {"warmup": (1, 128), "standard": (3, 256), "stress": (5, 512)}
    assert [row["precision"] for row in rows] == ["fp32", "bf16", "fp16"]
    for row in rows:
        assert list(row) == list(COLUMNS)
        assert row["active"] == row["precision"]
        assert (row["steps"], row["samples"], row["epochs"], row["batch_size"]) == (24, 256, 3, 32)
        assert row["samples_per_s"] == pytest.approx(3 * 256 / row["duration_s"])
        assert row["duration_low_s"] <= row["duration_s"] <= row["duration_high_s"]
        assert row["best_loss"] == BEST_LOSS
        assert row["excess_loss"] == row["final_loss"] - BEST_LOSS
        assert BEST_LOSS < row["final_loss"] < 1.2
        assert row["overflow_rate"] == 0
        assert row["evidence"]
    fp32 = rows[0]
    assert (fp32["speed_up"], fp32["speed_up_low"], fp32["speed_up_high"]) == (1, 1, 1)
    assert fp32["backend"] == "native"
    for row in rows[1:]:  # the same seeds: paired losses differ by rounding, not by luck
        assert row["final_loss"] == pytest.approx(fp32["final_loss"], rel=0.02)
        assert row["final_loss"] != fp32["final_loss"]


def test_the_final_loss_is_that_of_the_same_training_done_by_hand(setting: Callable, unmeasured: None) -> None:
    shared, _ = setting(precisions=("fp32",), repeats=1)
    (row,) = run_scenario(SCENARIOS["warmup"], SMALL, 32, shared)
    runner = Runner(Request(SMALL, "fp32", "cpu"), seed=0)
    workload = runner.workload
    optimizer = workload.make_optimizer(workload.model.parameters())
    for batch in runner.batches(4, 32, seed=0):
        optimizer.zero_grad()
        workload.loss_fn(workload.model, batch).backward()
        optimizer.step()
    held_out = runner.batches(32, 32, 1_000_003)
    with torch.no_grad():
        loss = sum(workload.loss_fn(workload.model, batch).item() for batch in held_out) / 32
    assert row["final_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("precision", "batch", "measured"), [("bf16", 128, (128, 1, None)), ("fp32", 1000, (128, 1, 1))]
)
def test_without_fp32_there_is_no_ratio_and_a_batch_is_at_most_all_samples(
    precision: str, batch: int, measured: tuple, setting: Callable, unmeasured: None
) -> None:
    shared, _ = setting(precisions=(precision,), repeats=1)
    (row,) = run_scenario(SCENARIOS["warmup"], SMALL, batch, shared)
    assert (row["batch_size"], row["steps"], row["speed_up"]) == measured


def test_skipped_and_retried_steps_are_counted(
    setting: Callable, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Overflowing(Runner):
        """Its loss is multiplied by 2^10: with torch's first scale, fp16 gradients overflow in the first steps."""

        def step(self, batch: object) -> object:  # type: ignore[override]
            def loss_fn(model: torch.nn.Module, batch: object) -> torch.Tensor:
                return self.workload.loss_fn(model, batch) * 2.0**10  # type: ignore[arg-type]

            return self.trainer.step(batch, loss_fn)

    monkeypatch.setattr(runner, "Runner", Overflowing)
    shared, _ = setting(precisions=("fp32", "fp16"), repeats=1)
    fp32, fp16 = run_scenario(SCENARIOS["warmup"], SMALL, 32, shared)
    assert (fp32["overflow_rate"], fp32["retried"]) == (0, 0)
    # each attempt may lower the scale 4 times and then gives up: 5 halvings a skipped step
    assert fp16["overflow_rate"] * 4 + fp16["retried"] >= 2
    assert 0 < fp16["overflow_rate"] < 1


def test_a_sizes_rows(setting: Callable, unmeasured: None) -> None:
    shared, refused = setting(repeats=1)
    rows = run_size(SMALL, 64, shared)
    assert not refused
    assert [(row["scenario"], row["precision"]) for row in rows] == [("size", p) for p in ("fp32", "bf16", "fp16")]
    for row in rows:
        assert list(row) == list(COLUMNS)
        assert row["samples_per_s"] == pytest.approx(64 / row["duration_s"])
        assert row["final_loss"] is None
        assert row["speed_up_low"] <= row["speed_up"] <= row["speed_up_high"]
        assert row["parameters"] == Runner(Request(SMALL, "fp32", "cpu"), 0).workload.parameters


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.variants), "bf16"])
def test_peak_memory_of_a_process_is_at_least_weights_gradients_and_moments(precision: str) -> None:
    few, many = (Request(Source(parameters=n), precision, "cpu") for n in (10_000, 4_000_000))
    small, large = training_peak(few, 8), training_peak(many, 8)
    assert small is not None
    assert large is not None
    # AdamW in fp32: weights, gradients, two moments of 4 bytes; bf16 may hold a copy of weights and their gradients
    assert 4 * 4 * 4e6 * 0.97 <= large <= 4 * 4 * 4e6 * 1.6 + 16e6
    assert small < 16e6  # and a large model's memory does not stay in a small one's row


def test_out_of_memory_is_one_line(setting: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner, "training_peak", full)
    with pytest.raises(MantissaError, match=r"residual MLP of 5k with batches of 16 does not fit on cpu in 3 prec"):
        run_size(SMALL, 16, setting(repeats=1)[0])


def test_csv_and_json_hold_the_same_rows(tmp_path: Path) -> None:
    rows = [dict.fromkeys(COLUMNS) | {"scenario": "size", "duration_s": 0.1 * i, "steps": i} for i in range(3)]
    rows[2]["final_loss"] = float("inf")
    write_csv(tmp_path / "bench.csv", rows)
    write_jsonl(tmp_path / "bench.jsonl", rows)
    with (tmp_path / "bench.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    assert list(table[0]) == list(COLUMNS)
    assert [list(line) for line in lines] == [list(COLUMNS)] * 3
    for row, line, cells in zip(rows, lines, table, strict=True):
        for name, value in row.items():
            assert line[name] == ("Infinity" if value == float("inf") else value)
            assert cells[name] == ("" if value is None else str(value))
