"""What runs of different formats have learned, all sampled in one format: fp32.

A run's own accuracy is that of its rollout, in the rollout's format: a coarse one scores lower with the same weights.
Here each run's last weights, and those that it began from, answer the held-out problems in fp32: the mean over problems
of the share of right answers, at the run's temperature and without its top-p or top-k. Problems and uniforms are the
same for all runs of a seed. Where a problem has many right answers, the different ones are counted as well: texts that
differ and are right, of all samples of a problem, and the share of problems with at least one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from runner import Rows, case

from mantissa.rl.assemble import assemble
from mantissa.rl.batch import by_group
from mantissa.rl.config.run import make_config
from mantissa.runs.directory import RunDirectory

SAMPLES = 32
PLAIN = {"engine": "native", "emulate": None, "top_p": 1.0, "top_k": 0, "support": "kept"}
IN_FP32 = {"precision": "fp32", "warm_start": None, "loss_scaling": None, "run_dir": None, "nproc": 1}


@dataclass(frozen=True)
class Answers:
    """Right answers of a policy in fp32: share of ``SAMPLES`` and of greedy ones, different ones a problem, share of
    problems with one."""

    accuracy: float
    greedy: float
    distinct: float
    solved: float


def answers(values: dict[str, object], model: str, problems: int) -> Answers:
    """Of the policy in folder ``model``."""
    rollout = dict(values["rollout"]) | PLAIN  # type: ignore[call-overload]
    config = make_config(values | IN_FP32 | {"model": {"path": model}, "rollout": rollout}, model)
    parts = assemble(config)
    try:
        sampler, learner = parts.sampler, parts.learner
        sampler.engine.sync(learner.weights, learner.version)
        heldout = parts.task.split("heldout")[:problems]
        own = sampler.params_of(config.rollout)
        greedy = sampler.params(config.rollout.max_tokens, 0.0, config.rollout.stop)
        sampled = sampler.sample(heldout, SAMPLES, own, learner.version, config.seed, "final policy")
        graded = by_group(sampled, list(zip(sampled, sampler.grade(sampled), strict=True)))
        right = [[sample.text.replace(" ", "") for sample, reward in group if reward.correct] for group in graded]
        return Answers(
            fmean(len(texts) / SAMPLES for texts in right),
            sampler.accuracy(heldout, 1, greedy, learner.version, config.seed, "greedy"),
            fmean(len(set(texts)) for texts in right),
            fmean(bool(texts) for texts in right),
        )
    finally:
        parts.close()


@case(problems=2)
def final_policy(runs: Sequence[Path], problems: int = 256) -> Rows:
    first: dict[str, Answers] = {}
    for path in runs:
        run = RunDirectory.open(path)
        values, steps = run.config, len(run.metrics.read())
        if steps < values["steps"]:
            print(f"left out: {path} is at step {steps} of {values['steps']}", flush=True)
            continue
        start = values["model"]["path"]
        if start and start not in first:
            first[start] = answers(values, start, problems)
        last = answers(values, str(path / "policy"), problems)
        yield {
            "run": path.name, "lab": path.parent.name, "seed": values["seed"], "steps": steps, "problems": problems,
            "samples": SAMPLES, "accuracy_fp32": last.accuracy, "greedy_fp32": last.greedy,
            "distinct_fp32": last.distinct, "solved_fp32": last.solved,
            "accuracy_fp32_at_start": first[start].accuracy if start else None,
            "distinct_fp32_at_start": first[start].distinct if start else None,
        }  # fmt: skip
