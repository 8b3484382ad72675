"""Collect: from problems to graded completions, and from a position in the data to the batch of one step.

Completions are flat, one ``Sample`` each with its group's number; the loop, evaluation, warm start and the filter of
prompts all sample and grade here.

A step's batch is a function of the run's seed, the step, the weights that sample it and the data position: an integer,
the number of prompts sampled before. Without dynamic sampling it is ``(step - 1) * rollout.prompts``; with it, it
counts every prompt, dropped ones included. So whoever holds the weights and the position can make a batch again, or
ahead of time.

The price of length: DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4).

A response that is cut off earns nothing however good its beginning was, which punishes sound reasoning without saying
why. A penalty that grows over the last ``buffer`` tokens says it:

    penalty = min(0, -(length - (max_tokens - buffer)) / buffer * factor)

from 0 at ``max_tokens - buffer`` tokens to ``-factor`` at ``max_tokens``. It is added to the reward that advantages are
made of; the verdict (``Reward.correct``), and with it every accuracy, knows nothing of it.

Which groups carry a gradient: the judgement behind DAPO's dynamic sampling (arXiv 2503.14476, section 3.2).

A group whose rewards are all equal has advantages of exactly 0: it costs its share of the batch and teaches nothing,
and as a policy improves most groups become so. Dynamic sampling drops them and samples further prompts until the batch
is full, so that every step learns from as many groups. What is kept is the first ``rollout.prompts`` good groups in the
order of the prompts, not of completion: short responses are not favoured. Groups beyond them (the surplus of the last
generation batch) are dropped as well; a later step would train on them with older weights.

Which prompts a policy sees then depends on the policy: accuracy over what was trained on is pulled towards one half,
and says little. ``reward/accuracy`` is over everything sampled; ``reward/accuracy_trained`` is the other.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from mantissa.bounds import boundary, count
from mantissa.bounds import number as is_number
from mantissa.errors import MantissaError
from mantissa.model import Tokenizer
from mantissa.ranks import ALONE, Ranks
from mantissa.rl.config import DynamicConfig, OverlongConfig, RolloutConfig
from mantissa.rl.experience import Experience
from mantissa.rl.seeds import derive_seed, stream_slice
from mantissa.rollout import Completion, FinishReason, Request, RolloutEngine, SamplingParams
from mantissa.runs.metrics import REWARD_PART
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


def overlong_penalty(length: int, max_tokens: int, config: OverlongConfig | None) -> float:
    """The penalty (0 or less) of a response of ``length`` tokens, its stop token included; 0 without ``config``."""
    if config is None:
        return 0.0
    excess = length - (max_tokens - config.buffer)
    return -excess / config.buffer * config.factor if excess > 0 else 0.0


def shaped(reward: Reward, penalty: float) -> Reward:
    """``reward`` with the penalty in its value and the same verdict; the very same one where there is none."""
    return replace(reward, value=reward.value + penalty) if penalty else reward


Fate = Literal["kept", "all_right", "all_wrong", "equal"]


def fate(graded: Sequence[Reward], shaped: Sequence[Reward]) -> Fate:
    """Whether a group is kept, and if not why.

    Kept where its rewards differ as the verifier gave them (``graded``) and as advantages see them (``shaped``), both
    in fp32, as the learner compares them. So a group of wrong answers is not kept for its lengths alone, nor one whose
    penalties happen to even its rewards out. ``all_right``, ``all_wrong``: by the verdicts; ``equal``: some of each.
    """
    if _differ(graded) and _differ(shaped):
        return "kept"
    right = sum(reward.correct for reward in graded)
    return "all_wrong" if right == 0 else "all_right" if right == len(graded) else "equal"


def chosen(fates: Sequence[Fate], wanted: int, config: DynamicConfig) -> list[int]:
    """The groups to train on, once enough are kept or the tries are used up: the first ``wanted`` that were kept.

    Fewer are an error, or with ``when_exhausted: continue`` what there is. Where that is none at all, the first
    ``wanted`` groups stand in: they carry no gradient, so the step measures and moves nothing.
    """
    kept = [index for index, fate_ in enumerate(fates) if fate_ == "kept"][:wanted]
    if len(kept) < wanted and config.when_exhausted == "error":
        count = Counter(fates)
        raise MantissaError(
            f"rollout.dynamic: {len(kept)} of {wanted} groups have a gradient after {config.max_generation_batches} "
            f"generation batches ({len(fates)} prompts: {count['all_right']} all right, {count['all_wrong']} all "
            f"wrong, {count['equal']} with equal rewards); use easier or harder prompts, raise max_generation_batches, "
            "or set rollout.dynamic.when_exhausted=continue"
        )
    return kept or list(range(min(wanted, len(fates))))


def dynamic_metrics(fates: Sequence[Fate], trained: int, generation_batches: int) -> dict[str, float]:
    """How much was sampled for ``trained`` groups, and what became of the others."""
    count = Counter(fates)
    return {
        "dynamic/generation_batches": generation_batches,
        "dynamic/prompts": len(fates),
        "dynamic/all_right": count["all_right"],
        "dynamic/all_wrong": count["all_wrong"],
        "dynamic/equal": count["equal"],
        "dynamic/kept_fraction": count["kept"] / len(fates),
        "dynamic/surplus": max(0, count["kept"] - trained),
        "dynamic/trained": min(count["kept"], trained),
    }


def _differ(rewards: Sequence[Reward]) -> bool:
    return len({np.float32(reward.value) for reward in rewards}) > 1


@dataclass(frozen=True)
class Batch:
    """What one step learns from.

    ``version``: the weights that sampled it. ``position``: prompts sampled up to and with this batch. ``indices``: each
    group's training problem. ``samples``: group after group. ``rewards``: of each, with values as advantages see them,
    overlong penalty included. ``metrics``: of all that was sampled, dropped groups included. ``seconds``: wall clock of
    ``rollout`` and ``reward``.
    """

    step: int
    version: int
    position: int
    indices: Sequence[int]
    samples: Sequence[Sample]
    rewards: Sequence[Reward]
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]

    def experience(self, device: torch.device) -> Experience:
        """As tensors; groups numbered from 0."""
        numbers = {group: number for number, group in enumerate(dict.fromkeys(s.group for s in self.samples))}
        return Experience.of(
            [sample.prompt for sample in self.samples],
            [sample.completion for sample in self.samples],
            [numbers[sample.group] for sample in self.samples],
            [reward.value for reward in self.rewards],
            device,
        )


class Collector:
    """Samples and grades batch after batch; ``position`` is the number of prompts sampled so far."""

    def __init__(
        self,
        sampler: Sampler,
        problems: Sequence[Problem],
        kept: Sequence[int],
        config: RolloutConfig,
        params: SamplingParams,
        seed: int,
    ) -> None:
        self.sampler, self.config, self.params, self.seed = sampler, config, params, seed
        self.problems, self.kept = problems, kept
        self.position = 0
        self._seconds: dict[str, float] = {}

    def collect(self, step: int, version: int) -> Batch:
        """The batch of ``step``, sampled by the engine's weights, which are ``version``."""
        config, dynamic = self.config, self.config.dynamic
        self._seconds = {"rollout": 0.0, "reward": 0.0}
        samples: list[Sample] = []
        rewards: list[Reward] = []
        fates: list[Fate] = []
        indices: list[int] = []
        tries, wanted = 0, config.prompts
        per_try, most = wanted, 1
        if dynamic is not None:
            per_try, most = dynamic.batch_prompts or wanted, dynamic.max_generation_batches
        while tries < most and fates.count("kept") < wanted:
            places = stream_slice(len(self.kept), self.position, per_try, self.seed, "prompts")
            self.position += per_try
            indices += [self.kept[place] for place in places]
            sampled, graded = self._generate(step, version, indices[len(fates) :], len(fates))
            final = [shaped(r, self._penalty(s.completion)) for s, r in zip(sampled, graded, strict=True)]
            fates += map(fate, by_group(sampled, graded), by_group(sampled, final))
            samples, rewards, tries = samples + sampled, rewards + final, tries + 1
        metrics = self._sample_metrics(samples, rewards)
        if dynamic is not None:
            trained = chosen(fates, wanted, dynamic)
            indices = [indices[group] for group in trained]
            keep = [sample.group in trained for sample in samples]
            samples, rewards = list(itertools.compress(samples, keep)), list(itertools.compress(rewards, keep))
            metrics |= dynamic_metrics(fates, min(fates.count("kept"), wanted), tries)
            metrics["reward/accuracy_trained"] = sum(reward.correct for reward in rewards) / len(rewards)
        return Batch(step, version, self.position, indices, samples, rewards, metrics, self._seconds)

    def _generate(
        self, step: int, version: int, indices: Sequence[int], first: int
    ) -> tuple[list[Sample], list[Reward]]:
        """Sample and grade these problems, the step's prompts ``first`` and on."""
        problems, count, seed = [self.problems[index] for index in indices], self.config.samples, self.seed
        started = time.perf_counter()
        samples = self.sampler.sample(problems, count, self.params, version, seed, "rollout", step, first=first)
        generated = time.perf_counter()
        graded = self.sampler.grade(samples)
        self._seconds["rollout"] += generated - started
        self._seconds["reward"] += time.perf_counter() - generated
        return samples, graded

    def _penalty(self, completion: Completion) -> float:
        return overlong_penalty(len(completion.tokens), self.config.max_tokens, self.config.overlong)

    def _sample_metrics(self, samples: Sequence[Sample], rewards: Sequence[Reward]) -> dict[str, float]:
        """Metrics of everything that was sampled."""
        completions = [sample.completion for sample in samples]
        lengths = [len(completion.tokens) for completion in completions]
        metrics: dict[str, float] = {
            "reward/accuracy": sum(reward.correct for reward in rewards) / len(rewards),
            "reward/verifier_errors": sum(reward.error is not None for reward in rewards),
            "length/mean": sum(lengths) / len(lengths),
            "length/max": max(lengths),
            "length/truncated_fraction": sum(c.finish_reason == "length" for c in completions) / len(completions),
            "rollout/tokens": sum(lengths),
        }
        metrics |= _reward_parts(rewards)
        if self.config.overlong is not None:
            penalties = [self._penalty(completion) for completion in completions]
            metrics["reward/overlong_penalty"] = sum(penalties) / len(penalties)
            metrics["reward/overlong_fraction"] = sum(penalty < 0 for penalty in penalties) / len(penalties)
        return metrics


def _reward_parts(rewards: Sequence[Reward]) -> dict[str, float]:
    """The mean of each number that rewards are made of, over the completions that have it."""
    values: dict[str, list[float]] = {}
    for reward in rewards:
        for name, value in reward.parts.items():
            values.setdefault(name, []).append(value)
    return {f"{REWARD_PART}{name}": math.fsum(many) / len(many) for name, many in sorted(values.items())}


def pack(batches: Iterable[Batch]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Batches as tensors and plain values, for a checkpoint. ``seconds`` are left out: a resume spends none."""
    tensors, plain = {}, []
    for batch in batches:
        completions = [sample.completion for sample in batch.samples]
        tensors[f"ahead/{batch.step}/tokens"] = torch.tensor([t for c in completions for t in c.tokens])
        tensors[f"ahead/{batch.step}/lengths"] = torch.tensor([len(c.tokens) for c in completions])
        tensors[f"ahead/{batch.step}/logp"] = torch.cat([c.logp_T for c in completions])
        plain.append(
            {
                "step": batch.step,
                "version": batch.version,
                "position": batch.position,
                "indices": list(batch.indices),
                "finish_reasons": [c.finish_reason for c in completions],
                "rewards": [[r.value, r.correct, r.error, dict(r.parts)] for r in batch.rewards],
                "metrics": dict(batch.metrics),
            }
        )
    return tensors, plain


def unpack(
    tensors: Mapping[str, Tensor],
    plain: Sequence[dict[str, Any]],
    problems: Sequence[Problem],
    sampler: Sampler,
    embeddings: int,
) -> list[Batch]:
    """The batches that ``pack`` was given; prompts and texts are made again by the sampler's tokenizer.

    ``embeddings``: the model's vocabulary. ``MantissaError`` where they are not such batches.
    """
    with boundary("checkpoint's batches of later steps", "they are damaged"):
        return [_one_unpacked(tensors, state, problems, sampler, embeddings) for state in plain]


def _one_unpacked(
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    problems: Sequence[Problem],
    sampler: Sampler,
    embeddings: int,
) -> Batch:
    step, version, position = (count(state[name], name) for name in ("step", "version", "position"))
    tokens, lengths, logp = (tensors[f"ahead/{step}/{name}"] for name in ("tokens", "lengths", "logp"))
    indices, reasons = state["indices"], state["finish_reasons"]
    checks = {
        "tokens": tokens.dtype == torch.int64 and bool(((tokens >= 0) & (tokens < embeddings)).all()),
        "lengths": lengths.dtype == torch.int64 and bool((lengths >= 1).all()) and int(lengths.sum()) == len(tokens),
        "logp": logp.dtype == torch.float32 and logp.shape == tokens.shape,
        "indices": all(is_number(index, 0, len(problems) - 1, whole=True) for index in indices),
        "groups": len(indices) > 0 and len(lengths) % len(indices) == 0,
        "finish_reasons": len(reasons) == len(lengths) and set(reasons) <= {"stop", "length"},
        "rewards": len(state["rewards"]) == len(lengths)
        and all(is_number(each[0], -math.inf, math.inf) for each in state["rewards"]),
        "metrics": all(isinstance(value, (int, float)) for value in state["metrics"].values()),
    }
    wrong = next((name for name, good in checks.items() if not good), None)
    if wrong is not None:
        raise MantissaError(f"checkpoint's batch of step {step} has wrong {wrong}; it is damaged")
    cut = lengths.tolist()
    size = len(cut) // len(indices)
    prompts = [sampler.encode(problems[index]) for index in indices]
    samples = []
    for number, (part, logp_T, reason) in enumerate(zip(tokens.split(cut), logp.split(cut), reasons, strict=True)):
        group, completion = number // size, Completion(tuple(part.tolist()), logp_T.clone(), reason, version)
        text = sampler.tokenizer.decode(completion.tokens)
        samples.append(Sample(problems[indices[group]], group, prompts[group], completion, text))
    rewards = [Reward(*reward) for reward in state["rewards"]]
    return Batch(step, version, position, indices, samples, rewards, state["metrics"], {})
