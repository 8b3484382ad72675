"""What runs of different formats have learned, all sampled in one format: fp32.

    python benchmarks/final_policy.py runs/lab/dose/*-seed?         # finished runs; rows in results/final_policy.jsonl

A run's own accuracy is that of its rollout, in the rollout's format: a coarse one scores lower with the same weights.
Here each run's last weights, and those that it began from, answer the held-out problems in fp32: the mean over problems
of the share of right answers, at the run's temperature and without its top-p or top-k. Problems and uniforms are the
same for all runs of a seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rows import append

from mantissa.rl.assemble import assemble
from mantissa.rl.config.run import make_config
from mantissa.runs.directory import RunDirectory

SAMPLES = 32
PLAIN = {"engine": "native", "emulate": None, "top_p": 1.0, "top_k": 0, "support": "kept"}
IN_FP32 = {"precision": "fp32", "warm_start": None, "loss_scaling": None, "run_dir": None, "nproc": 1}


def accuracy(values: dict[str, object], model: str, problems: int) -> tuple[float, float]:
    """Right answers of the policy in folder ``model``, in fp32: the mean of ``SAMPLES`` a problem, and greedy."""
    rollout = dict(values["rollout"]) | PLAIN  # type: ignore[call-overload]
    config = make_config(values | IN_FP32 | {"model": {"path": model}, "rollout": rollout}, model)
    parts = assemble(config)
    try:
        sampler, learner = parts.sampler, parts.learner
        sampler.engine.sync(learner.weights, learner.version)
        heldout = parts.task.split("heldout")[:problems]
        own = sampler.params_of(config.rollout)
        greedy = sampler.params(config.rollout.max_tokens, 0.0, config.rollout.stop)
        return (
            sampler.accuracy(heldout, SAMPLES, own, learner.version, config.seed, "final policy"),
            sampler.accuracy(heldout, 1, greedy, learner.version, config.seed, "greedy"),
        )
    finally:
        parts.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--problems", type=int, default=256)
    options = parser.parse_args()
    first: dict[str, tuple[float, float]] = {}
    for path in options.runs:
        run = RunDirectory.open(path)
        values, steps = run.config, len(run.read_metrics())
        if steps < values["steps"]:
            print(f"left out: {path} is at step {steps} of {values['steps']}", flush=True)
            continue
        start = values["model"]["path"]
        if start and start not in first:
            first[start] = accuracy(values, start, options.problems)
        sampled, greedy = accuracy(values, str(path / "policy"), options.problems)
        row = {
            "benchmark": "final_policy",
            "run": path.name,
            "lab": path.parent.name,
            "seed": values["seed"],
            "steps": steps,
            "problems": options.problems,
            "samples": SAMPLES,
            "accuracy_fp32": sampled,
            "greedy_fp32": greedy,
            "accuracy_fp32_at_start": first[start][0] if start else None,
        }
        append("final_policy.jsonl", [row], "cpu")
        print(
            f"{path.name}: {sampled:.4f} (greedy {greedy:.3f}; at the start {row['accuracy_fp32_at_start']})",
            flush=True,
        )


if __name__ == "__main__":
    main()
