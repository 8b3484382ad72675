"""Batches for tests of the learner: real completions with made-up rewards; from scored to learned; and an oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mantissa.model import save_model
from mantissa.rl.assemble import Parts
from mantissa.rl.batch import Sample
from mantissa.rl.experience import Experience, Scored
from mantissa.rl.learner import Learner, Update, weigh
from mantissa.rollout import Completion
from mantissa.training import StepOutcome


def experience_of(
    prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Completion]], rewards: Sequence[float]
) -> Experience:
    """Groups of completions, one a prompt; ``rewards`` are flat."""
    flat = [(number, completion) for number, group in enumerate(groups) for completion in group]
    owners = [number for number, _ in flat]
    completions = [completion for _, completion in flat]
    return Experience.of([prompts[n] for n in owners], completions, owners, rewards, torch.device("cpu"))


def made_up(alive: int = 10, seed: int = 5) -> Experience:
    """Twelve completions of nobody's in groups of two, ``alive`` of them with an advantage. Tokens below 10."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        count = int(torch.randint(low, high, (), generator=draw))
        return torch.randint(2, 10, (count,), generator=draw).tolist()

    prompts = [tokens(2, 5) for _ in range(6)]
    answers = [[tokens(1, 6) for _ in range(2)] for _ in prompts]
    groups = [[Completion(tuple(t), torch.full((len(t),), -2.0), "length", 0) for t in each] for each in answers]
    return experience_of(prompts, groups, [float(i % 2) if i < alive else 1.0 for i in range(12)])


def of_samples(samples: Sequence[Sample], rewards: Sequence[float]) -> Experience:
    """What the sampler gave, with these rewards."""
    completions, groups = [sample.completion for sample in samples], [sample.group for sample in samples]
    return Experience.of([sample.prompt for sample in samples], completions, groups, rewards, torch.device("cpu"))


def sampled(
    parts: Parts, problems: int = 5, samples: int = 4, gap: float = 0.5, equal: bool = True, reference: bool = False
) -> Scored:
    """Completions of the learner's policy with rewards of 0 and 1, scored; the rollout is ``gap`` nats off.

    ``equal``: the last group's rewards are. ``reference``: scored by it too, and that is half a nat off as well.
    """
    train = parts.task.split("train", problems)
    result = parts.sampler.sample(train, samples, parts.sampler.params(6, 1.0), 0, 0, "test")
    draw = torch.Generator().manual_seed(1)
    rewards = torch.randint(0, 2, (problems * samples,), generator=draw).float()
    if equal:
        rewards[-samples:] = 1.0
    experience = of_samples(result, rewards.tolist())

    def off(logp_BR: torch.Tensor, by: float) -> torch.Tensor:
        return torch.where(experience.mask_BR, logp_BR + by * torch.randn(logp_BR.shape, generator=draw), 0.0)

    moved = replace(experience, rollout_logp_BR=off(experience.rollout_logp_BR, gap))
    scored = moved.with_learner(*parts.learner.score(moved))
    if not reference:
        return scored
    assert parts.reference is not None
    return scored.having(ref_logp_BR=off(parts.reference.score(scored), 0.5))


def learned(learner: Learner, experience: Scored, step: int = 1) -> Update:
    """Weigh a scored batch and learn from it."""
    return learner.learn(weigh(experience, learner.algorithm), step)


def dry_update(learner: Learner, experience: Scored, scale: float = 1.0) -> tuple[dict[str, torch.Tensor], Update]:
    """The gradients that the optimiser step is handed, which here takes no step; and what the learner says of it."""
    found: dict[str, torch.Tensor] = {}

    def run(backward: Callable[[float], None]) -> StepOutcome:
        learner.step.optimizer.zero_grad(set_to_none=True)
        backward(scale)
        found.update({name: p.grad / scale for name, p in learner.step.parameters.items() if p.grad is not None})
        learner.step.optimizer.zero_grad(set_to_none=True)
        return StepOutcome("stepped", 0, 1.0, 1.0, 0.0, 0.0)

    learner.step.run = run  # type: ignore[method-assign]
    update = learned(learner, experience)
    del learner.step.run
    return found, update


def gradients(learner: Learner, experience: Scored, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """The first of ``dry_update``."""
    return dry_update(learner, experience, scale)[0]


def hugging_face(parts: Parts, folder: Path) -> Any:
    """The policy in transformers, in float64."""
    from transformers import AutoModelForCausalLM

    save_model(parts.model, parts.tokenizer, folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")


def naive_sequences(
    model: Any, experience: Scored, temperature: float = 1.0
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of one unpadded sequence after the other: final states, log-probs of the response's tokens, entropies there."""
    for row in range(len(experience)):
        prompt, length = int(experience.prompt_length_B[row]), int(experience.length_B[row])
        tokens = experience.tokens_BT[row, :length]
        states = model.model(tokens[None]).last_hidden_state[0]
        distribution = (model.lm_head(states) / temperature).log_softmax(-1)
        logp = torch.stack([distribution[i - 1, tokens[i]] for i in range(prompt, length)])
        yield states, logp, -(distribution.exp() * distribution).sum(-1)[prompt - 1 : length - 1]
