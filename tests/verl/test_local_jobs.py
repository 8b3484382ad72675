"""``mantissa launch RECIPE --on verl --local``: what is exported of each kind of recipe, run by verl itself."""

from __future__ import annotations

import contextlib
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
from verl_rehearsals import KINDS, command, metrics

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.verl, pytest.mark.slow]


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


def launch(folder: Path, kind: str, *arguments: str) -> Launched:
    """Run the command to its end; nothing that it started may be left."""
    words, environment = command(kind, folder, *arguments), os.environ | {"PYTHONPATH": f"{ROOT}/src"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert left(folder) == []
    return Launched(done.returncode, done.stdout, done.stderr, folder, metrics(folder))


def left(folder: Path) -> list[str]:
    """Processes of the folder's job: each has the path of its metrics in its environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"VERL_FILE_LOGGER_PATH={folder}/".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def trained(folder: Path, kind: str, *arguments: str, steps: int = 2) -> Launched:
    """A job that ends well, with a gradient, and a policy that ``mantissa sample`` loads."""
    job = launch(folder, kind, *arguments)
    assert job.code == 0, f"{job.out}\n{job.error}\n{(folder / 'job.log').read_text()[-4000:]}"
    print(*[line for line in job.out.splitlines() if line.startswith("step ") or "steps in" in line], sep="\n")
    assert sorted(job.metrics) == list(range(1, steps + 1))
    assert any(row["actor/grad_norm"] > 0 for row in job.metrics.values())
    assert all(math.isfinite(row["actor/grad_norm"]) for row in job.metrics.values())
    assert "weights moved: " in job.out
    assert f"weights arrived: checkpoint {steps - 1} scores what step {steps} sampled" in " ".join(job.out.split())
    sample = [sys.executable, "-m", "mantissa", "sample", str(job.policy), "3+4", "--max-tokens", "8"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/src"}
    done = subprocess.run(sample, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return job


def test_flowrl_in_fp16_and_a_second_command_that_goes_on(tmp_path: Path) -> None:
    """On verl's FSDP2 with Mantissa's step: two steps, and a third from verl's own checkpoint."""
    folder = tmp_path / "run"
    first = trained(folder, "flowrl-fp16")
    for row in first.metrics.values():
        assert row["actor/mantissa/skipped"] == 0
        assert row["actor/flowrl/delta_abs_mean"] > 0
        assert row["training/rollout_probs_diff_max"] < 1e-3  # fp16 on both sides
    then = trained(folder, "flowrl-fp16", "steps=3", steps=3)
    assert "going on from verl's checkpoint of step 2" in then.out
    assert (folder / "global_step_3" / "actor" / "partition.safetensors").exists()
    assert then.metrics[3]["actor/mantissa/loss_scale"] == first.metrics[2]["actor/mantissa/loss_scale"]
    again = launch(folder, "flowrl-fp16", "steps=3")
    assert again.code == 2
    assert "holds 3 steps, and steps=3: say more steps" in again.error


def test_dapo_with_an_fp8_rollout_on_mantissa_on_both_sides(tmp_path: Path) -> None:
    """Dynamic sampling, overlong punishment, several updates a step; 8-bit products as Mantissa simulates them."""
    job = trained(tmp_path / "run", "dapo-fp8")
    for row in job.metrics.values():
        assert row["training/rollout_probs_diff_max"] > 1e-4  # the gap is there: 8 bits on one side alone
        assert row["actor/mantissa/logprobs_unlike_rollout"] > 0
        assert row["critic/score/max"] > -1  # right is 1, wrong -1, and what is overlong loses up to 1 more
    assert "the job ends after 10 batches for one step" in " ".join(job.out.split())


def test_a_command_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C while the job's processes come up."""
    folder, environment = tmp_path / "run", os.environ | {"PYTHONPATH": f"{ROOT}/src"}
    job = subprocess.Popen(command("grpo", folder), env=environment, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 900
    while len(left(folder)) < 6 and time.monotonic() < until:
        assert job.poll() is None
        time.sleep(0.2)
    assert len(left(folder)) >= 6
    job.send_signal(signal.SIGINT)
    _, error = job.communicate(timeout=600)
    assert job.returncode == 130
    assert f"run_dir={folder} goes on" in error
    assert left(folder) == []


@pytest.mark.variants
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"flowrl-fp16", "dapo-fp8"}))
def test_other_kinds(kind: str, tmp_path: Path) -> None:
    job = trained(tmp_path / "run", kind)
    largest = max(row["training/rollout_probs_diff_max"] for row in job.metrics.values())
    print(f"{kind}: probabilities of rollout and learner differ by {largest:.2g} at most")
    assert (largest == 0) == (kind == "exact")
    assert ("on a CPU verl's loss scaler is off" in job.out) == (kind == "dapo-fp16")
    if kind == "flowrl-bf16":
        assert job.metrics[2]["actor/flowrl/log_z_mean"] != job.metrics[1]["actor/flowrl/log_z_mean"]


@pytest.mark.variants
def test_a_policy_that_never_succeeds_ends_the_job_with_one_line(tmp_path: Path) -> None:
    """``exact`` wants the bare number, which the tiny policy does not write; verl alone would sample for ever."""
    dynamic = ("task.verifier=exact", "rollout.dynamic={max_generation_batches: 2}", "algorithm.loss=dapo")
    job = launch(tmp_path / "run", "gspo", "algorithm.correction=token_tis", *dynamic)
    assert job.code == 1
    assert re.search(
        r"\d+ prompts were sampled for step 1, and in \d+ of them all answers earned the same acc", job.error
    )
    assert "verl itself samples for ever" in job.out
