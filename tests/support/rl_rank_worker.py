"""What each process of tests/rl/test_processes.py does: ``torchrun rl_rank_worker.py FOLDER``, with ``jobs.json``.

A job is ``{"name", "scenario", "recipe"}``; each leaves ``FOLDER/<name>-<rank>.pt``. The same scenarios run in the
tests' own process, for what one process computes.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mantissa.rl.session
from experiences import sampled
from mantissa.base.errors import MantissaError
from mantissa.base.ranks import whole
from mantissa.model.decoder import Norm
from mantissa.precision import values
from mantissa.rl import make_config, resume, start
from mantissa.rl.assemble import assemble
from mantissa.rl.experience import Experience
from mantissa.rl.learner import Learner, weigh
from mantissa.rl.session import joined
from mantissa.rollout import NativeEngine
from mantissa.training import StepOutcome
from other_library import asked_library, asked_processor
from small_run import no_report, stopped
from strict_promotion import StrictPromotion

Recipe = dict[str, Any]


def gradients(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The gradient of one batch, its log-probs and tallies: everything up to the optimiser's turn.

    Real completions with made-up rewards, of which the last group's are equal; the rollout is half a nat off.
    """
    config = make_config(recipe, "test")
    with joined(config, torch.device("cpu")) as ranks:
        parts = assemble(config, ranks)
        parts.sampler.engine.sync(parts.learner.weights, 0)
        experience = sampled(parts)
        if parts.reference is not None:
            if parts.reference.teacher is None:
                parts.reference.take(parts.learner.weights, 0)
            experience = experience.having(ref_logp_BR=parts.reference.score(experience))
        learner, found = parts.learner, {}

        def run(backward: Callable[[float], None]) -> StepOutcome:
            learner.step.optimizer.zero_grad(set_to_none=True)
            backward(1.0)
            gradients = {n: p.grad for n, p in learner.step.parameters.items() if p.grad is not None}
            found.update(whole(gradients))
            return StepOutcome("stepped", 0, 1.0, 1.0, 0.0, 0.0)

        real, rows = learner._step, []

        def step(data: Any, batches: Any, number: int) -> Any:
            rows.extend(len(micro.rows) for micro in batches if micro.counts)
            return real(data, batches, number)

        learner.step.run, learner._step = run, step  # type: ignore[method-assign]
        weighed = weigh(experience, learner.algorithm)
        flushed, update = learner.flushed(weighed, 1), learner.learn(weighed, 1)
        parts.close()
        return {
            "gradients": found,
            "tokens": experience.tokens_BT,
            "old": experience.old_logp_BR,
            "entropy": experience.columns.get("entropy_BR"),
            "rollout": experience.rollout_logp_BR,
            "reference": experience.columns.get("ref_logp_BR"),
            "advantage": weighed.advantage_B,
            "trained": update.trained_tokens,
            "flushed": flushed,
            "rows": sum(rows),
            "tallies": {name: float(value) for name, value in values(update.tallies).items()},
            "weights": dict(whole(dict(learner.weights))),
        }


def train(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """A whole run; what it leaves is in ``folder``."""
    start(make_config(recipe | {"run_dir": str(folder)}, "test"))
    return {}


def go_on(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Resume a copy of the run ``recipe["of"]`` as if it had been stopped after step 2."""
    if int(os.environ.get("RANK", "0")) == 0:
        stopped(recipe["of"], 2, folder)
    if dist.is_initialized():
        dist.barrier()
    resume(folder, [f"{key}={recipe[key]}" for key in ("nproc", "parallel") if recipe.get(key)])
    return {}


def overflow(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """A run in which one number of one gradient overflows on the last rank: in step 2 once, in step 3 always.

    It is the first of the last norm's, which with FSDP2 is rank 0's to keep: no other rank sees it by itself.
    """
    outcomes: list[str] = []
    real, real_learn = Learner._loss, Learner.learn
    state = {"step": 0, "losses": 0}

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            grad = grad.clone()
            last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
            if last and ((state["step"] == 2 and state["losses"] == 1) or state["step"] == 3):
                grad[0] = math.inf
            return grad

    def of_sum(self: Norm, x: Tensor, y: Tensor, kernels: Any) -> tuple[Tensor, Tensor]:
        weight = Poison.apply(self.weight) if self.weight.requires_grad else self.weight
        return kernels.add_norm(x, y, weight, self.eps)

    def loss(self: Learner, *rest: Any) -> Any:
        state["losses"] += 1
        return real(self, *rest)

    def learn(self: Learner, experience: Experience, step: int, *rest: Any) -> Any:
        state.update(step=step, losses=0)
        self.model.model.norm.of_sum = of_sum.__get__(self.model.model.norm)  # type: ignore[method-assign]
        result = real_learn(self, experience, step, *rest)
        outcomes.extend(f"{step} {outcome} {outcome.scale:g}" for outcome in result.outcomes)
        return result

    Learner._loss, Learner.learn = loss, learn  # type: ignore[method-assign,assignment]
    try:
        start(make_config(recipe | {"run_dir": str(folder)}, "test"))
    finally:
        Learner._loss, Learner.learn = real, real_learn  # type: ignore[method-assign]
    return {"outcomes": outcomes}


def mismatch(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Exact kernels, and a rollout on the last rank whose weights are not the learner's: every rank must stop."""
    real = NativeEngine.sync

    def sync(self: NativeEngine, weights: Any, version: int) -> None:
        real(self, weights, version)
        if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                self.model.model.layers[1].mlp.down_proj.weight[3] *= 1.5  # type: ignore[operator,union-attr]

    NativeEngine.sync = sync  # type: ignore[method-assign]
    try:
        start(make_config(recipe | {"run_dir": str(folder)}, "test"))
    except MantissaError as error:
        return {"error": str(error)}
    finally:
        NativeEngine.sync = real  # type: ignore[method-assign]
    return {"error": ""}


def stop(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """A loss on the last rank whose gradient is not finite in fp32, which no scale can cure: every rank must stop."""
    real = Learner._loss

    def loss(self: Learner, *rest: Any) -> Any:
        value, tallies = real(self, *rest)
        last = self.ranks.rank == self.ranks.world - 1
        return (value * math.inf if last and rest[1].counts else value), tallies

    Learner._loss = loss  # type: ignore[method-assign]
    try:
        start(make_config(recipe | {"run_dir": str(folder)}, "test"))
    except MantissaError as error:
        return {"error": str(error)}
    finally:
        Learner._loss = real  # type: ignore[method-assign]
    return {"error": ""}


SCENARIOS: dict[str, Callable[[Recipe, Path], dict[str, Any]]] = {
    f.__name__: f for f in (gradients, train, go_on, overflow, mismatch, stop)
}


def alone(scenario: str, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """A scenario in this process."""
    return SCENARIOS[scenario](copy.deepcopy(recipe) | {"nproc": 1, "parallel": None}, folder)


def main() -> None:
    folder = Path(sys.argv[1])
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    mantissa.rl.session.build_report = no_report
    dist.init_process_group("gloo")
    for job in json.loads((folder / "jobs.json").read_text()):
        recipe = job["recipe"] | {"nproc": dist.get_world_size()}
        with asked_library(), asked_processor(), StrictPromotion():
            content = SCENARIOS[job["scenario"]](recipe, folder / job["name"])
        torch.save(content, folder / f"{job['name']}-{dist.get_rank()}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the interpreter's own exit now and then, which is not what is tested here


if __name__ == "__main__":
    main()
