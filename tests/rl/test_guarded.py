"""The guard of a recipe: it falls back live, and what follows has the bits of any run from that checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mantissa.base.errors import MantissaError
from mantissa.guard import GuardConfig, GuardLog, noteworthy, replay
from mantissa.rl import resume
from mantissa.rl.config.run import widened
from mantissa.runs.directory import RunDirectory
from small_run import configure, rows_of, stopped

Train = Callable[..., RunDirectory]
# Some clean updates, then a scale that overflows for as long as anyone waits: an alert, and a fall back a step later.
OVERFLOWS = (
    "steps=10",
    "warm_start.steps=4",
    "task.reward=prefix",
    "evaluation=null",
    "checkpoint={every: 1, keep: 9}",
    "loss_scaling={growth_interval: 6, growth_factor: 1.0e+18, retries: 0}",
    "guard={window: 6, min_steps: 2, good_after: 1, reward_warn: 1, reward_fall_back: 1}",
)
FALLS = "guard={window: 2, min_steps: 2, reward_warn: 0, reward_fall_back: 0}"


@pytest.mark.usefixtures("with_report")
def test_a_run_that_overflows_goes_on_in_bf16_with_the_bits_of_any_run_from_there(
    train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = train(*OVERFLOWS, "algorithm.reference={}")
    rows, said = run.metrics.read(), capsys.readouterr().out
    (fell,) = run.environment["fell_back"]
    at, good = fell["step"], fell["from_step"]
    first = next(row["step"] for row in rows if row["precision/overflows"])
    assert 2 <= good == first - 1 < at - 1  # checkpoints since were in trouble already
    assert (fell["was"], fell["to"]) == ("fp16", "bf16")
    assert [row["precision/format"] for row in rows] == ["fp16"] * at + ["bf16"] * (10 - at)
    updates = {row["step"]: row["optim/updates"] for row in rows}
    assert updates[good] == 6 <= updates[10]
    assert "steps overflowed (fall back above 30%)" in fell["reasons"]
    active = {row["role"]: row["active"] for row in fell["environment"]["precision"]}
    assert active == {"learner": "bf16", "rollout": "bf16", "reference": "fp16", "kv_cache": "bf16"} | dict.fromkeys(
        ("master", "logits"), "fp32"
    )
    assert f"guard: step {first}: alert: overflow" in said
    assert f"guard: step {at}: back to checkpoint step-{good} (update 6), and on in bf16" in said
    assert "precision learner: asked for bf16, active bf16" in said
    page = run.report_path.read_text()
    assert f"After step {at} the guard took the run from fp16 back to the checkpoint of step {good} and on in" in page
    decisions = replay(rows, GuardConfig(window=6, min_steps=2, good_after=1, reward_warn=1, reward_fall_back=1))
    assert GuardLog(run.path).read() == noteworthy(decisions)
    assert [decision.step for decision in decisions if decision.action == "fall back"] == [at]
    # The same weights in a run of bf16 that never heard of a guard.
    twin = stopped(run.path, at, tmp_path / "twin")
    config = run.config | {"precision": {"preset": "bf16", "reference": "fp16"}, "loss_scaling": None, "guard": None}
    (twin / "config.yaml").write_text(yaml.safe_dump(config))
    resume(twin)
    assert [row | {"precision/format": "bf16"} for row in rows_of(twin)[at:]] == rows_of(run.path)[at:]
    weights = "policy/model.safetensors"
    assert (twin / weights).read_bytes() == (run.path / weights).read_bytes()


def test_a_reward_that_falls_is_a_reason_and_fp32_is_as_wide_as_it_gets(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any drop at all: the second stops the run, for nothing is wider."""
    quick = ("steps=20", "warm_start.steps=4", "task.reward=prefix", "evaluation=null", "precision=bf16", FALLS)
    with pytest.raises(MantissaError, match=r"the guard stops the run at step \d+: reward: .* the format is fp32"):
        train(*quick, "guard.to=float32")
    said = capsys.readouterr().out
    assert said.count("and on in fp32") == 1
    assert "below the best window's" in said


@pytest.mark.parametrize(
    ("precision", "to", "roles"),
    [
        ("fp16", "bf16", ("bf16", "bf16", None)),
        ("{preset: fp8-rollout, backend: simulated}", "bf16", ("bf16", "bf16", None)),
        ("{train: fp32, rollout: fp8}", "bf16", ("fp32", "bf16", None)),
        ("{preset: fp16, kernels: exact, check_every: 3}", "fp32", ("fp32", "fp32", None)),
        ("{preset: fp8, backend: simulated}", "fp32", ("fp32", "fp32", "fp8")),
        ("{preset: bf16, reference: fp16}", "fp32", ("fp32", "fp32", "fp16")),
    ],
)
def test_what_becomes_as_wide_and_what_stays(precision: str, to: str, roles: tuple[str, str, str | None]) -> None:
    reference = ["algorithm.reference={}"] if roles[2] else []
    config = configure(f"precision={precision}", *reference, "guard={}")
    wide, was = widened(config, to).precision, config.precision
    assert (wide.train, wide.rollout, wide.reference) == roles
    assert (wide.kernels, wide.check_every) == (was.kernels, was.check_every)


def test_a_reference_run_that_is_not_there_leaves_no_folder(train: Train, tmp_path: Path) -> None:
    with pytest.raises(MantissaError, match="nowhere: no such folder"):
        train("steps=1", "warm_start=null", "guard={reference: nowhere}")
    assert not list(tmp_path.glob("run-*"))
