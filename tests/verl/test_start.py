"""``docs/start/verl.md``: its commands, run whole, on a job of verl's trainer with its own engine."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from mantissa.launch.rehearsal import end_processes
from verl_job import ACTOR, ROOT, job_environment, make_inputs, overrides

pytestmark = [pytest.mark.verl, pytest.mark.slow]


@pytest.mark.parametrize("fault", [pytest.param("", marks=pytest.mark.variants), "temperature"])
def test_the_commands_run_whole(tmp_path: Path, fault: str) -> None:
    """A healthy job says so; one whose server leaves the temperature out of its log-probs is named, and goes on."""
    page = (ROOT / "docs" / "start" / "verl.md").read_text()
    (script,) = re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S)
    make_inputs(tmp_path)
    tag, bin_ = uuid.uuid4().hex, tmp_path / "bin"
    bin_.mkdir()
    for name, what in (("pip", "true"), ("python", shlex.quote(sys.executable))):  # it is installed here
        (bin_ / name).write_text(f'#!/bin/sh\nexec {what} "$@"\n')
        (bin_ / name).chmod(0o755)
    # hf_test, the rollout, is registered by a library of the tests, which brings the plugin
    script = script.replace("mantissa.verl.plugin", "verl_test_parts")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="verl", dir="/tmp") as short:
        job = [*overrides(tmp_path, Path(short)), "data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=16"]
        job += ["actor_rollout_ref.rollout.temperature=0.7"]
        job = [each for each in job if "calculate_log_probs" not in each]
        more = {
            "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}",
            "JOB": " ".join(job),
            "MANTISSA_TEST_FAULT": fault,
            "TMPDIR": short,
        }
        environment = job_environment(tmp_path / "rows.jsonl", tag, more)
        try:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", script],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=600,
            )
        finally:
            end_processes(tag)
    print(f"{fault or 'healthy'}: {time.monotonic() - begun:.0f} s")
    assert done.returncode == 0, done.stdout[-3000:]
    last = done.stdout.splitlines()[-1]
    if fault:
        assert "a temperature that only one side applies" in last
        assert "actor_rollout_ref.rollout.logprobs_mode=processed_logprobs" in last
    else:
        assert "mantissa doctor: step 2: healthy noise" in last
    assert (tmp_path / "checkpoints" / "doctor" / "step-1" / "doctor.html").stat().st_size > 0
