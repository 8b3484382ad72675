"""optimizer.moments=8bit in whole runs: resumed bit for bit, with adapters and FlowRL's head, and said on the screen.

The library's update runs eagerly here, as in ``tests/training/test_moments.py``, which says why and holds the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mantissa.rl.session import resume
from mantissa.runs.directory import RunDirectory
from small_run import contents, stopped

WIDE = ("optimizer.moments=8bit", "model.fresh.hidden_size=64", "model.fresh.intermediate_size=128")
SHORT = ("warm_start=null", "evaluation=null", "task.reward=prefix")
pytestmark = pytest.mark.usefixtures("_eager")


@pytest.fixture
def _eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("torchao.optim", reason="needs torchao")
    monkeypatch.setenv("CXX", sys.executable)  # nothing is compiled, so any program will do
    with torch.compiler.set_stance("force_eager"):
        yield


def test_a_resumed_run_has_the_bits_of_one_left_alone(
    train: Callable[..., RunDirectory], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(*WIDE, *SHORT, "steps=4")
    said = "49,152 of 62,656 values (6 of 24 tensors), in blocks of 256; the others, below 4,096 values or not whole"
    assert f"precision moments: asked for 8bit, active 8bit (torchao kernels); {said}" in capsys.readouterr().out
    rows = {row["role"]: row["reason"] for row in run.environment["precision"]}
    assert rows["moments"].startswith(said)
    assert "Adam moments are the next line" in rows["master"]
    assert run.metrics.read()[-1]["optim/updates"] == 8
    again = stopped(run.path, 2, tmp_path / "again")
    resume(again)
    assert "resumed after step 2" in capsys.readouterr().out
    assert contents(again) == contents(run.path)


def test_it_goes_with_adapters_flowrls_head_and_sampling_ahead(train: Callable[..., RunDirectory]) -> None:
    flowrl = ("algorithm.loss={kind: flowrl, partition_lr: 0.005}", "algorithm.reference={}")
    ahead = ("rollout.max_policy_lag=2", "precision=bf16", "optimizer.warmup=3")
    rows = train(*WIDE, *SHORT, "model.lora={rank: 64, alpha: 64}", "steps=2", *flowrl, *ahead).metrics.read()
    assert rows[-1]["optim/updates"] == 4
    assert [row["optim/lr"] for row in rows] == pytest.approx([2e-3 / 3, 1e-3])
