"""Mantissa's side of the RL step: a worker (see workers.py) around ``Run``, as ``mantissa train`` runs it.

    python benchmarks/our_step.py FOLDER --precision fp16 --threads 2 [--work pretrained --model MODEL]

A step is everything that ``mantissa train`` does in one: sample, grade, score under the learner (the measurement of the
gap, which a trainer without it does not pay for), update, hand the weights over, write metrics and every completion.
``FOLDER`` receives the prompts, and the model where none is given. Two things differ from a recipe, both so that the
work is fixed: the end token does not end a completion, and the reward is ``rl_problem.reward``.
"""

from __future__ import annotations

import json
import resource
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rl_problem import ALPHABET, SHAPE, WORKS, Work, reward, worker_arguments
from workers import serve

from mantissa.base.environ import keep_freed_memory, settled
from mantissa.model import Decoder, FreshModelConfig, character_tokenizer, save_model
from mantissa.rl import RunConfig, make_config
from mantissa.rl.assemble import Parts, assemble
from mantissa.rl.run import Run
from mantissa.rl.session import open_source
from mantissa.rl.step import settle, take_step
from mantissa.runs.directory import RunDirectory
from mantissa.runs.live import Live, Trackers
from mantissa.tasks import Grader, Problem, Reward, Verifier

PHASES = ("rollout", "reward", "learner_logp", "update", "sync")


class DenseReward(Verifier):
    """``rl_problem.reward`` as a verifier."""

    def __call__(self, problem: Problem, completion: str) -> Reward:
        return Reward(reward(completion), correct=False)


def recipe(model: Path, work: Work, precision: str, device: str, run_dir: str) -> RunConfig:
    digits = work.prompt_tokens - 1
    values: dict[str, Any] = {
        "name": "rl_step", "steps": 1_000_000, "device": device, "precision": precision, "run_dir": run_dir,
        "model": {"path": str(model)},
        "task": {"kind": "running_sum", "min_digits": digits, "max_digits": digits, "train_size": work.prompts,
                 "heldout_size": 0, "warm_start_size": 0},
        "rollout": {"prompts": work.prompts, "samples": work.samples, "max_tokens": work.new_tokens,
                    "slots": work.rows},
        "algorithm": {"advantage": "grpo", "loss": "ppo_clip", "aggregation": "token_mean", "correction": "none"},
        "optimizer": {"lr": work.learning_rate, "updates_per_batch": 1, "max_grad_norm": 1.0,
                      "micro_batch_tokens": 32768},
        "evaluation": None, "checkpoint": {"every": 1_000_000}, "trackers": [],
    }  # fmt: skip
    return make_config(values, "rl_step")


def write_model(folder: Path) -> Path:
    """The small model as a Hugging Face folder, for both sides."""
    if (folder / "model").is_dir():
        return folder / "model"
    tokenizer = character_tokenizer(ALPHABET)
    config = FreshModelConfig.model_validate(SHAPE).model(tokenizer.vocab_size)
    save_model(Decoder(config).initialize(torch.Generator().manual_seed(0)), tokenizer, folder / "model")
    return folder / "model"


def build(model: Path, work: Work, precision: str, device: str, run_dir: str) -> tuple[Run, Parts, Live]:
    """The run at its first step, outside a recipe's life cycle (no warm start, no checkpoint)."""
    config = recipe(model, work, precision, device, run_dir)
    parts = assemble(config)
    parts.task.verifier = DenseReward()
    parts.sampler.grader = Grader(parts.task.verifier)
    folder = RunDirectory.create(run_dir, {}, {"precision": parts.precision.rows()})
    live = Live(config.steps)
    run = Run(config, parts, folder, Trackers(()), live)
    run.params = replace(run.params, stop_token_ids=())
    run.kept = list(range(work.prompts))
    run.source = open_source(run)
    run.source.start(0, parts.learner.weights, parts.learner.version, ())
    return run, parts, live


class Stepper:
    """Does step after step and says what each took."""

    def __init__(self, folder: Path, work: Work, precision: str, device: str, model: Path | None) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="rl_step-"))
        self.work, run_dir = work, str(self._scratch / "run")
        self.run, self.parts, self._live = build(model or write_model(folder), work, precision, device, run_dir)
        self._count = 0
        prompts = [problem.prompt for problem in self.run.train]
        (folder / "prompts.json").write_text(json.dumps(prompts))

    def __call__(self, order: str = "go") -> dict[str, Any]:
        return self._profile() if order == "profile" else self._measure()

    def _profile(self) -> dict[str, Any]:
        """Shares of the operations that one step spends most of its time in."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            self._measure()
        times = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
        total = sum(times.values())
        return {"ops": {name: times[name] / total for name in sorted(times, key=times.__getitem__)[:-6:-1]}}

    def _measure(self) -> dict[str, Any]:
        self._count += 1
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        started, cpu = time.perf_counter(), time.process_time()
        settle(self.run, self._count, take_step(self.run, self._count))
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        used = resource.getrusage(resource.RUSAGE_SELF)
        row = self.run.folder.metrics.read()[-1]
        assert row["rollout/tokens"] == self.work.rows * self.work.new_tokens
        assert row["optim/updates"] == self._count, "a step was skipped"
        phases = {phase: row[f"time/{phase}"] for phase in PHASES}
        memory = {"page_faults": used.ru_minflt - faults, "peak_memory": used.ru_maxrss * 1024}
        return {"seconds": seconds, "cpu": cpu, "phases": phases | {"other": seconds - sum(phases.values())}, **memory}

    @property
    def about(self) -> dict[str, Any]:
        roles = {role["role"]: role for role in self.parts.precision.rows()}
        return {
            "active": self.parts.precision.learner.active.name, "kernels": roles["learner"]["kernels"],
            "evidence": self.parts.evidence["learner"], "threads": torch.get_num_threads(),
        }  # fmt: skip

    def close(self) -> None:
        self.parts.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def main() -> None:
    parser = worker_arguments(__doc__)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--allocator", default="kept", choices=("kept", "default"), help="kept, as the command has it")
    arguments = parser.parse_args()
    if arguments.allocator == "kept" and not keep_freed_memory():
        raise SystemExit(
            "our_step.py: the allocator refused to keep freed memory; unset MALLOC_*, or --allocator default"
        )
    torch.set_num_threads(arguments.threads)
    stepper = Stepper(arguments.folder, WORKS[arguments.work], arguments.precision, arguments.device, arguments.model)
    try:
        with settled():  # as the run's own loop
            serve(stepper.about, stepper)
    finally:
        stepper.close()


if __name__ == "__main__":
    main()
