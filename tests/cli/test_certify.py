"""``mantissa certify``, as a user calls it, on the small run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mantissa = Callable[..., Any]
FEW = ("--tokens", "16")


def test_a_run_is_certified_and_checked(mantissa: Mantissa, finished: Path, tmp_path: Path) -> None:
    cert = tmp_path / "cert.json"
    said = mantissa("certify", finished, "--out", cert, "--allow-gap", *FEW)
    assert said.code == 0, said
    assert said.out.startswith(f"Certified: {finished}"[:60])
    assert f"certificate: {cert}" in said.out
    made = json.loads(cert.read_text())
    assert made["policy"]["version"] is not None
    rounded = {"exact": False, "backend": "simulated", "emulated": False}
    assert made["kernels"] == {"engine": "native", "learner": rounded, "rollout": rounded, "plan": []}
    assert made["formats"]["learner"] == "fp16"
    for policy in (finished, finished / "policy", finished / "checkpoints" / "step-2"):
        said = mantissa("certify", "--check", cert, "--model", policy, "--allow-gap", "--json")
        whole, *fields = map(json.loads, said.out.splitlines())
        assert said.code == 0, said
        assert whole["holds"]
        assert whole["recomputed"] == whole["tokens"] == made["equal"]["tokens"]
        assert all(each["holds"] for each in fields)
    made["policy"]["architecture"] = "\x1b[2J another"
    cert.write_text(json.dumps(made))
    said = mantissa("certify", "--check", cert, "--model", finished)
    assert said.code == 1
    assert "policy.architecture: does not hold: here qwen3, in the certificate" in " ".join(said.out.split())
    assert "\x1b[2J" not in said.out + said.err


def test_a_checkpoint_that_is_half_written_is_one_line(mantissa: Mantissa, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    newest = run / "checkpoints" / "step-2" / "policy.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    assert "step-2" in mantissa("certify", run, "--out", tmp_path / "cert.json", *FEW).error()
    shutil.rmtree(run / "checkpoints")
    assert "without a checkpoint yet" in mantissa("certify", run, "--out", tmp_path / "cert.json", *FEW).error()
    assert not (tmp_path / "cert.json").exists()


def test_what_does_not_go_together_is_one_line(mantissa: Mantissa, finished: Path, tmp_path: Path) -> None:
    cert = tmp_path / "cert.json"
    assert "expected the folder of a run or of a verl job, or a model" in mantissa("certify").error()
    assert "needs --model POLICY" in mantissa("certify", "--check", finished / "config.yaml").error()
    assert "no such file" in mantissa("certify", "--check", cert, "--model", finished).error()
    assert "a run has its recipe's" in mantissa("certify", finished, "--precision", "bf16", "--out", cert).error()
    assert "expected a file in a folder" in mantissa("certify", finished, "--out", tmp_path).error()
    assert "nowhere" in mantissa("certify", "nowhere", "--out", cert).error()
    cert.write_text('{"certificate": "mantissa certificate"}')
    assert "version" in mantissa("certify", "--check", cert, "--model", finished).error()
