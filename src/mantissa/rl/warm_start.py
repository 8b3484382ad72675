"""The warm start: supervised steps on the task's own solutions, for a policy that sometimes succeeds.

It runs in the learner's precision through the same optimiser step as RL, with an optimiser and a scaler of its own that
end with it. Everything in it is a function of the seed, so a run killed during its warm start begins it again and
arrives at the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mantissa.algorithms import aggregation_scale
from mantissa.base.seeds import stream_slice
from mantissa.precision import masked_sum
from mantissa.rl.assemble import Parts
from mantissa.rl.collect.batch import Sampler
from mantissa.rl.config.sections import WarmStartConfig
from mantissa.rl.experience import Sequences
from mantissa.rl.learner import Learner
from mantissa.rollout import SamplingParams
from mantissa.tasks import Problem
from mantissa.training import (
    OptimizerStep,
    learning_rate,
)

_LR_WARMUP = 20


# The warm start
def warm_start(
    parts: Parts,
    config: WarmStartConfig,
    params: SamplingParams,
    report: Callable[[dict[str, Any]], None],
    doing: Callable[[str], None] = lambda what: None,
) -> None:
    """Train on the task's solutions until ``config.steps``, or until sampled accuracy reaches the target.

    ``report`` receives ``{"step", "warm_start/loss", "warm_start/accuracy"}`` after each evaluation; ``doing`` is told
    each step's number, in words. Every problem of the split has a solution: ``assemble`` has seen to that.
    """
    learner, sampler = parts.learner, parts.sampler
    solved, heldout = parts.task.split("warm_start"), parts.task.split("heldout")[: config.problems]
    optimizer_step = learner.optimizer_step(
        learning_rate(config.lr, _LR_WARMUP), parts.new_scaler(), purpose="warm start"
    )
    losses: list[float] = []
    for step in range(1, config.steps + 1):
        doing(f"warm start {step:,} of at most {config.steps:,}")
        indices = stream_slice(len(solved), (step - 1) * config.batch, config.batch, learner.seed, "warm_start")
        sequences = _sequences([solved[index] for index in indices], sampler, parts.device)
        losses.append(_supervised_step(learner, optimizer_step, sequences))
        if step % config.evaluate_every == 0 or step == config.steps:
            sampler.engine.sync(learner.weights, learner.version)
            accuracy = sampler.accuracy(
                heldout, 1, params, learner.version, learner.seed, "warm_start evaluation", step
            )
            sampler.engine.pause()
            report({"step": step, "warm_start/loss": sum(losses) / len(losses), "warm_start/accuracy": accuracy})
            losses.clear()
            if accuracy >= config.target_accuracy:
                return


def _sequences(problems: Sequence[Problem], sampler: Sampler, device: torch.device) -> Sequences:
    """Each prompt with its solution and an end token."""
    end = sampler.tokenizer.eos_ids[0]
    responses = []
    for problem in problems:
        assert problem.solution is not None, f"problem {problem.id} has no solution"
        responses.append([*sampler.tokenizer.encode(problem.solution), end])
    return Sequences.build([sampler.encode(problem) for problem in problems], responses, device)


def _supervised_step(learner: Learner, step: OptimizerStep, sequences: Sequences) -> float:
    """One step on -mean_t logp; returns that loss."""
    scale_BR, ranks = aggregation_scale(sequences.mask_BR, "token_mean"), learner.ranks
    rows = sequences.rows
    parts = sequences.micro_batches(rows, learner.config.micro_batch_tokens, ranks)
    losses: list[torch.Tensor] = []

    def backward(scale: float) -> torch.Tensor:
        losses.clear()
        for part_rows in parts:
            part = sequences.select(part_rows if len(part_rows) else rows[:1])
            logp_N = learner.logp(part, learner.kernels)
            if len(part_rows):
                weight_N = scale_BR[part_rows, : part.mask_BR.shape[1]][part.mask_BR]
            else:
                weight_N = torch.zeros_like(logp_N)  # only there for the exchange with other ranks
            loss = -masked_sum(logp_N * weight_N, torch.ones_like(logp_N, dtype=torch.bool))
            losses.append(loss.detach())
            (loss * scale).backward()
        ranks.sum_gradients(step.parameters.values())
        return torch.stack(losses).sum()

    step.run(backward)
    return ranks.sum_of(float(torch.stack(losses).sum()))
