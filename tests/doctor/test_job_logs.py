"""Logs of real jobs on a CPU, and figures that public threads show, written in their program's layout.

TRL's are of benchmarks/doctor_jobs.py (every second step, or the last 20), verl's of 14 steps of the kind ``grpo`` in
benchmarks/verl_rehearsals.py; four digits of each number.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mantissa.doctor.curves import examine_log
from mantissa.doctor.diagnosis import Verdict
from mantissa.doctor.logs import read_log
from mantissa.doctor.page import lines

JOBS = Path(__file__).parents[1] / "data" / "jobs"
SAID: dict[str, tuple[Verdict, str]] = {
    "trl-healthy-1.json": (Verdict.UNKNOWN, ""),
    "trl-constant-reward.json": (Verdict.FAULT, "same_reward"),
    "trl-no-temperature.json": (Verdict.FAULT, "same_samples"),
    "trl-rate-times-1000.json": (Verdict.FAULT, "same_reward"),
    "trl-corrupted-layer.json": (Verdict.UNKNOWN, ""),  # a blind spot: this log has no gap
    "trl-clip-range-tiny.json": (Verdict.FAULT, "clipping"),
    "trl-all-truncated.json": (Verdict.UNKNOWN, ""),  # said beside it
    "verl-healthy.jsonl": (Verdict.HEALTHY, ""),  # a random policy: nearly every answer is cut off
}


def said(path: Path) -> tuple[Verdict, str]:
    found = examine_log(read_log(path))
    return found.verdict, found.fault.name if found.fault else ""


@pytest.mark.parametrize("name", SAID)
def test_a_real_job_s_log(name: str) -> None:
    assert said(JOBS / name) == SAID[name]


def test_no_entropy_from_the_start_is_no_collapse() -> None:
    found = examine_log(read_log(JOBS / "trl-no-temperature.json"))
    assert [each.name for each in found.findings if each.found] == ["same_samples"]


@pytest.mark.parametrize("name", ["trl-all-truncated.json", "verl-healthy.jsonl"])
def test_answers_that_are_cut_off_are_said_and_no_fault(name: str) -> None:
    log = read_log(JOBS / name)
    found = examine_log(log)
    assert found.fault is None
    assert any("by the way: nearly every answer is cut off" in line for line in lines(log, found))


def _nemo(*sizes: tuple[int, float]) -> str:
    return json.dumps({"train/gen_kl_error": {str(step): size for step, size in sizes}})


def _printed(*rows: dict[str, Any]) -> str:
    return "".join(f"{row}\n" for row in rows)


def _slime(*sizes: float) -> str:
    return "".join(f"step {at}: {{'train/train_rollout_logprob_abs_diff': {size}}}\n" for at, size in enumerate(sizes))


PUBLIC: dict[str, tuple[str, str, Verdict]] = {
    # the typical size of each third of 62 steps, at its middle; the thread reports it as a bug
    "NVIDIA-NeMo/RL#2260": ("x.json", _nemo((10, 0.45), (30, 0.30), (52, 0.20)), Verdict.LARGE),
    # only the range, 0.2 to 0.4, is told
    "Gen-Verse/OpenClaw-RL#69": ("x.log", _slime(0.2, 0.4, 0.2, 0.4), Verdict.LARGE),
    # a loss that is printed as 0.0 with rewards that differ: TRL's is, on policy
    "huggingface/trl#3452": ("x.log", _printed(
        {"loss": 0.0, "grad_norm": 0.0866, "reward": 1.717, "reward_std": 0.5701},
        {"loss": 0.0, "grad_norm": 0.0967, "reward": 1.884, "reward_std": 0.7487},
        {"loss": 0.0, "grad_norm": 0.1059, "reward": 1.680, "reward_std": 0.6311},
        {"loss": 0.0, "grad_norm": 0.1036, "reward": 1.981, "reward_std": 0.7865}), Verdict.UNKNOWN),
    # one step whose groups have one reward: too few for a word
    "huggingface/trl#3857": ("x.log", _printed(
        {"loss": 0.0, "grad_norm": 0.0, "reward": 3.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0,
         "completions/mean_length": 701.8, "completions/min_length": 307.0, "completions/max_length": 1013.0,
         "completions/clipped_ratio": 0.0}), Verdict.UNKNOWN),
    "Chi-Shan0707/TinyLoRA-GRPO-Coder#4": ("x.log", _printed(
        {"loss": -0.0982, "grad_norm": 0.1235, "reward": 0.5, "reward_std": 0.3251, "frac_reward_zero_std": 0.0,
         "entropy": 0.4019, "completions/mean_length": 506.75, "completions/clipped_ratio": 0.0}), Verdict.UNKNOWN),
    "PRIME-RL/Entropy-Mechanism-of-RL#21": (
        "x.log", "step:4 - actor/pg_loss:0.0259 - actor/pg_clipfrac:0.0 - actor/grad_norm:0.4913\n", Verdict.UNKNOWN),
    "verl-project/verl#7412": (
        "x.log", "(TaskRunner pid=222265) step:34 - actor/entropy:0.2227 - actor/pg_clipfrac:0.00079 - "
        "actor/grad_norm:0.1296 - response_length/mean:1267.0 - response_length/max:3072.0\n", Verdict.UNKNOWN),
}  # fmt: skip


@pytest.mark.parametrize("thread", PUBLIC)
def test_figures_of_a_public_thread(thread: str, tmp_path: Path) -> None:
    """A gap that a thread calls a bug is too large; what is said of few steps without a gap is nothing."""
    name, text, verdict = PUBLIC[thread]
    (tmp_path / name).write_text(text)
    assert said(tmp_path / name) == (verdict, "")
