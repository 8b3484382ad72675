"""Synthetic runs with the shape of real ones: the curves of a small model that learns, with the gap of its format."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mantissa.base.files import encode
from mantissa.runs import compare_page, gap_page, plots
from mantissa.runs.directory import RunDirectory

ON_GRID = "a CPU: values on the fp16 grid in fp32, each result and gradient rounded, fp32 accumulation"
PRECISION = [
    {"role": role, "requested": name, "active": name, "kernels": kernels, "reason": reason}
    for role, name, kernels, reason in (
        ("learner", "fp16", "simulated", ON_GRID),
        ("rollout", "fp16", "simulated", ON_GRID),
        ("master", "fp32", "native", "weights and Adam moments: one step at lr 1e-6 is below half a bf16 or fp16 ulp"),
        ("logits", "fp32", "native", "half operands, fp32 result, fp32 log-softmax, the same on both sides"),
        ("kv_cache", "fp32", "native", "as the rollout: keys and values are already on its grid"),
    )
]
ENVIRONMENT = {
    "created": "2026-03-01T10:00:00+0000",
    "versions": {"mantissa": "0.1.0", "torch": "2.13.0"},
    "device": "cpu",
    "cpu": "A Processor @ 2.0GHz",
    "threads": 2,
    "precision": PRECISION,
}


def metrics_row(step: int, steps: int, gap: float, generator: np.random.Generator) -> dict[str, Any]:
    """One plausible step; ``gap`` is the mean |dlogp|."""
    noise = generator.normal
    accuracy = min(1.0, max(0.0, 0.25 + 0.7 * (1 - math.exp(-4 * step / steps)) + noise(0, 0.02)))
    overflowed = int(step % 23 == 7)
    row = {
        "step": step, "reward/mean": accuracy, "reward/accuracy": accuracy, "reward/verifier_errors": 0,
        "advantage/degenerate_group_fraction": 0.2 + 0.5 * step / steps,
        "length/mean": 34 - 4 * step / steps + noise(0, 0.3), "length/max": 48,
        "length/truncated_fraction": max(0.0, 0.05 - 0.05 * step / steps),
        "policy/loss": noise(0, 0.01), "policy/entropy": 1.1 * math.exp(-2 * step / steps) + 0.1,
        "policy/clip_fraction": 0.1, "policy/kl_old": 2e-3, "policy/phantom_clip_fraction": 0.02,
        "policy/alpha_mean": 0.0, "policy/alpha_abs_mean": 0.03, "policy/beta_mean": 0.0, "policy/beta_abs_mean": gap,
        "policy/ratio_mean": 1.0, "policy/ratio_max": 1.6,
        "gap/kl": noise(0, gap), "gap/k3_kl": gap**2 * math.exp(noise(0, 0.2)),
        "gap/abs_logp_diff_mean": gap * math.exp(noise(0, 0.1)),
        "gap/abs_logp_diff_max": 20 * gap * math.exp(noise(0, 0.3)), "gap/ess": 0.999,
        "correction/weight_mean": 1.0, "correction/ess": 0.999,
        "precision/loss_scale": 65536.0 / 2 ** (step // 23 + (step % 23 >= 7)), "precision/overflows": overflowed,
        "precision/retries": overflowed, "precision/skipped": 0, "optim/updates": 4 * step, "rollout/tokens": 512 * 33,
        "time/rollout": 0.5 + abs(noise(0, 0.03)), "time/reward": 0.02, "time/learner_logp": 0.12,
        "time/update": 0.35 + 0.1 * overflowed, "time/sync": 0.01,
        "rate/rollout_tokens_per_s": 15300.0 + noise(0, 300),
    }  # fmt: skip
    if step % 10 == 0:
        row |= {"eval/greedy_accuracy": min(1.0, accuracy + 0.03), "eval/avg_at_k": accuracy, "time/eval": 0.6}
        row |= {"time/checkpoint": 0.08}
    row["time/step"] = sum(v for k, v in row.items() if k.startswith("time/")) + 0.01
    return row


def rollout_rows(step: int, gap: float, generator: np.random.Generator, count: int = 64) -> list[dict[str, Any]]:
    """Completions whose learner log-probs are off by ``gap`` times a normal number, more where p is small."""
    rows = []

    def digits() -> str:
        return " ".join(map(str, generator.integers(0, 10, 32)))

    for i in range(count):
        length = int(generator.integers(12, 48))
        rollout = np.minimum(-(generator.exponential(0.35, length) ** 2), -1e-6).astype(np.float32)
        noise = gap * generator.normal(0, 1, length) * np.sqrt(-rollout) - gap / 10
        learner = np.minimum(rollout + noise, 0).astype(np.float32)
        correct = bool(generator.random() < 0.8)
        rows.append({
            "step": step, "problem_id": f"sums-{i // 8}", "sample": i % 8,
            "prompt": f"Running sums mod 10 of: {digits()}\nAnswer:", "completion": digits(), "answer": digits(),
            "reward": float(correct), "correct": correct, "error": None,
            "finish_reason": "stop" if length < 46 else "length", "policy_version": step - 1, "length": length,
            "advantage": 0.2 if correct else -0.8, "tokens": generator.integers(0, 64, length).tolist(),
            "rollout_logp": rollout.tolist(), "learner_logp": learner.tolist(),
        })  # fmt: skip
    return rows


MakeRun = Callable[..., RunDirectory]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    """Build a run: ``make_run(steps=60, gap=1e-3, warm=True, rollouts=True, planned=None, name=...)``."""
    made: list[RunDirectory] = []

    def build(
        steps: int = 60, gap: float = 1e-3, warm: bool = True, rollouts: bool = True, planned: int | None = None,
        name: str = "running-sums-fp16-20260301-100000",
    ) -> RunDirectory:  # fmt: skip
        generator = np.random.default_rng(0)
        config = {"task": {"name": "running_sums", "digits": 32}, "precision": "fp16", "steps": planned or steps}
        run = RunDirectory.create(tmp_path / name, config, ENVIRONMENT)
        made.append(run)
        if warm:
            for update in range(0, 121, 20):
                accuracy = 0.28 / (1 + math.exp((80 - update) / 8))
                loss = 2.3 * math.exp(-update / 80)
                run.warm_start.append({"step": update, "warm_start/loss": loss, "warm_start/accuracy": accuracy})
        write_rows(run.path, [metrics_row(step, steps, gap, generator) for step in range(1, steps + 1)])
        for step in range(max(1, steps - 2), steps + 1) if rollouts else ():
            run.write_rollouts(step, rollout_rows(step, gap, generator))
        return run

    yield build
    for run in made:
        run.close()


def write_rows(folder: Path, rows: list[dict]) -> None:
    """One write, not hundreds."""
    (folder / "metrics.jsonl").write_text("".join(encode(row) + "\n" for row in rows))


WriteRun = Callable[..., Path]
RECIPE: dict[str, Any] = {
    "name": "sums",
    "seed": 0,
    "steps": 40,
    "precision": {"preset": "fp16"},
    "task": {"kind": "running_sum", "max_digits": 8, "train_size": 512, "heldout_size": 256},
    "optimizer": {"lr": 5e-4, "betas": [0.9, 0.99]},
    "loss_scaling": None,
    "evaluation": {"every": 10, "problems": 64, "samples": 4},
}


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Write a run's folder as it is: ``write_run(name, rows, config={...}, environment={...})``; None is no file.

    ``config`` and ``environment`` are merged, one level deep, into a plain recipe and environment.
    """

    def write(
        name: str, rows: list[dict], config: dict | None = RECIPE, environment: dict | None = ENVIRONMENT
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        if config is not None:
            (folder / "config.yaml").write_text(yaml.safe_dump(RECIPE | config, sort_keys=False))
        if environment is not None:
            (folder / "environment.json").write_text(json.dumps(ENVIRONMENT | environment))
        write_rows(folder, rows)
        return folder

    return write


@pytest.fixture
def rows_of_a_run() -> Callable[..., list[dict[str, Any]]]:
    """``rows_of_a_run(steps=40, seed=0, gap=1e-3)``: evaluations are whole numbers of 64 problems, and of 4 samples."""

    def learning_rows(steps: int = 40, seed: int = 0, gap: float = 1e-3) -> list[dict[str, Any]]:
        generator = np.random.default_rng(seed)
        rows = [metrics_row(step, steps, gap, generator) for step in range(1, steps + 1)]
        for row in rows:
            for name, n in (("eval/greedy_accuracy", 64), ("eval/avg_at_k", 256)):
                if name in row:
                    row[name] = round(row[name] * n) / n
        return rows

    return learning_rows


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a report's time is matplotlib's writing; what a test asks is something else."""
    for module in (plots, gap_page, compare_page):
        monkeypatch.setattr(module, "to_svg", lambda *_: "<svg></svg>")
