"""The profile: parts that add up to the step, operations that are the step's, and a trainer left as it was."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from mantissa.bench.command import PARTS, Line, Profile, profile_runner
from mantissa.bench.runner import Contender, Runner
from mantissa.bench.workload import Source


class Slow(torch.autograd.Function):
    """The identity, whose backward sleeps for 4 ms."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        time.sleep(0.004)
        return grad


def sleepy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    time.sleep(0.012)
    return Slow.apply((model(batch[0]).float() - batch[1]).square().mean())


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.variants), "fp16"])
def test_parts_add_up_to_the_step_and_each_is_found(precision: str, tmp_path: Path) -> None:
    runner = Runner(Contender(Source(parameters=20_000), precision, "cpu"), seed=0)
    runner.workload = type(runner.workload)(runner.workload.model, runner.workload.make_batch, sleepy)
    autocast = runner.trainer.autocast
    found = profile_runner(runner, 32, tmp_path)
    assert runner.trainer.autocast is autocast
    assert not runner.trainer.optimizer._optimizer_step_pre_hooks
    parts = {part.name: part for part in found.parts}
    assert list(parts)[:3] == list(PARTS)
    assert sum(part.milliseconds for part in found.parts) == pytest.approx(found.step_milliseconds)
    assert sum(part.share for part in found.parts) == pytest.approx(1)
    assert parts["forward"].milliseconds >= 12
    assert parts["backward"].milliseconds >= 4
    assert all(part.calls >= 1 for part in found.parts)
    # weights' gradients are made in the backward and are all that it keeps, up to what it frees of the forward's
    assert parts["backward"].kept_bytes <= 4 * runner.workload.parameters


def test_operations_are_sorted_by_their_own_time_and_the_trace_holds_the_parts(tmp_path: Path) -> None:
    runner = Runner(Contender(Source(parameters=300_000), "fp32", "cpu"), seed=0)
    found = profile_runner(runner, 64, tmp_path)
    own = [line.milliseconds for line in found.operations]
    assert own == sorted(own, reverse=True)
    assert sum(line.share for line in found.operations) <= 1.001
    names = [line.name for line in found.operations]
    assert "aten::mm" in names or "aten::addmm" in names
    assert not any(name.startswith("mantissa/") for name in names)
    products = next(line for line in found.operations if line.name == "aten::addmm")
    assert products.calls % 6 == 0  # first, four blocks, last (strict promotion dispatches each again)
    events = json.loads((tmp_path / "trace-fp32.json").read_text())["traceEvents"]
    traced = [event.get("name") for event in events]
    assert [traced.count(f"mantissa/{part}") for part in ("step", *PARTS)] == [5] * 4
    text = (tmp_path / "profile-fp32.txt").read_text()
    assert text == found.text()
    assert "rest: unscale" in text
    assert "fp32 on cpu" in text


@pytest.mark.parametrize("length", [3, 43, 44, 45, 90])
def test_a_long_name_is_cut_to_its_column_and_one_that_fits_is_not(length: int) -> None:
    name = "".join(chr(97 + i % 26) for i in range(length))
    found = Profile("fp32", "cpu", 8.0, (Line("part", 2.0, 0.25, 1, 0.0),), (Line(name, 2.0, 0.25, 3, 5e5),))
    head, line = found.text().splitlines()[-2:]
    assert line[:44] == (name.ljust(44) if length <= 44 else name[:41] + "...")
    assert line[44:].split() == ["2.000", "25.0%", "3", "+0.50", "MB"]
    assert len(line) == len(head)
