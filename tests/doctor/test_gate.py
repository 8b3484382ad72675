"""The gate: when it looks, what it says, that it stops only when it is told to, and that it never raises."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dumps
from mantissa.base.errors import MantissaError
from mantissa.doctor.diagnosis import Verdict
from mantissa.doctor.gate import Gate


def batch(size: float = 0.05, by: float = 0.0) -> tuple[Any, ...]:
    """96 rows as a trainer has them; ``by`` is added to the learner's last token."""
    rows = dumps.healthy(size=size)
    learner = np.stack([each.learner_logp for each in rows])
    learner[:, -1] += by
    return (
        [[*each.tokens[:3].tolist(), each.group] for each in rows],
        torch.tensor(np.stack([r.tokens[3:] for r in rows])),
        torch.ones(len(rows), 16), torch.tensor(np.stack([r.rollout_logp for r in rows])), learner,
    )  # fmt: skip


def test_a_healthy_batch_is_called_healthy_and_nothing_is_said() -> None:
    lines: list[str] = []
    gate = Gate(every=10, on_fault="stop", say=lines.append)
    found = gate.check(0, *batch(), temperature=1.0, rollout_format="bf16", learner_format="bf16")
    assert found is not None
    assert found.verdict is Verdict.HEALTHY
    assert not gate.stop
    assert not lines


@pytest.mark.parametrize(("on_fault", "stops"), [("warn", False), ("stop", True)])
def test_a_fault_is_said_with_what_helps(on_fault: Any, stops: bool) -> None:
    lines: list[str] = []
    gate = Gate(on_fault=on_fault, say=lines.append)
    found = gate.check(3, *batch(by=-4.0), rollout_format="bf16")
    assert found is not None
    assert found.fault is not None
    assert found.fault.name == "end_token"
    assert gate.stop is stops
    assert "step 3" in lines[0]
    assert "What helps: " in lines[0]


def test_it_looks_first_then_every_so_many_steps_and_after_a_sync() -> None:
    gate = Gate(every=5, say=lambda line: None)
    looked = []
    for step in range(12):
        if step == 7:
            gate.after_sync()
        if gate.check(step, *batch()) is not None:
            looked.append(step)
    assert looked == [0, 5, 7, 10]


def test_small_batches_are_gathered() -> None:
    gate = Gate(every=100, sequences=64)
    prompts, *tables = batch()
    found = [gate.check(step, prompts[:32], *(each[:32] for each in tables)) for step in range(4)]
    assert [each is not None for each in found] == [False, True, False, False]


def test_what_cannot_be_read_is_said_once_and_never_raised() -> None:
    lines: list[str] = []
    gate = Gate(every=1, say=lines.append)
    prompts, responses, mask, x, y = batch()
    for step in range(3):
        assert gate.check(step, prompts, responses, mask, x[:, :3], y) is None
    assert len(lines) == 1
    assert "expected tables of one shape" in lines[0]


@pytest.mark.parametrize("wrong", [{"every": 0}, {"on_fault": "panic"}, {"sequences": 1}])
def test_what_does_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(MantissaError, match="expected every of 1 or more"):
        Gate(**wrong)


def test_sequences_of_older_weights_are_seen_beside_the_last_healthy_ones(tmp_path: Path) -> None:
    """Each batch is of one age, which alone would only be too large a gap."""
    gate, lines = Gate(every=1, on_fault="stop", say=lambda line: lines.append(line)), list[str]()
    assert gate.check(1, *batch(), rollout_format="bf16", rollout_version=0, learner_version=0) is not None
    assert not gate.stop
    with_age = {"rollout_version": [0] * 96, "learner_version": 1}
    found = gate.check(2, *batch(size=0.6), rollout_format="bf16", **with_age)
    assert found is not None
    assert found.fault is not None
    assert found.fault.name == "stale"
    assert gate.stop
    assert gate.write_page(tmp_path).read_text().count("stale weights in the rollout") >= 1
    alone = Gate(every=1, say=lambda line: None).check(2, *batch(size=0.6), rollout_format="bf16", **with_age)
    assert alone is not None
    assert alone.verdict is Verdict.LARGE or alone.fault is None or alone.fault.name != "stale"


def test_a_page_before_a_diagnosis_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MantissaError, match="no diagnosis yet"):
        Gate().write_page(tmp_path)


def test_a_habit_of_rounding_stops_nothing_within_its_formats_size() -> None:
    gate = Gate(on_fault="stop", say=lambda line: None)
    found = gate.check(1, *batch(by=-4.0), rollout_format="bf16")
    assert found is not None
    assert found.fault is not None
    assert gate.wrong(found)
    named = dataclasses.replace(found.fault, name="half_logits")
    habit = dataclasses.replace(found, fault=named, figures=found.figures | {"u_rms": 0.1})
    assert not gate.wrong(habit)
    assert gate.wrong(dataclasses.replace(habit, figures=found.figures | {"u_rms": 0.2}))
    assert gate.wrong(dataclasses.replace(habit, second=found.fault))


def test_the_first_healthy_look_is_the_jobs_own_measure() -> None:
    """A gap twenty times the job's own is within what the table allows fp16: the reported corrupted layer."""
    lines: list[str] = []
    gate = Gate(every=1, on_fault="stop", say=lines.append)
    formats = {"rollout_format": "fp16", "learner_format": "fp16"}
    first = gate.check(1, *batch(size=0.0016), **formats)
    assert first is not None
    assert first.verdict is Verdict.HEALTHY
    again = gate.check(2, *batch(size=0.0035), **formats)  # twice its own: a training moves that much
    assert again is not None
    assert again.verdict is Verdict.HEALTHY
    assert "is of the usual size in this job, fp16: k3 " in again.headline
    assert not gate.stop
    found = gate.check(3, *batch(size=0.03), **formats)
    assert found is not None
    assert gate.wrong(found)
    assert gate.stop
    assert "was its own, so something changed" in lines[-1]
    assert found.remedies[0] == "sync_weights"
    alone = Gate(every=1, say=lines.append).check(3, *batch(size=0.03), **formats)
    assert alone is not None
    assert alone.verdict is Verdict.HEALTHY  # without a first look it is within the table


@pytest.mark.parametrize("remembered", [True, False])
def test_a_resumed_job_is_held_to_its_measure(remembered: bool) -> None:
    """Its checkpoint was JSON in between."""
    formats = {"rollout_format": "fp16", "learner_format": "fp16"}
    before, after = (Gate(every=1, on_fault="stop", say=lambda line: None) for _ in range(2))
    assert before.check(1, *batch(size=0.0016), **formats) is not None
    if remembered:
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert after.state_dict() == before.state_dict()
    assert after.check(2, *batch(size=0.03), **formats) is not None
    assert after.stop is remembered


@pytest.mark.parametrize(
    "state",
    [
        None, [], {}, {"healthy": None}, {"healthy": 1}, {"healthy": [3]}, {"healthy": [{}]},
        {"healthy": [{"size_of_u": float("nan")}]}, {"healthy": [{"size_of_u": -1.0}]},
        {"healthy": [{"size_of_u": "0.1"}]}, {"healthy": [{"size_of_u": 0.1, "colour": 1}]},
        {"healthy": [{"size_of_u": 0.1}, {"size_of_u": 0.1, "temperature": [1]}]},
    ],
)  # fmt: skip
def test_what_is_no_measure_is_refused_whole(state: Any) -> None:
    gate = Gate()
    with pytest.raises(MantissaError, match=r"expected what state_dict\(\) gives"):
        gate.load_state_dict(state)
    assert gate.state_dict() == {"healthy": []}


@pytest.mark.parametrize("exact", [True, False])
def test_a_job_that_was_equal_to_the_bit_has_hardly_a_gap_to_spare(exact: bool) -> None:
    gate = Gate(every=1, on_fault="stop", say=lambda line: None)
    assert gate.check(1, *batch(size=0.0), rollout_format="bf16", learner_format="bf16") is not None
    found = gate.check(2, *batch(size=0.0 if exact else 0.01), rollout_format="bf16", learner_format="bf16")
    assert found is not None
    assert gate.stop is not exact


def test_other_formats_have_another_measure() -> None:
    """A run that falls back from fp16 to bf16 has eight times the gap, and nothing is wrong."""
    gate = Gate(every=1, on_fault="stop", say=lambda line: None)
    assert gate.check(1, *batch(size=0.006), rollout_format="fp16", learner_format="fp16") is not None
    found = gate.check(2, *batch(size=0.05), rollout_format="bf16", learner_format="bf16")
    assert found is not None
    assert found.verdict is Verdict.HEALTHY
    assert not gate.stop


def look(size: float, seed: int, length: int = 3) -> tuple[Any, ...]:
    """64 rows of 16 prompts."""
    rows = dumps.healthy(16, 4, length, size, seed)
    tables = [np.stack(each) for each in zip(*((r.tokens[3:], r.mask, r.rollout_logp, r.learner_logp) for r in rows),
                                             strict=True)]  # fmt: skip
    return [[*each.tokens[:3].tolist(), each.group] for each in rows], *tables


FP16 = {"rollout_format": "fp16", "learner_format": "fp16", "experts": False}


@pytest.mark.parametrize(("experts", "verdict"), [(True, Verdict.HEALTHY), (False, Verdict.UNKNOWN)])
def test_a_look_beyond_the_table_is_no_measure_of_a_job(experts: bool, verdict: Verdict) -> None:
    """Single tokens make it: not what later looks are held to, and without routers not healthy either."""
    gate = Gate(every=1, on_fault="stop", say=lambda line: None)
    prompts, *tables = look(0.02, 0, length=16)
    tables[3][20, 7] -= 1.5
    found = gate.check(1, prompts, *tables, **FP16 | {"experts": experts})
    assert found is not None
    assert found.verdict is verdict
    assert not gate.stop
    assert found.figures["u_rms"] > 0.04
    assert gate.state_dict() == {"healthy": []}
    gate.check(2, *look(0.02, 1, length=16), **FP16 | {"experts": experts})
    assert [row["size_of_u"] < 0.04 for row in gate.state_dict()["healthy"]] == [True]
