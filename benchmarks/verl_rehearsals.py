"""Rehearsals of recipes on verl, one of each kind: seconds, and the gap that verl saw.

    python benchmarks/run.py verl_rehearsals          # every kind, in the environment of make test-verl
    python benchmarks/run.py verl_rehearsals dapo-fp16 flowrl-fp16

Each is the command that a user would type (``mantissa launch RECIPE --on verl
--local``): two steps of verl's trainer on this machine's processor, of a random Qwen3 of two layers, so seconds are of
verl's machinery and not of arithmetic. ``tests/verl/test_local_jobs.py`` runs the same kinds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rows import ROOT
from runner import Rows, among, case

from mantissa.launch import launch_file, load_options

RECIPES = ROOT / "recipes"
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


class Kind(NamedTuple):
    """``recipe``: below recipes/, or None for the plain one. ``engine``: None for the launch file's."""

    what: str
    recipe: str | None
    engine: str | None
    overrides: tuple[str, ...] = ()


KINDS = {
    "grpo": Kind("GRPO with a KL penalty, bf16-train-fp16-rollout", None, "fsdp2", (
        "precision=bf16-train-fp16-rollout", "algorithm.reference={}", "algorithm.kl={coefficient: 0.01}")),
    "cispo": Kind("CISPO, fp8-rollout", None, "fsdp2", ("precision=fp8-rollout", "algorithm.loss=cispo")),
    "dapo-fp16": Kind("DAPO, fp16", "cluster/qwen3-8b-fp16-fsdp2.yaml", None),
    "gspo": Kind("GSPO, bf16", None, "mantissa_fsdp2", ("algorithm.loss=gspo", "algorithm.correction=sequence_mis")),
    "flowrl-fp16": Kind("FlowRL, fp16", "cluster/qwen2.5-7b-flowrl-fp16.yaml", None),
    "flowrl-bf16": Kind("FlowRL, bf16-train-fp16-rollout", "models/qwen3-1.7b-flowrl-bf16.yaml", "mantissa"),
    "dapo-fp8": Kind("DAPO, fp8-rollout", "cluster/qwen3-30b-a3b-dapo-fp8-rollout.yaml", "mantissa"),
    "exact": Kind("GRPO with an entropy bonus, bf16, exact kernels", None, "mantissa", (
        "precision={preset: bf16, kernels: exact}", "algorithm.entropy={coefficient: 0.001}")),
    "rloo": Kind("RLOO, mxfp8-rollout, bf16 masters", None, "mantissa", (
        "precision=mxfp8-rollout", "optimizer.masters=bf16_kahan", "algorithm.advantage=rloo")),
}  # fmt: skip


def command(kind: str, folder: Path, *more: str) -> list[str]:
    """What a user types for a rehearsal of ``kind``; its files go into ``folder``."""
    _, recipe, engine, overrides = KINDS[kind]
    path = folder.with_name("plain.yaml") if recipe is None else RECIPES / recipe
    if recipe is None:
        path.write_text(PLAIN)
    words = [sys.executable, "-P", "-m", "mantissa", "launch", str(path)]
    words += ["--on", "verl", "--local", f"run_dir={folder}"]
    return [*words, *overrides, *([] if engine is None else ["--engine", engine]), *more]


def metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """Of all jobs of a folder, by step."""
    rows = [json.loads(line) for file in folder.glob("metrics-*.jsonl") for line in file.read_text().splitlines()]
    return {row["step"]: row["data"] for row in rows}


def measured(kind: str) -> dict[str, Any]:
    """One rehearsal's row. A job that fails is an error."""
    with tempfile.TemporaryDirectory() as made:
        folder, begun = Path(made) / "run", time.monotonic()
        done = subprocess.run(command(kind, folder), capture_output=True, text=True, check=False)
        if done.returncode:
            log = folder / "job.log"
            raise SystemExit(f"{kind}: {done.stdout}{done.stderr}{log.read_text()[-3000:] if log.exists() else ''}")
        rows, seconds = metrics(folder), time.monotonic() - begun
        about = KINDS[kind]
        file = None if about.recipe is None else launch_file(RECIPES / about.recipe)
        return {
            "kind": kind, "what": about.what, "recipe": about.recipe or "",
            "engine": about.engine or load_options(file, {}).engine, "steps": len(rows), "seconds": round(seconds, 1),
            "probability_difference": max(row["training/rollout_probs_diff_max"] for row in rows.values()),
            "k3_kl": max(row.get("rollout_corr/k3_kl", 0.0) for row in rows.values()),
            "grad_norm": [row["actor/grad_norm"] for row in rows.values()],
            "score": [row["critic/score/mean"] for row in rows.values()],
        }  # fmt: skip


@case()
def verl_rehearsals(kinds: Sequence[str] = tuple(KINDS), /) -> Rows:
    among(kinds, KINDS)
    for kind in kinds:
        yield measured(kind)
