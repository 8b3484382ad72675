"""A run whose rollout emulates a serving engine: who computes what, what is said of it, and the gap that it has."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from html_page import Page
from mantissa.base.errors import MantissaError
from mantissa.kernels import EmulatedKernels, Emulation, SimulatedKernels, resolve, rollout_kernels
from mantissa.kernels.roles import emulated
from mantissa.precision import PrecisionPolicy
from mantissa.rl.assemble import Parts
from mantissa.rl.config.run import RunConfig, widened
from mantissa.runs.directory import RunDirectory
from small_run import QUICK

Train = Callable[..., RunDirectory]
EMULATED = "rollout.engine=emulated"
SERVING = "norm=fused, rope=half, products=split, attention=blocks, activation=fp32, logits=half"


@pytest.mark.usefixtures("bf16_is_simulated")
def test_the_rollout_alone_has_the_switches(made: Callable[..., Parts]) -> None:
    parts = made(EMULATED, "rollout.emulate={norm: fused, tensor_parallel: 2}", "precision=bf16-train-fp16-rollout")
    engine, learner = parts.sampler.engine.kernels, parts.learner.kernels
    assert isinstance(engine, EmulatedKernels)
    assert engine.emulation.on == {"norm": "fused", "tensor_parallel": 2}
    assert (engine.format.name, engine.weights_on_grid, engine.logits_format.name) == ("fp16", True, "fp32")
    assert type(learner) is SimulatedKernels
    assert "overflows 131072 to inf" in parts.evidence["rollout"]
    in_fp8 = rollout_kernels(emulated(resolve(PrecisionPolicy.parse("fp8-rollout"), "cpu"), Emulation.serving()))
    assert isinstance(in_fp8, EmulatedKernels)
    assert (in_fp8.fp8 is not None, in_fp8.logits_format.name) == (True, "bf16")


@pytest.mark.usefixtures("bf16_is_simulated")
def test_a_run_says_which_switches_are_on_and_shows_the_gap(
    train: Train, with_report: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(*QUICK, "precision=bf16", "evaluation=null", "model.fresh.initializer_range=0.1", EMULATED)
    screen = " ".join(capsys.readouterr().out.split())
    for said in (screen, " ".join(Page(run.report_path.read_text()).text.split())):
        assert f"emulated: {SERVING}" in said
        assert "the rollout's are rounded to bf16" in said
        assert "vLLM" not in said
    rows = {row["role"]: row for row in json.loads((run.path / "environment.json").read_text())["precision"]}
    assert SERVING in rows["rollout"]["reason"]
    assert rows["rollout"]["kernels"] == "emulated"
    assert "holds logits in bf16" in rows["rollout"]["evidence"]
    assert rows["learner"]["kernels"] == "simulated"
    assert RunConfig(**run.config).rollout.emulate == Emulation.serving()  # written out, as a resume reads it
    # of the engine's own, unemulated, 0 to 1e-5
    assert max(row["gap/abs_logp_diff_mean"] for row in run.metrics.read()) > 1e-4


def test_in_fp32_it_says_what_does_nothing(made: Callable[..., Parts], configure: Callable[..., RunConfig]) -> None:
    row = made("precision=fp32", EMULATED).precision.rollout
    assert row.reason.endswith("in fp32 norm, rope, activation, logits do nothing")
    assert made("precision=fp16", EMULATED).precision.rollout.reason.endswith("values on their grids in fp32")
    fell_back = widened(configure("precision=fp16", EMULATED, "guard={}"), "fp32")
    assert fell_back.rollout.emulate == Emulation.serving()


def test_shards_must_be_equal(made: Callable[..., Parts]) -> None:
    with pytest.raises(MantissaError, match="tensor_parallel=3: the model has 2 attention heads and 64 features"):
        made(EMULATED, "rollout.emulate={tensor_parallel: 3}")
