"""optimizer.moments=8bit in whole runs: resumed bit for bit, with adapters, with FlowRL's head, and said on the screen.

The library's update runs eagerly here, as in ``tests/training/test_moments.py``, which says why.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

from mantissa.errors import MantissaError
from mantissa.rl.assemble import Parts
from mantissa.rl.config import RunConfig
from mantissa.rl.session import resume
from mantissa.runs.directory import RunDirectory
from mantissa.runs.metrics import deterministic

WIDE = ("optimizer.moments=8bit", "model.fresh.hidden_size=64", "model.fresh.intermediate_size=128")
QUICK = ("warm_start=null", "evaluation=null", "task.reward=prefix")


@pytest.fixture
def _eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("torchao.optim", reason="needs torchao")
    monkeypatch.setenv("CXX", sys.executable)  # nothing is compiled, so any program will do
    with torch.compiler.set_stance("force_eager"):
        yield


def forget_the_end(run: RunDirectory) -> None:
    """Leave the run as it was when step 2's checkpoint had been written and nothing after it."""
    for path in (run.path / "checkpoints" / "step-4", run.path / "policy"):
        shutil.rmtree(path)


@pytest.mark.usefixtures("_eager")
def test_a_resumed_run_has_the_bits_of_one_left_alone(
    train: Callable[..., RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(*WIDE, *QUICK, "steps=4")
    said = "49,152 of 62,656 values (6 of 24 tensors), in blocks of 256; the others, below 4,096 values or not whole"
    assert f"precision moments: asked for 8bit, active 8bit (torchao kernels); {said}" in capsys.readouterr().out
    rows = {row["role"]: row["reason"] for row in run.environment["precision"]}
    assert rows["moments"].startswith(said)
    assert "Adam moments are the next line" in rows["master"]

    def contents() -> dict[str, object]:
        files = [*run.path.glob("checkpoints/step-4/*"), *run.path.glob("policy/*.safetensors")]
        return {str(path): path.read_bytes() for path in files} | {
            "metrics": [deterministic(row) for row in run.read_metrics()]
        }

    before = contents()
    assert before["metrics"][-1]["optim/updates"] == 8  # type: ignore[index]
    forget_the_end(run)
    resume(run.path)
    assert "resumed after step 2" in capsys.readouterr().out
    assert contents() == before


@pytest.mark.usefixtures("_eager")
def test_a_run_does_not_go_on_with_moments_of_the_other_precision(train: Callable[..., RunDirectory]) -> None:
    run = train(*WIDE[1:], *QUICK, "steps=2")
    assert "moments" not in {row["role"] for row in run.environment["precision"]}
    recipe = yaml.safe_load((run.path / "config.yaml").read_text())
    assert recipe["optimizer"]["moments"] == "fp32"
    recipe["optimizer"]["moments"] = "8bit"
    (run.path / "config.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(
        MantissaError, match=r"^checkpoint's moments of .+ are fp32, this run's are 8bit; set optimizer"
    ):
        resume(run.path)


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize(
    "overrides",
    [
        ("model.lora={rank: 64, alpha: 64}",),
        ("algorithm.loss={kind: flowrl, partition_lr: 0.005}", "algorithm.reference={}"),
        ("rollout.max_policy_lag=2", "precision=bf16", "optimizer.warmup=3"),
    ],
    ids=["lora", "flowrl", "ahead"],
)
def test_it_goes_with_the_other_features(overrides: tuple[str, ...], train: Callable[..., RunDirectory]) -> None:
    run = train(*WIDE, *QUICK, "warm_start={steps: 2, problems: 4}", "steps=2", *overrides)
    rows = run.read_metrics()
    assert rows[-1]["optim/updates"] == 4
    assert all(row["optim/lr"] > 0 for row in rows)
    if "rollout.max_policy_lag=2" in overrides:
        assert [row["optim/lr"] for row in rows] == pytest.approx([2e-3 / 3, 1e-3])


@pytest.mark.usefixtures("_eager")
def test_flowrls_head_steps_at_its_own_rate(
    configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts]
) -> None:
    config = configure(*WIDE, "algorithm.loss={kind: flowrl, partition_lr: 0.005}", "algorithm.reference={}")
    learner = parts_of(config).learner
    before = {name: parameter.detach().clone() for name, parameter in learner.step.parameters.items()}

    def backward(scale: float) -> None:
        for parameter in learner.step.parameters.values():
            parameter.grad = torch.full_like(parameter, scale * 1e-2)

    assert learner.step.run(backward).applied
    for name, parameter in learner.step.parameters.items():
        rate = 0.005 if name.startswith("partition.") else 0.001
        moved = (before[name] - parameter).detach().abs()
        torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=1e-2, atol=0)


def test_adapters_too_small_for_a_block_are_refused(
    configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts], request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("_eager")
    with pytest.raises(
        MantissaError, match=r"optimizer\.moments=8bit does nothing here: of the \d+ tensors that train"
    ):
        parts_of(configure(*WIDE, "model.lora={rank: 2, alpha: 4}"))


def test_without_the_library_no_folder_is_left(
    train: Callable[..., RunDirectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(MantissaError, match=r"needs torchao 0\.18 or later, which is not installed; pip install"):
        train(*WIDE)
    assert not list(tmp_path.glob("run-*"))
