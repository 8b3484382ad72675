"""Settings: what is refused, and in what words; and what is read of a reference run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mantissa.base.errors import MantissaError
from mantissa.base.files import JsonLines
from mantissa.guard import GuardConfig, ReferenceRun


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 0}, "guard: window=0: expected greater than or equal to 1"),
        ({"window": True}, "window: expected a number, got True"),
        ({"min_steps": 0}, "min_steps=0: expected greater than or equal to 1"),
        ({"good_after": -1}, "good_after=-1: expected greater than or equal to 0"),
        ({"max_fall_backs": -1}, "max_fall_backs=-1"),
        ({"nonfinite_in_a_row": 0}, "nonfinite_in_a_row=0"),
        ({"overflow_warn": -0.1}, "overflow_warn=-0.1: expected greater than or equal to 0"),
        ({"overflow_alert": 0.04}, "overflow_alert=0.04: expected a number from overflow_warn=0.05"),
        ({"overflow_fall_back": 1.1}, "overflow_fall_back=1.1: expected less than or equal to 1"),
        ({"overflow_fall_back": 0.05}, "from overflow_alert=0.1"),
        ({"overflow_warn": math.nan}, "overflow_warn=nan"),
        ({"overflow_warn": "5%"}, "overflow_warn: expected a number, without quotes, got '5%'"),
        ({"loss_fall_back": 0.01}, "loss_fall_back=0.01: expected a number from loss_warn=0.05"),
        ({"loss_warn": math.inf}, "loss_warn=inf"),
        ({"loss_floor": 0}, "loss_floor=0: expected greater than 0"),
        ({"slow_warn": 1.5}, "slow_warn=1.5: expected less than or equal to 1"),
        ({"divergence": 1.0}, "divergence=1.0: expected greater than 1"),
        ({"gate_alert": 0.4}, "gate_alert=0.4: expected a number from gate_warn=0.5"),
        ({"to": "fp16"}, "to='fp16': expected 'bf16' or 'fp32'"),
        ({"reference": 3}, "reference=3: expected a valid string"),
        ({"gates": [1]}, "gates=[1]: expected a valid dictionary"),
        ({"gates": {"gap/kl": 0.1}}, "gates.gap/kl=0.1: expected a valid tuple"),
        ({"gates": {"gap/kl": [None, None]}}, "gap/kl: expected low up to high, and at least one end"),
        ({"gates": {"gap/kl": [1, 0]}}, "expected low up to high"),
        ({"gates": {"gap/kl": [0, "1"]}}, "gates.gap/kl.1='1': expected a valid number"),
        ({"gates": {"gap/kl": [0, math.inf]}}, "gates.gap/kl.1=inf"),
        ({"window": 0, "windows": 3}, "unknown setting 'windows'; did you mean 'window'?"),
    ],
)
def test_what_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(MantissaError) as raised:
        GuardConfig(**values)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_it_is_json_and_back_and_the_callers_gates_stay_the_callers() -> None:
    gates: dict[str, Any] = {"gap/kl": [None, 0.1]}
    config = GuardConfig(window=7, divergence=2.5, reference="runs/fp32", to="float32", gates=gates)
    gates["gap/ess"] = [0, 1]
    assert (config.to, config.gates) == ("fp32", {"gap/kl": (None, 0.1)})
    assert GuardConfig(**json.loads(json.dumps(config.model_dump(mode="json"), allow_nan=False))) == config
    assert GuardConfig(window=7) != GuardConfig()


def test_thresholds_on_their_bounds_are_accepted() -> None:
    config = GuardConfig(
        overflow_warn=0, overflow_alert=1, overflow_fall_back=1, slow_warn=0, loss_warn=0, good_after=0
    )
    assert (config.enough, GuardConfig(window=5).enough, GuardConfig(min_steps=3).enough) == (20, 5, 3)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for row in rows:
        JsonLines(path / "metrics.jsonl").append(row)
    return path


ROWS = [
    {"step": 1, "train/loss": 4.0, "time/step": 9.0, "precision/format": "fp32"},
    {"step": 2, "train/loss": math.nan, "time/step": 1.0},
    {"step": 3, "time/step": 2.0},
    {"step": 5, "train/loss": -2.0, "time/step": math.inf},
]


def test_a_reference_is_read_from_a_folder_or_its_file(tmp_path: Path) -> None:
    run = write(tmp_path / "run", ROWS)
    reference = ReferenceRun.read(run)
    assert reference.loss == {1: 4.0, 5: -2.0}
    assert (reference.seconds, reference.format, reference.rows) == (2.0, "fp32", 4)
    assert [reference.first_magnitude(n) for n in (1, 2, 50)] == [4.0, 3.0, 3.0]
    assert replace(ReferenceRun.read(run / "metrics.jsonl"), path=str(run)) == reference
    assert replace(ReferenceRun.of(ROWS), path=str(run)) == reference


@pytest.mark.parametrize("key", ["train/loss", "time/step", "precision/format", "step"])
def test_the_digest_is_of_what_is_compared_and_of_no_more(tmp_path: Path, key: str) -> None:
    changed = [dict(row) for row in ROWS]
    changed[0][key] = {"precision/format": "bf16", "step": 0}.get(key, 4.5)
    assert ReferenceRun.of(changed).digest != ReferenceRun.of(ROWS).digest
    assert ReferenceRun.of([row | {"optim/lr": 1.0} for row in ROWS]).digest == ReferenceRun.of(ROWS).digest
    run = write(tmp_path / "run", [*ROWS, {"step": 6, "train/loss": 1.0}])
    assert ReferenceRun.read(run).digest != ReferenceRun.of(ROWS).digest == ReferenceRun.read(run, rows=4).digest


def test_what_is_no_reference(tmp_path: Path) -> None:
    with pytest.raises(MantissaError, match="no such folder"):
        ReferenceRun.read(tmp_path / "absent")
    with pytest.raises(MantissaError, match=r"has no metrics\.jsonl"):
        ReferenceRun.read(tmp_path)
    run = write(tmp_path / "other", [{"step": 1, "reward/mean": 1.0}, {"step": 2, "train/loss": math.inf}])
    with pytest.raises(MantissaError, match="is no reference: none of its 2 rows has a finite train/loss or time/step"):
        ReferenceRun.read(run)
    (run / "metrics.jsonl").write_text('{"step": 1, "train/l')
    with pytest.raises(MantissaError, match="has no whole row yet"):
        ReferenceRun.read(run)
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": "a"}\n')
    with pytest.raises(MantissaError, match="expected a number, got 'a'"):
        ReferenceRun.read(run)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(MantissaError, match=r"has no metrics\.jsonl"):
        ReferenceRun.read(run)
