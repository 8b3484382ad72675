"""A runner computes in the precision it names, or its row is refused; clocks and ratios; scenarios' and sizes' rows."""

from __future__ import annotations

import csv
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mantissa.base.errors import MantissaError
from mantissa.bench import runner
from mantissa.bench.rows import COLUMNS, Crossover, common, crossover, crossover_sentence, write_csv
from mantissa.bench.runner import (
    SCENARIOS,
    Contender,
    RefusedError,
    Runner,
    Setting,
    peak_growth,
    quartiles,
    run_scenario,
    run_size,
    speed_up,
    step_seconds,
    training_peak,
)
from mantissa.bench.workload import BEST_LOSS, Source, teacher
from mantissa.dropin.trainer import PrecisionTrainer
from mantissa.mismatch.intervals import Estimate
from mantissa.precision import FP32, format_named, is_on_grid
from mantissa.runs import rows as rows_of

SMALL = Source(parameters=5_000)


def setting(**changes: Any) -> tuple[Setting, list[str]]:
    """A setting on the CPU, and the list of what was refused."""
    refused: list[str] = []
    fields: dict[str, Any] = {
        "precisions": ("fp32", "bf16", "fp16"),
        "device": "cpu",
        "backend": "auto",
        "repeats": 2,
        "common": common("cpu"),
        "refuse": refused.append,
        "say": lambda line: None,
    }
    return Setting(**(fields | changes)), refused


def request(precision: str, backend: str = "auto") -> Contender:
    return Contender(SMALL, precision, "cpu", backend)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_runner_learns_in_the_precision_it_names(precision: str) -> None:
    runner = Runner(request(precision), seed=0)
    seen: list[torch.Tensor] = []
    hook = runner.workload.model.first.register_forward_hook(lambda module, inputs, out: seen.append(out))  # type: ignore[union-attr]
    batches = runner.batches(4, 32, seed=1)
    before = runner.loss(batches)
    for _ in range(10):
        for batch in batches:
            runner.step(batch)
    hook.remove()
    assert runner.loss(batches) < 0.8 * before
    assert all(is_on_grid(out.detach().float(), format_named(precision)).all() for out in seen)
    if precision != "fp32":
        assert not all(
            is_on_grid(p.detach(), format_named(precision)).all() for p in runner.workload.model.parameters()
        )


def test_the_same_seed_gives_every_precision_the_same_weights_and_data() -> None:
    teacher.cache_clear()  # the first runner of a process is the one that makes it
    runners = [Runner(request(precision), seed=3) for precision in ("fp32", "fp16")]
    weights = [torch.nn.utils.parameters_to_vector(r.workload.model.parameters()) for r in runners]
    data = [r.batches(2, 8, seed=4)[1] for r in runners]
    assert torch.equal(*weights)
    assert torch.equal(data[0][0], data[1][0])
    assert torch.equal(data[0][1], data[1][1])


def test_the_loss_of_an_evaluation_is_the_mean_over_batches_in_float64() -> None:
    runner = Runner(request("fp32"), seed=0)
    batches = runner.batches(3, 16, seed=5)
    model = runner.workload.model.double()
    with torch.no_grad():
        expected = sum((model(x.double()) - y.double()).square().mean().item() for x, y in batches) / 3
    model.float()
    assert runner.loss(batches) == pytest.approx(expected, rel=1e-6)
    assert model.training


@pytest.mark.parametrize(
    ("asked", "lie", "said"),
    [
        (("fp16",), {"active": FP32, "reason": "a substitution"},
         r"row refused \(fp16, residual MLP of 5k, on cpu\): .* was requested and fp32 was active \(a substitution\)"),
        (("bf16",), {"evidence": ""}, "no evidence that bf16 is active"),
        (("bf16", "simulated"), {"backend": "native"}, "simulated kernels were requested and native ones were active"),
    ],
)  # fmt: skip
def test_what_did_not_engage_is_refused(asked: tuple, lie: dict, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lying(PrecisionTrainer):
        """It reports ``lie`` of its role, or as evidence."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            role = {name: value for name, value in lie.items() if name != "evidence"}
            self.precision = dataclasses.replace(self.precision, **role)
            self.evidence = lie.get("evidence", self.evidence)

    monkeypatch.setattr(runner, "PrecisionTrainer", Lying)
    with pytest.raises(RefusedError, match=said):
        Runner(request(*asked), seed=0)


def table(**speeds: float | tuple[float, float, float]) -> dict[int, Estimate]:
    """``k10=1.2`` is 1.2 times fp32's speed at 10,000 parameters, give or take a hundredth."""
    return {
        int(name[1:]) * 1000: Estimate(s, s - 0.01, s + 0.01) if isinstance(s, float) else Estimate(s[1], s[0], s[2])
        for name, s in speeds.items()
    }


def test_the_spread_is_median_and_quartiles_and_ratios_are_taken_within_a_round() -> None:
    assert quartiles([5.0, 1.0, 2.0, 3.0, 9.0]) == Estimate(3.0, 2.0, 5.0)
    assert quartiles([3.0]) == Estimate(3.0, 3.0, 3.0)
    # The machine was ten times slower in the second round: the ratio of the medians would be 5.5 / 2.75 only by luck.
    assert speed_up([1.0, 10.0, 1.0], [0.5, 5.0, 0.5]) == Estimate(2.0, 2.0, 2.0)


def test_every_round_runs_all_in_an_order_that_rotates() -> None:
    called: list[str] = []

    def step(name: str) -> None:
        called.append(name)
        time.sleep(0.021)  # longer than a block, so that each call is a measurement

    times = step_seconds({n: (lambda n=n: step(n)) for n in "abc"}, "cpu", rounds=3, warm_up=1)  # type: ignore[misc]
    assert "".join(called) == "abc" + "abc" + "bca" + "cab"
    assert all(len(seconds) == 3 and min(seconds) >= 0.02 for seconds in times.values())


def test_a_short_step_is_timed_in_blocks_and_reported_for_one() -> None:
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.002)

    seconds = step_seconds({"only": step}, "cpu", rounds=2, warm_up=3)["only"]
    per_round = (calls - 3) / 2
    assert 4 <= per_round <= 10
    assert all(0.002 <= s < 0.006 for s in seconds)


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        (table(k10=0.5, k100=0.9, k1000=1.2, k10000=2.0), Crossover(1_000_000, 100_000, ())),
        (table(k10=0.5, k100=0.9, k1000=0.95), Crossover(None, None, ())),
        (table(k10=1.1, k100=1.5), Crossover(10_000, None, ())),
        (table(k10=1.1, k100=0.9, k1000=1.3), Crossover(1_000_000, 100_000, (10_000,))),
        (table(k10=0.9, k100=1.4, k1000=0.9), Crossover(None, None, (100_000,))),
        (table(k10=0.5, k100=(0.99, 1.2, 1.3), k1000=1.2), Crossover(1_000_000, 100_000, ())),  # not three in four
        (table(k1000=2.0, k10=0.5), Crossover(1_000_000, 10_000, ())),  # in any order
    ],
    ids=["in the middle", "never", "always", "after a relapse", "only once", "within the noise", "unsorted"],
)
def test_the_crossover(speeds: dict[int, Estimate], expected: Crossover) -> None:
    assert crossover(speeds) == expected


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        (table(k10=0.5, k1200=1.3, k9000=2.5), ["from 1.2M parameters on", "0.50x as fast at 10k", "2.50x as fast"]),
        (table(k10=0.5, k1200=0.7), ["no size from which on it is faster", "at best it is 0.70x as fast (at 1.2M)"]),
        (table(k10=1.5, k1200=1.7), ["at every size measured, from 10k parameters on"]),
        (table(k10=0.9, k100=1.4, k1000=0.9), ["no size from which on", "faster at 100k only"]),
        (table(k250=0.5), ["takes 2.00x fp32's time a step, at 250k parameters"]),
    ],
)
def test_the_sentence_names_the_size_and_the_numbers(speeds: dict[int, Estimate], words: list[str]) -> None:
    sentence = crossover_sentence("fp16", "simulated", speeds)
    assert sentence.startswith("fp16 (simulated)")
    assert all(part in sentence for part in words), sentence


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not measured (in processes, of seconds each): what a test asks is something else."""
    monkeypatch.setattr(runner, "training_peak", lambda *_: 1)


def test_a_scenarios_rows(unmeasured: None) -> None:
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


def test_the_final_loss_is_that_of_the_same_training_done_by_hand(unmeasured: None) -> None:
    shared, _ = setting(precisions=("fp32",), repeats=1)
    (row,) = run_scenario(SCENARIOS["warmup"], SMALL, 32, shared)
    runner = Runner(Contender(SMALL, "fp32", "cpu"), seed=0)
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
    precision: str, batch: int, measured: tuple, unmeasured: None
) -> None:
    shared, _ = setting(precisions=(precision,), repeats=1)
    (row,) = run_scenario(SCENARIOS["warmup"], SMALL, batch, shared)
    assert (row["batch_size"], row["steps"], row["speed_up"]) == measured


def test_skipped_and_retried_steps_are_counted(unmeasured: None, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_sizes_rows(unmeasured: None) -> None:
    shared, refused = setting(repeats=1)
    rows = run_size(SMALL, 64, shared)
    assert not refused
    assert [(row["scenario"], row["precision"]) for row in rows] == [("size", p) for p in ("fp32", "bf16", "fp16")]
    for row in rows:
        assert list(row) == list(COLUMNS)
        assert row["samples_per_s"] == pytest.approx(64 / row["duration_s"])
        assert row["final_loss"] is None
        assert row["speed_up_low"] <= row["speed_up"] <= row["speed_up_high"]
        assert row["parameters"] == Runner(Contender(SMALL, "fp32", "cpu"), 0).workload.parameters


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.variants), "bf16"])
def test_peak_memory_of_a_process_is_at_least_weights_gradients_and_moments(precision: str) -> None:
    few, many = (Contender(Source(parameters=n), precision, "cpu") for n in (10_000, 4_000_000))
    small, large = training_peak(few, 8), training_peak(many, 8)
    assert small is not None
    assert large is not None
    # AdamW in fp32: weights, gradients, two moments of 4 bytes; bf16 may hold a copy of weights and their gradients
    assert 4 * 4 * 4e6 * 0.97 <= large <= 4 * 4 * 4e6 * 1.6 + 16e6
    assert small < 16e6  # and a large model's memory does not stay in a small one's row
    assert 60 << 20 < (peak_growth(lambda: bytearray(64 << 20), "cpu") or 0) < 80 << 20


def test_out_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner, "training_peak", full)
    with pytest.raises(MantissaError, match=r"residual MLP of 5k with batches of 16 does not fit on cpu in 3 prec"):
        run_size(SMALL, 16, setting(repeats=1)[0])


def test_csv_and_json_hold_the_same_rows(tmp_path: Path) -> None:
    rows = [dict.fromkeys(COLUMNS) | {"scenario": "size", "duration_s": 0.1 * i, "steps": i} for i in range(3)]
    rows[2]["final_loss"] = float("inf")
    write_csv(tmp_path / "bench.csv", rows)
    rows_of.write(tmp_path / "bench.jsonl", rows)
    with (tmp_path / "bench.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    assert list(table[0]) == list(COLUMNS)
    assert [list(line) for line in lines] == [list(COLUMNS)] * 3
    for row, line, cells in zip(rows, lines, table, strict=True):
        for name, value in row.items():
            assert line[name] == ("Infinity" if value == float("inf") else value)
            assert cells[name] == ("" if value is None else str(value))
