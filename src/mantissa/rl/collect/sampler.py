"""From problems to graded completions. Every draw follows from the run's seed, a purpose and a position."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mantissa.base.errors import MantissaError
from mantissa.base.ranks import ALONE, Ranks
from mantissa.base.seeds import derive_seed
from mantissa.model import Tokenizer
from mantissa.rl.config.sections import RolloutConfig
from mantissa.rollout import Completion, Request, RolloutEngine, SamplingParams
from mantissa.rollout.most_probable import MostProbable
from mantissa.rollout.sampling import most_probable, supports
from mantissa.rollout.support import Support
from mantissa.tasks import Grader, Problem, Reward

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """One completion of ``problem``, whose tokens are ``prompt``; ``group``: the number of its prompt in the step."""

    problem: Problem
    group: int
    prompt: Sequence[int]
    completion: Completion
    text: str


def by_group(samples: Sequence[Sample], values: Sequence[T]) -> list[list[T]]:
    """``values``, one of each sample, of each group: in the order of the groups, which are contiguous."""
    pairs = zip(samples, values, strict=True)
    return [[value for _, value in group] for _, group in itertools.groupby(pairs, lambda pair: pair[0].group)]


def success_rates(samples: Sequence[Sample], rewards: Sequence[Reward]) -> list[float]:
    """For each problem, the share of its completions that are correct."""
    return [sum(reward.correct for reward in group) / len(group) for group in by_group(samples, rewards)]


class Sampler:
    """An engine, a tokenizer and a grader: from problems to graded completions.

    Each of ``ranks`` samples and grades its share of the problems, and all get everything.
    """

    def __init__(self, engine: RolloutEngine, tokenizer: Tokenizer, grader: Grader, ranks: Ranks = ALONE) -> None:
        self.engine, self.tokenizer, self.grader, self.ranks = engine, tokenizer, grader, ranks

    def params(
        self, max_tokens: int, temperature: float, stop: tuple[str, ...] = (), top_k: int = 0, top_p: float = 1.0
    ) -> SamplingParams:
        """Sampling parameters that end at the tokenizer's end tokens."""
        return SamplingParams(max_tokens, temperature, top_k, top_p, tuple(self.tokenizer.eos_ids), stop)

    def params_of(self, rollout: RolloutConfig) -> SamplingParams:
        """Those of a recipe."""
        return self.params(rollout.max_tokens, rollout.temperature, rollout.stop, rollout.top_k, rollout.top_p)

    def sample(
        self,
        problems: Sequence[Problem],
        samples: int,
        params: SamplingParams,
        version: int,
        *seed: int | str,
        first: int = 0,
    ) -> list[Sample]:
        """Sample each problem ``samples`` times; sample j of problem i depends on ``seed``, ``first`` + i and j alone.

        ``first``: the number of the first problem's group.
        """
        prompts = [self.encode(problem) for problem in problems]
        requests = [
            Request(tuple(prompt), derive_seed(*seed, index), samples) for index, prompt in enumerate(prompts, first)
        ]
        groups = self._generate(requests, params, version)
        return [
            Sample(problem, index, prompt, completion, self.tokenizer.decode(completion.tokens))
            for index, (problem, prompt, group) in enumerate(zip(problems, prompts, groups, strict=True), first)
            for completion in group
        ]

    def _generate(
        self, requests: Sequence[Request], params: SamplingParams, version: int
    ) -> Sequence[Sequence[Completion]]:
        if self.ranks.alone:
            return self.engine.generate(requests, params, version)
        share = self.ranks.shard(requests)
        groups = self.engine.generate(share, params, version) if share else []
        return [_unpacked(group) for group in self.ranks.gather_shards([_packed(group) for group in groups])]

    def grade(self, samples: Sequence[Sample]) -> list[Reward]:
        """A reward for each."""
        pairs = [(sample.problem, sample.text) for sample in samples]
        if self.ranks.alone:
            return self.grader.grade(pairs)
        here = self.ranks.shard(by_group(samples, pairs))
        flat = iter(self.grader.grade([pair for group in here for pair in group]))
        graded = self.ranks.gather_shards([list(itertools.islice(flat, len(group))) for group in here])
        return [reward for group in graded for reward in group]

    def encode(self, problem: Problem) -> list[int]:
        """The prompt's tokens; a prompt that this tokenizer cannot write names its problem."""
        try:
            if isinstance(problem.prompt, str):
                return self.tokenizer.encode_prompt(problem.prompt)
            return self.tokenizer.encode_prompt([{"role": m.role, "content": m.content} for m in problem.prompt])
        except MantissaError as error:
            raise MantissaError(f"problem {problem.id}: {error}") from None

    def accuracy(
        self, problems: Sequence[Problem], samples: int, params: SamplingParams, version: int, *seed: int | str
    ) -> float:
        """Mean over problems of the share of ``samples`` completions that are correct."""
        sampled = self.sample(problems, samples, params, version, *seed)
        rates = success_rates(sampled, self.grade(sampled))
        return sum(rates) / len(rates)


def _packed(group: Sequence[Completion]) -> tuple[Any, ...]:
    """A group as few objects, to travel: tokens, lengths, log-probs, finish reasons, version, keys, what is beside."""
    tokens = torch.tensor([token for completion in group for token in completion.tokens], dtype=torch.int64)
    logp = torch.cat([completion.logp_T for completion in group])
    lengths = [len(completion.tokens) for completion in group]
    reasons, keys = [completion.finish_reason for completion in group], [completion.key for completion in group]
    routes = [(completion.experts_SLK, completion.expert_weights_SLK) for completion in group]
    drawn, tops = supports(group), most_probable(group)
    support = None if drawn is None else Support.join(drawn)
    top = None if tops is None else MostProbable.join(tops)
    return tokens, lengths, logp, reasons, group[0].policy_version, keys, routes, support, top


def _unpacked(packed: tuple[Any, ...]) -> list[Completion]:
    tokens, lengths, logp, reasons, version, keys, routes, *kept = packed
    beside = [[None] * len(lengths) if each is None else each.split(lengths) for each in kept]
    each = zip(tokens.split(lengths), logp.split(lengths), reasons, keys, routes, *beside, strict=True)
    return [
        Completion(tuple(part.tolist()), logp_T.clone(), reason, version, key, experts, weights, support, top)
        for part, logp_T, reason, key, (experts, weights), support, top in each
    ]
