"""Does a change of the house change a bit of what it computes? Runs small recipes at two states of the source, on one
machine, and compares all that they leave: metrics less the clock, rollouts, checkpoints, the final policy.

    python tests/same_bits.py REVISION [--runs grpo critic ...]

REVISION's package is taken from git into a temporary folder; the other state is this checkout's. Exit code 0: every
run is equal to the last bit; 1: it is not, and the first difference of each is printed. What a run's folder says of
its code and its machine is left out; of its checkpoints and weights the tensors are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPE = {
    "name": "same", "steps": 3, "device": "cpu", "precision": "fp16",
    "model": {"fresh": {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16,
                        "intermediate_size": 64, "max_positions": 64}, "tokenizer": "characters"},
    "task": {"kind": "running_sum", "min_digits": 1, "max_digits": 3, "train_size": 200, "heldout_size": 32,
             "warm_start_size": 512, "reward": "prefix"},
    "warm_start": {"steps": 20, "batch": 32, "lr": 0.003, "evaluate_every": 20, "problems": 16},
    "rollout": {"prompts": 8, "samples": 4, "max_tokens": 6, "slots": 16},
    "algorithm": {"correction": "token_tis"},
    "optimizer": {"lr": 0.001, "updates_per_batch": 2},
    "evaluation": {"every": 2, "problems": 16, "samples": 2},
    "checkpoint": {"every": 2},
}  # fmt: skip
# By name: what differs from the recipe. Together they take the ways through the loop that a change of its order would
# move: several updates, a reference, a critic, batches ahead of their step, a replay, a head of its own, exact kernels,
# adapters, low-precision masters, experts.
RUNS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "reference": ("algorithm.reference={}",
                  "algorithm.kl={where: loss, coefficient: 0.1}", "precision=bf16", "rollout.engine=emulated"),
    "critic": ("algorithm.advantage=gae", "algorithm.critic={lr: 0.001}", "precision=fp32"),
    "async": ("rollout.max_policy_lag=2", "algorithm.loss=cispo"),
    "exact": ("precision={preset: fp16, kernels: exact}",),
    "dynamic": ("rollout.dynamic={}", "algorithm.loss=dapo", "rollout.overlong={buffer: 2}"),
    "flowrl": ("algorithm.loss=flowrl", "algorithm.reference={}", "optimizer.updates_per_batch=1"),
    "lora": ("model.lora={rank: 4, alpha: 8}", "precision=bf16"),
    "masters": ("optimizer.masters=bf16_stochastic", "precision=bf16"),
    "experts": ("model.fresh.family=qwen3_moe", "model.fresh.experts=4", "model.fresh.experts_per_token=2",
                "rollout.replay_routing=ids", "precision={train: bf16, rollout: fp8, fp8: {base: bf16}}"),
}  # fmt: skip
SCRIPT = """
import hashlib, json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from mantissa.base.files import JsonLines
from mantissa.runs.directory import RunDirectory
from mantissa.runs.directory import deterministic
folder = Path(sys.argv[1])
run = RunDirectory.open(folder)
found = {f"metrics {i}": deterministic(row) for i, row in enumerate(JsonLines(folder / "metrics.jsonl").read())}
found["warm start"] = JsonLines(folder / "warm_start.jsonl").read()
found |= {f"rollouts {step}": run.read_rollouts(step) for step in run.rollout_steps()}
for path in sorted(folder.rglob("*.safetensors")):
    for name, tensor in load_file(path).items():
        bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[f"{path.relative_to(folder)} {name}"] = hashlib.sha256(bits).hexdigest()
print(json.dumps(found, sort_keys=True, default=str))
"""


def run(source: Path, name: str, folder: Path) -> dict[str, Any]:
    """What the run ``name`` leaves by the package in ``source``."""
    recipe = folder / "recipe.yaml"
    folder.mkdir(parents=True)
    recipe.write_text(json.dumps(RECIPE))
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mantissa", "train", str(recipe), f"run_dir={folder / 'run'}", *RUNS[name]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} by {source}: {done.stderr.strip()}")
    read = [sys.executable, "-c", SCRIPT, str(folder / "run")]
    said = subprocess.run(read, env=environment, capture_output=True, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(said)
    return found


def package_at(revision: str, folder: Path) -> Path:
    """The package as it was at a commit."""
    archive = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, capture_output=True, check=True).stdout
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder / "src"


def differs(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Where two runs part, or None."""
    for key in [*before, *(after.keys() - before.keys())]:
        one, other = before.get(key), after.get(key)
        if one != other:
            if isinstance(one, dict) and isinstance(other, dict):
                key += "".join(f", {inner}" for inner in one | other if one.get(inner) != other.get(inner))
            return f"{key}: {str(one)[:200]} and {str(other)[:200]}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS))
    asked = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        before = package_at(asked.revision, Path(scratch) / "before")
        for name in asked.runs:
            one = run(before, name, Path(scratch) / name / "before")
            other = run(ROOT / "src", name, Path(scratch) / name / "after")
            difference = differs(one, other)
            wrong += difference is not None
            print(f"{name}: {difference or f'{len(one)} values equal'}", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
