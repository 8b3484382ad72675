"""``mantissa launch RECIPE --on verl --local``: what is exported of each kind of recipe, run by verl itself."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.verl, pytest.mark.slow]

PLAIN = """\
name: plain
steps: 100
precision: bf16
model: {path: Qwen/Qwen3-8B}
task: {kind: dataset, files: dapo.parquet, heldout_files: aime.parquet, verifier: math_verify}
rollout: {prompts: 32, samples: 8, max_tokens: 1024}
algorithm: {advantage: grpo, loss: ppo_clip, correction: token_tis}
optimizer: {lr: 1.0e-3, updates_per_batch: 2}
"""


@dataclass(frozen=True)
class Launched:
    """How the command ended. ``metrics``: by step, of all jobs of the folder."""

    code: int
    out: str
    error: str
    folder: Path
    metrics: dict[int, dict[str, Any]]

    @property
    def policy(self) -> Path:
        return Path(re.findall(r"the policy: (\S+)", self.out)[-1])


def command(folder: Path, recipe: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "mantissa", "launch", str(recipe), "--on", "verl", "--local", f"run_dir={folder}",
            *arguments]  # fmt: skip


def launch(folder: Path, recipe: Path, *arguments: str) -> Launched:
    """Run the command to its end; nothing that it started may be left."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/src"}
    done = subprocess.run(
        command(folder, recipe, *arguments), env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert left(folder) == []
    rows = [json.loads(line) for file in folder.glob("metrics-*.jsonl") for line in file.read_text().splitlines()]
    return Launched(done.returncode, done.stdout, done.stderr, folder, {row["step"]: row["data"] for row in rows})


def left(folder: Path) -> list[str]:
    """Processes of the folder's job: each has the path of its metrics in its environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"VERL_FILE_LOGGER_PATH={folder}/".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def trained(folder: Path, recipe: Path, *arguments: str, steps: int = 2) -> Launched:
    """A job that ends well, with a gradient in each step, and a policy that ``mantissa sample`` loads."""
    job = launch(folder, recipe, *arguments)
    assert job.code == 0, f"{job.out}\n{job.error}\n{(folder / 'job.log').read_text()[-4000:]}"
    print(*[line for line in job.out.splitlines() if line.startswith("step ") or "steps in" in line], sep="\n")
    assert sorted(job.metrics) == list(range(1, steps + 1))
    assert any(row["actor/grad_norm"] > 0 for row in job.metrics.values())
    assert all(math.isfinite(row["actor/grad_norm"]) for row in job.metrics.values())
    sample = [sys.executable, "-m", "mantissa", "sample", str(job.policy), "3+4", "--max-tokens", "8"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/src"}
    done = subprocess.run(sample, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return job


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.yaml"
    path.write_text(PLAIN)
    return path


def test_flowrl_in_fp16_and_a_second_command_that_goes_on(tmp_path: Path) -> None:
    """On verl's FSDP2 with Mantissa's step: two steps, and a third from verl's own checkpoint."""
    recipe, folder = ROOT / "recipes/cluster/qwen2.5-7b-flowrl-fp16.yaml", tmp_path / "run"
    first = trained(folder, recipe)
    for row in first.metrics.values():
        assert row["actor/mantissa/skipped"] == 0
        assert row["actor/flowrl/delta_abs_mean"] > 0
        assert row["training/rollout_probs_diff_max"] < 1e-3  # fp16 on both sides
    then = trained(folder, recipe, "steps=3", steps=3)
    assert "going on from verl's checkpoint of step 2" in then.out
    assert (folder / "global_step_3" / "actor" / "partition.safetensors").exists()
    assert then.metrics[3]["actor/mantissa/loss_scale"] == first.metrics[2]["actor/mantissa/loss_scale"]
    again = launch(folder, recipe, "steps=3")
    assert again.code == 2
    assert "holds 3 steps, and steps=3: say more steps" in again.error


def test_dapo_with_an_fp8_rollout_on_mantissa_on_both_sides(tmp_path: Path) -> None:
    """Dynamic sampling, overlong punishment, several updates a step; 8-bit products as Mantissa simulates them."""
    recipe = ROOT / "recipes/cluster/qwen3-30b-a3b-dapo-fp8-rollout.yaml"
    job = trained(tmp_path / "run", recipe, "--engine", "mantissa")
    for row in job.metrics.values():
        assert row["training/rollout_probs_diff_max"] > 1e-4  # the gap is there: 8 bits on one side alone
        assert row["actor/mantissa/logprobs_unlike_rollout"] > 0
        assert row["critic/score/mean"] + 1 > 0  # DAPO's: something was right


def test_a_command_that_is_interrupted_leaves_nothing(tmp_path: Path, plain: Path) -> None:
    """Ctrl-C while the job's processes come up."""
    folder, environment = tmp_path / "run", os.environ | {"PYTHONPATH": f"{ROOT}/src"}
    job = subprocess.Popen(command(folder, plain), env=environment, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 200
    while len(left(folder)) < 6 and time.monotonic() < until:
        assert job.poll() is None
        time.sleep(0.2)
    assert len(left(folder)) >= 6
    job.send_signal(signal.SIGINT)
    _, error = job.communicate(timeout=60)
    assert job.returncode == 130
    assert f"run_dir={folder} goes on" in error
    assert left(folder) == []


@pytest.mark.parametrize(
    ("engine", "overrides"),
    [
        ("fsdp2", ("precision=bf16-train-fp16-rollout", "algorithm.reference={}", "algorithm.kl={coefficient: 0.01}")),
        ("fsdp2", ("precision=fp8-rollout", "algorithm.loss=cispo")),
        ("mantissa_fsdp2", ("algorithm.loss=gspo", "algorithm.correction=sequence_mis")),
        ("mantissa", ("precision={preset: bf16, kernels: exact}", "algorithm.entropy={coefficient: 0.001}")),
        ("mantissa", ("precision=mxfp8-rollout", "optimizer.masters=bf16_kahan", "algorithm.advantage=rloo")),
    ],
    ids=["grpo-bf16-fp16", "cispo-fp8-rollout", "gspo-bf16", "grpo-exact", "rloo-mxfp8-rollout"],
)  # fmt: skip
@pytest.mark.variants
def test_other_kinds(engine: str, overrides: tuple[str, ...], tmp_path: Path, plain: Path) -> None:
    job = trained(tmp_path / "run", plain, *overrides, "--engine", engine)
    largest = max(row["training/rollout_probs_diff_max"] for row in job.metrics.values())
    print(f"{engine} {overrides}: probabilities of rollout and learner differ by {largest:.2g} at most")
    assert (largest == 0) == ("kernels: exact" in overrides[0])


@pytest.mark.variants
def test_dapo_in_fp16_on_verl_s_own_engine(tmp_path: Path) -> None:
    """A recipe of the cluster as it stands, on the engine of its launch file."""
    job = trained(tmp_path / "run", ROOT / "recipes/cluster/qwen3-8b-fp16-fsdp2.yaml")
    assert "on a CPU verl's loss scaler is off" in job.out


@pytest.mark.variants
def test_flowrl_that_trains_in_bf16_and_samples_in_fp16(tmp_path: Path) -> None:
    recipe = ROOT / "recipes/models/qwen3-1.7b-flowrl-bf16.yaml"
    job = trained(tmp_path / "run", recipe, "--engine", "mantissa", "--gpus", "2")
    assert job.metrics[2]["actor/flowrl/log_z_mean"] != job.metrics[1]["actor/flowrl/log_z_mean"]


@pytest.mark.variants
def test_a_policy_that_never_succeeds_ends_the_job_with_one_line(tmp_path: Path, plain: Path) -> None:
    """``exact`` wants the bare number, which the tiny policy does not write; verl alone would sample for ever."""
    dynamic = ("task.verifier=exact", "rollout.dynamic={max_generation_batches: 2}", "algorithm.loss=dapo")
    job = launch(tmp_path / "run", plain, *dynamic)
    assert job.code == 1
    assert "16 prompts were sampled for step 1, and in 16 of them all answers earned the same acc" in job.error
    assert "verl itself samples for ever" in job.out
