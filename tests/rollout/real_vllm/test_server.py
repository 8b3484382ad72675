"""The real server: the command that starts it, two runs one after another, the samples of an engine in process."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch
import yaml

from mantissa.base.errors import MantissaError
from mantissa.kernels import resolve, rollout_kernels
from mantissa.precision import PrecisionPolicy
from mantissa.rl import make_config
from mantissa.rl.config.run import apply_overrides
from mantissa.rl.engines import vllm_start
from mantissa.rl.policy import load_policy
from mantissa.rl.session import start
from mantissa.rollout import Request, SamplingParams, VllmEngine
from mantissa.runs.directory import RunDirectory
from mantissa.tasks import build_task
from processes import free_port, until
from vllm_recipe import RECIPE

pytestmark = pytest.mark.vllm
PARAMS = SamplingParams(max_tokens=10, temperature=0.8)
REQUESTS = [Request((5, 6, 7), seed=1, samples=4), Request((9, 2), seed=2, samples=3)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture(scope="module")
def served(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that the command started, in fp32; ended by Ctrl-C, which must be clean."""
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "mantissa", "serve", str(recipe), "precision=fp32", "--port", str(port)]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, preexec_fn=_interruptible)
    until(lambda: "ready: " in log.read_text(), process)
    assert f"rollout.vllm.server=http://127.0.0.1:{port}" in log.read_text()
    yield f"http://127.0.0.1:{port}"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0, log.read_text()


def _interruptible() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell's children ignore it


def test_a_run_on_a_server(served: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    values = apply_overrides(copy.deepcopy(RECIPE), [f"rollout.vllm.server={served}", f"run_dir={folder}"])
    start(make_config(values, "test"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/version"] for row in rows] == [0, 2]
    for row in rows:
        assert 0 < row["gap/abs_logp_diff_mean"] < 1e-6  # as in process: fp32, and new weights each step
    table = {row["role"]: row for row in RunDirectory.open(folder).environment["precision"]}
    assert f"vLLM 0.32.0 at {served} runs in float32" in table["rollout"]["evidence"]


def test_the_samples_are_those_of_an_engine_here(served: str) -> None:
    """In fp32, where no two probabilities are close: token for token, log-probs within rounding."""
    config = make_config(copy.deepcopy(RECIPE), "test")
    resolved = resolve(PrecisionPolicy(), "cpu")
    policy, _ = load_policy(config.model, build_task(config.task, 0), 0)
    wanted = vllm_start(config.rollout, resolved, policy.config, torch.device("cpu"))
    there = VllmEngine(wanted, rollout_kernels(resolved), server=served)
    here = VllmEngine(wanted, rollout_kernels(resolved))
    try:
        weights = {name: 2 * weight.detach() for name, weight in policy.named_parameters()}
        for engine in (there, here):
            engine.sync(weights, 1)
        theirs, ours = (engine.generate(REQUESTS, PARAMS, 1) for engine in (there, here))
        assert [[s.tokens for s in group] for group in theirs] == [[s.tokens for s in group] for group in ours]
        for left, right in zip(chain(*theirs), chain(*ours), strict=True):
            assert (left.logp_T - right.logp_T).abs().max() < 1e-5
        with pytest.raises(MantissaError, match="is in use by another run"):
            VllmEngine(wanted, rollout_kernels(resolved), server=served)
    finally:
        there.close()
        here.close()


def test_a_run_of_another_recipe_is_told(served: str) -> None:
    overrides = [f"rollout.vllm.server={served}", "precision=bf16"]
    with pytest.raises(MantissaError, match=r"another policy: dtype=float32, and this recipe has bfloat16; start it"):
        start(make_config(apply_overrides(copy.deepcopy(RECIPE), overrides), "test"))
