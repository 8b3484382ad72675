"""Sampling problems and grading what comes back: one function for the loop, evaluation, warm start and the filter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mantissa.errors import MantissaError
from mantissa.model import Tokenizer
from mantissa.ranks import ALONE, Ranks
from mantissa.rl.seeds import derive_seed
from mantissa.rollout import Completion, FinishReason, Request, RolloutEngine, SamplingParams
from mantissa.tasks import Grader, Problem, Reward


@dataclass(frozen=True)
class Sampled:
    """Problems with their groups of completions. ``texts`` and ``rewards`` are flat, group after group."""

    problems: Sequence[Problem]
    prompts: Sequence[Sequence[int]]
    groups: Sequence[Sequence[Completion]]
    texts: Sequence[str]

    def pairs(self) -> list[tuple[Problem, str]]:
        """Each completion's text with its problem, as the grader wants them."""
        owners = [problem for problem, group in zip(self.problems, self.groups, strict=True) for _ in group]
        return list(zip(owners, self.texts, strict=True))

    def success_rates(self, rewards: Sequence[Reward]) -> list[float]:
        """For each problem, the share of its completions that are correct."""
        rates, start = [], 0
        for group in self.groups:
            graded = rewards[start : start + len(group)]
            rates.append(sum(reward.correct for reward in graded) / len(graded))
            start += len(group)
        return rates


class Sampler:
    """An engine, a tokenizer and a grader: from problems to graded completions.

    With a ``ranks`` each samples and grades its share of the problems, and all get everything.
    """

    def __init__(self, engine: RolloutEngine, tokenizer: Tokenizer, grader: Grader, ranks: Ranks = ALONE) -> None:
        self.engine, self.tokenizer, self.grader, self.ranks = engine, tokenizer, grader, ranks

    def params(
        self, max_tokens: int, temperature: float, stop: tuple[str, ...] = (), top_k: int = 0, top_p: float = 1.0
    ) -> SamplingParams:
        """Sampling parameters that end at the tokenizer's end tokens."""
        return SamplingParams(max_tokens, temperature, top_k, top_p, tuple(self.tokenizer.eos_ids), stop)

    def sample(
        self,
        problems: Sequence[Problem],
        samples: int,
        params: SamplingParams,
        version: int,
        *seed: int | str,
        first: int = 0,
    ) -> Sampled:
        """Sample each problem ``samples`` times; completion (i, j) depends on ``seed``, ``first`` + i and j alone."""
        prompts = [self.encode(problem) for problem in problems]
        requests = [
            Request(tuple(prompt), derive_seed(*seed, index), samples) for index, prompt in enumerate(prompts, first)
        ]
        groups = self._generate(requests, params, version)
        texts = [self.tokenizer.decode(completion.tokens) for group in groups for completion in group]
        return Sampled(problems, prompts, groups, texts)

    def _generate(
        self, requests: Sequence[Request], params: SamplingParams, version: int
    ) -> Sequence[Sequence[Completion]]:
        if self.ranks.alone:
            return self.engine.generate(requests, params, version)
        mine = self.ranks.shard(requests)
        groups = self.engine.generate(mine, params, version) if mine else []
        return [_unpacked(group) for group in self.ranks.gather_shards([_packed(group) for group in groups])]

    def grade(self, sampled: Sampled) -> list[Reward]:
        """A reward for each completion, flat."""
        if self.ranks.alone:
            return self.grader.grade(sampled.pairs())
        sizes = [len(group) for group in sampled.groups]
        ends = list(itertools.accumulate(sizes))
        pairs = sampled.pairs()
        mine = self.ranks.shard([pairs[end - size : end] for size, end in zip(sizes, ends, strict=True)])
        flat = iter(self.grader.grade([pair for group in mine for pair in group]))
        graded = self.ranks.gather_shards([list(itertools.islice(flat, len(group))) for group in mine])
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
        rates = sampled.success_rates(self.grade(sampled))
        return sum(rates) / len(rates)


_Packed = tuple[Tensor, list[int], Tensor, list[FinishReason], int, list[int | None]]


def _packed(group: Sequence[Completion]) -> _Packed:
    """A group as few objects, to travel: tokens, lengths, log-probs, finish reasons, version, keys."""
    tokens = torch.tensor([token for completion in group for token in completion.tokens], dtype=torch.int64)
    logp = torch.cat([completion.logp_T for completion in group])
    lengths = [len(completion.tokens) for completion in group]
    reasons, keys = [completion.finish_reason for completion in group], [completion.key for completion in group]
    return tokens, lengths, logp, reasons, group[0].policy_version, keys


def _unpacked(packed: _Packed) -> list[Completion]:
    tokens, lengths, logp, reasons, version, keys = packed
    return [
        Completion(tuple(part.tolist()), logp_T.clone(), reason, version, key)
        for part, logp_T, reason, key in zip(tokens.split(lengths), logp.split(lengths), reasons, keys, strict=True)
    ]
