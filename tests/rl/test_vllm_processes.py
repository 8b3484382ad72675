"""``mantissa train`` on two real processes with the stand-in for vLLM: one of each, or one server for both.

The real one is in ``tests/rollout/real_vllm``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import fake_vllm
import small_run
from fake_vllm_server import FakeServer
from mantissa.base.tensors import digest
from mantissa.kernels import resolve
from mantissa.model import Decoder
from mantissa.rl import make_config
from mantissa.rl.engines import vllm_start
from mantissa.rl.policy import load_policy
from mantissa.runs.directory import RunDirectory
from mantissa.tasks import build_task

pytestmark = pytest.mark.slow
SUPPORT = Path(fake_vllm.__file__).parent
KINDS = ("ddp", "fsdp2")
TWO = {kind: ("nproc=2", f"parallel={kind}") for kind in KINDS}


RECIPE = small_run.recipe(
    "warm_start=null", "trackers=[]", "precision=fp32", "task.reward=prefix", "rollout.engine=vllm", "steps=2"
)


def train(
    folder: Path, *overrides: str, faults: dict[str, Any] | None = None, installed: bool = True
) -> subprocess.CompletedProcess[str]:
    """A run in ``folder/run``; ``folder/seen`` is what its vLLMs saw."""
    (folder / "seen").mkdir(parents=True)
    (folder / "tmp").mkdir()
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    found = [str(SUPPORT / "stand_in"), str(SUPPORT)] if installed else []
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*found, os.environ.get("PYTHONPATH", "")]),
        "STAND_IN_SEEN": str(folder / "seen"),
        "STAND_IN_FAULTS": json.dumps(faults or {}),
        "TMPDIR": str(folder / "tmp"),
    }
    command = [sys.executable, "-m", "mantissa", "train", str(recipe), f"run_dir={folder / 'run'}"]
    return subprocess.run(
        [*command, *overrides], capture_output=True, text=True, timeout=900, env=environment, check=False
    )


def seen(folder: Path, what: str) -> dict[str, list[Any]]:
    """What each rank's vLLM told of ``what``, in order."""
    told = {}
    for path in sorted((folder / "seen").glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        told[path.stem] = [line[what] for line in lines if what in line]
    return told


def sampled(path: Path) -> list[list[Any]]:
    run = RunDirectory.open(path)
    names = ("step", "problem_id", "sample", "tokens", "rollout_logp", "policy_version", "finish_reason", "reward")
    return [[row[name] for name in names] for step in run.rollout_steps() for row in run.read_rollouts(step)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the same run was made by one process."""
    folder = tmp_path_factory.mktemp("one") / "here"
    done = train(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.variants), "fsdp2"])
def test_each_process_has_a_vllm_and_they_sample_what_one_does(tmp_path: Path, one: Path, kind: str) -> None:
    done = train(tmp_path / "two", *TWO[kind])
    assert done.returncode == 0, done.stderr
    run = RunDirectory.open(tmp_path / "two" / "run")
    assert sampled(run.path) == sampled(one / "run")
    weights = seen(tmp_path / "two", "weights")
    assert weights["0"] == weights["1"]  # read back from each after each load, the whole of a policy in slices as well
    final = {name: str(digest(tensor)) for name, tensor in load_file(run.policy_path / "model.safetensors").items()}
    final["lm_head.weight"] = final["model.embed_tokens.weight"]
    assert weights["1"][-1] == final
    assert len({json.dumps(one) for one in weights["1"]}) >= 3  # those it was tried with, and each step's
    samples, of_one = seen(tmp_path / "two", "samples"), seen(one, "samples")["0"]
    proofs = 2  # one token each, by every process
    assert sum(samples["0"][proofs:]) == sum(samples["1"][proofs:]) == sum(of_one[proofs:]) / 2
    assert seen(tmp_path / "two", "launchers") == {"0": [[]], "1": [[]]}
    folders = seen(tmp_path / "two", "folder")
    assert folders["0"] != folders["1"]
    assert seen(tmp_path / "two", "closed") == {"0": [True], "1": [True]}
    assert not list((tmp_path / "two" / "tmp").glob("mantissa-*"))
    table = {row["role"]: row for row in run.environment["precision"]}
    assert table["rollout"]["evidence"].endswith("; one such vLLM for each of 2 processes")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"breaks": "core died"}, "vLLM 0.32.0 failed: core died; its own messages above say more"),
        ({"keeps": "lm_head"}, "sync: vLLM 0.32.0 computes with other"),
    ],
)
@pytest.mark.variants  # one process: tests/rl/test_engines.py; two threads: tests/rollout/test_vllm_link.py
def test_a_fault_of_one_ends_the_run_with_one_line(tmp_path: Path, fault: dict[str, Any], message: str) -> None:
    done = train(tmp_path / "two", *TWO["ddp"], faults={"1": fault})
    assert done.returncode == 2
    *at_work, last = done.stderr.splitlines()
    assert {*at_work} <= {"loading the model and proving its kernels"}
    assert last.startswith(f"mantissa: error: {message}"), done.stderr
    assert not list((tmp_path / "two" / "tmp").glob("mantissa-*"))  # no weights are left, whoever was stopped


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """What ``mantissa serve`` would have started for the recipe."""
    fake_vllm.install(monkeypatch)
    config = make_config(RECIPE, "test")
    policy, _ = load_policy(config.model, build_task(config.task, config.seed), config.seed)
    assert isinstance(policy, Decoder)
    start = vllm_start(config.rollout, resolve(config.precision, "cpu"), policy.config, torch.device("cpu"))
    (tmp_path / "folder").mkdir()
    made = FakeServer(start, {name: weight.detach() for name, weight in policy.named_parameters()}, tmp_path / "folder")
    yield made
    made.close()


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.variants), "fsdp2"])
def test_one_server_for_both_processes(tmp_path: Path, one: Path, server: FakeServer, kind: str) -> None:
    """In an environment without vLLM. What is sampled is what one process with one of its own samples."""
    done = train(tmp_path / "two", *TWO[kind], f"rollout.vllm.server={server.url}", installed=False)
    assert done.returncode == 0, done.stderr
    run = RunDirectory.open(tmp_path / "two" / "run")
    assert sampled(run.path) == sampled(one / "run")
    final = {name: str(digest(tensor)) for name, tensor in load_file(run.policy_path / "model.safetensors").items()}
    final["lm_head.weight"] = final["model.embed_tokens.weight"]
    assert server.llm.worker.mantissa_weights() == final
    assert server.asked.count("/reset_prefix_cache") == len(
        seen(one, "weights")["0"]
    )  # each version once, and not by each process
    evidence = {row["role"]: row for row in run.environment["precision"]}["rollout"]["evidence"]
    assert evidence.startswith(f"vLLM 0.32.0 at {server.url} runs in float32, head float32; ")
    assert evidence.endswith("; one server for 2 processes")
