"""The batch of one step, from a position in the data: problems, completions, rewards.

Every draw follows from the run's seed, a purpose and a position. A step's batch is a function of the run's seed, the
step, the weights that sample it and the data position: an integer, the number of prompts sampled before. Without
dynamic sampling it is ``(step - 1) * rollout.prompts``; with it, it counts every prompt, dropped ones included. So
whoever holds weights and position can make a batch again, or ahead.

**The price of length** (``OverlongConfig``): a response that is cut off earns nothing however good its beginning was,
which punishes sound reasoning without saying why. A penalty that grows over the last tokens says it. It is added to the
reward that advantages are made of; the verdict (``Reward.correct``), and with it every accuracy, knows nothing of it.

**Dynamic sampling** (``DynamicConfig``): a group whose rewards are all equal has advantages of exactly 0. It costs its
share of the batch and teaches nothing, and as a policy improves most groups become so. Dynamic sampling drops them and
samples further prompts until the batch is full, so that every step learns from as many groups. What is kept is the
first ``rollout.prompts`` good groups in the order of the prompts, not of completion: short responses are not favoured.
Groups beyond them (the surplus of the last generation batch) are dropped as well; a later step would train on them with
older weights.

Accuracy over what was trained on is then pulled towards one half, and says little. ``reward/accuracy`` is over
everything sampled; ``reward/accuracy_trained`` is the other.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from mantissa.base.bounds import number
from mantissa.base.errors import MantissaError
from mantissa.base.ranks import ALONE, Ranks
from mantissa.base.seeds import derive_seed, stream_slice
from mantissa.model import Tokenizer
from mantissa.rl.config.sections import DynamicConfig, OverlongConfig, RolloutConfig
from mantissa.rl.experience import Experience, routes_of
from mantissa.rollout import Completion, Request, RolloutEngine, SamplingParams
from mantissa.rollout.engine import most_probable, supports
from mantissa.rollout.sampling import FinishReason
from mantissa.rollout.support import MostProbable, Support
from mantissa.runs.catalogue import REWARD_PART
from mantissa.tasks import Grader, Problem, Reward

T = TypeVar("T")
Weights = Mapping[str, Tensor]  # the policy's, by name


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
        shares = [requests[rank :: self.ranks.world] for rank in range(self.ranks.world)]
        prompts = [[request.prompt_tokens for request in share for _ in range(request.samples)] for share in shares]
        mine = self.ranks.rank
        groups = self.engine.generate(shares[mine], params, version) if shares[mine] else []
        flat = list(itertools.chain.from_iterable(groups))
        # One of a rank, not of a group: of a step of 350 ms, packing, pickling and splitting takes 8 ms and not 24.
        gathered = self.ranks.gather(Completions.of(prompts[mine], flat) if flat else None)
        whole = [iter(each.split(of) if each else ()) for each, of in zip(gathered, prompts, strict=True)]
        return [list(itertools.islice(whole[i % self.ranks.world], each.samples)) for i, each in enumerate(requests)]

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
        numbers = {group: index for index, group in enumerate(dict.fromkeys(s.group for s in self.samples))}
        return Experience.of(
            [sample.prompt for sample in self.samples],
            [sample.completion for sample in self.samples],
            [numbers[sample.group] for sample in self.samples],
            [reward.value for reward in self.rewards],
            device,
            [reward.terms for reward in self.rewards],
        )


@dataclass
class Collector:
    """Samples and grades batch after batch; ``position`` is the number of prompts sampled so far."""

    sampler: Sampler
    problems: Sequence[Problem]
    kept: Sequence[int]
    config: RolloutConfig
    params: SamplingParams
    seed: int
    position: int = 0

    def collect(self, step: int, version: int) -> Batch:
        """The batch of ``step``, sampled by the engine's weights, which are ``version``."""
        config, dynamic = self.config, self.config.dynamic
        seconds = {"rollout": 0.0, "reward": 0.0}
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
            problems = [self.problems[index] for index in indices[len(fates) :]]
            started = time.perf_counter()
            sampled = self.sampler.sample(
                problems, config.samples, self.params, version, self.seed, "rollout", step, first=len(fates)
            )
            generated = time.perf_counter()
            graded = self.sampler.grade(sampled)
            seconds["rollout"] += generated - started
            seconds["reward"] += time.perf_counter() - generated
            lengths = [len(sample.completion.tokens) for sample in sampled]
            penalties = [overlong_penalty(length, config.max_tokens, config.overlong) for length in lengths]
            final = [with_penalty(reward, penalty) for reward, penalty in zip(graded, penalties, strict=True)]
            fates += map(fate, by_group(sampled, graded), by_group(sampled, final))
            samples, rewards, tries = samples + sampled, rewards + final, tries + 1
        metrics = sample_metrics(samples, rewards, config)
        if dynamic is not None:
            trained = groups_to_train(fates, wanted, dynamic)
            indices = [indices[group] for group in trained]
            keep = [sample.group in trained for sample in samples]
            samples, rewards = list(itertools.compress(samples, keep)), list(itertools.compress(rewards, keep))
            metrics |= dynamic_metrics(fates, min(fates.count("kept"), wanted), tries)
            metrics["reward/accuracy_trained"] = sum(reward.correct for reward in rewards) / len(rewards)
        return Batch(step, version, self.position, indices, samples, rewards, metrics, seconds)


class SyncSource:
    """Batches in the order of steps, each sampled when it is asked for, by the newest weights."""

    def __init__(self, collector: Collector, engine: RolloutEngine) -> None:
        self._collector, self._engine = collector, engine

    def start(self, step: int, weights: Weights, version: int, ahead: Sequence[Batch]) -> None:
        """Begin after ``step``, whose weights these are; ``ahead``: what ``pending`` said then."""
        if ahead:
            raise MantissaError(
                f"the checkpoint of step {step} holds batches of later steps, and with rollout.max_policy_lag=0 none "
                "are sampled: it is damaged, or another run's; delete it to go on from an earlier one"
            )
        self._engine.sync(weights, version)

    def take(self, step: int) -> Batch:
        """The batch of ``step``: the one after the last that was taken."""
        batch = self._collector.collect(step, self._engine.version)
        self._engine.pause()
        return batch

    def again(self, position: int) -> None:
        """The next ``take`` is of the step that was taken last, whose first prompt is at ``position``."""
        self._collector.position = position

    def hand_over(self, step: int, weights: Weights, version: int) -> None:
        """The learner's weights after ``step``."""
        if self._engine.version != version:
            self._engine.sync(weights, version)

    def pending(self, step: int) -> list[Batch]:
        """The batches of later steps that weights older than those after ``step`` sample: what a checkpoint keeps."""
        return []

    def engine(self, weights: Weights, version: int) -> AbstractContextManager[None]:
        """Holds the engine, with these weights in it, for other use than batches."""
        self.hand_over(0, weights, version)
        return nullcontext()

    def close(self) -> None:
        """Stop sampling; what is being sampled is finished first."""


def sample_metrics(samples: Sequence[Sample], rewards: Sequence[Reward], config: RolloutConfig) -> dict[str, float]:
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
    if looked := [reward.found for reward in rewards if reward.found is not None]:
        metrics["reward/no_answer_fraction"] = looked.count(False) / len(looked)
    if config.overlong is not None:
        penalties = [overlong_penalty(length, config.max_tokens, config.overlong) for length in lengths]
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


def overlong_penalty(length: int, max_tokens: int, config: OverlongConfig | None) -> float:
    """The penalty (0 or less) of a response of ``length`` tokens, its stop token included; 0 without ``config``."""
    if config is None:
        return 0.0
    excess = length - (max_tokens - config.buffer)
    return -excess / config.buffer * config.factor if excess > 0 else 0.0


def with_penalty(reward: Reward, penalty: float) -> Reward:
    """``reward`` with the penalty in its value and the same verdict; the very same one where there is none.

    Its terms are those of the reward without the penalty, which an advantage of each term by itself does not go with.
    """
    return replace(reward, value=reward.value + penalty) if penalty else reward


Fate = Literal["kept", "all_right", "all_wrong", "equal"]


def fate(graded: Sequence[Reward], shaped: Sequence[Reward]) -> Fate:
    """Whether a group is kept, and if not why.

    Kept where its rewards differ as the verifier gave them (``graded``) and as advantages see them (``shaped``), both
    in fp32, as the learner compares them. So a group of wrong answers is not kept for its lengths alone, nor one whose
    penalties happen to even its rewards out. ``all_right``, ``all_wrong``: by the verdicts; ``equal``: some of each.
    """
    if all(len({np.float32(reward.value) for reward in rewards}) > 1 for rewards in (graded, shaped)):
        return "kept"
    right = sum(reward.correct for reward in graded)
    return "all_wrong" if right == 0 else "all_right" if right == len(graded) else "equal"


def groups_to_train(fates: Sequence[Fate], wanted: int, config: DynamicConfig) -> list[int]:
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
    """How much was sampled for ``trained`` groups that were kept, and what became of the others."""
    count = Counter(fates)
    return {
        "dynamic/generation_batches": generation_batches,
        "dynamic/prompts": len(fates),
        "dynamic/kept_fraction": count["kept"] / len(fates),
        "dynamic/surplus": count["kept"] - trained,
        "dynamic/trained": trained,
    } | {f"dynamic/{name}": count[name] for name in ("all_right", "all_wrong", "equal")}


_ROUTES = {"experts": torch.int16, "expert_weights": torch.float32}


@dataclass(frozen=True)
class Completions:
    """Completions by columns: how they travel between ranks, and how a checkpoint holds them. Few objects, whatever
    their number; what is not told is not there.

    ``tokens_N`` (int64), ``logp_N`` (fp32), ``length_B`` (int64), and one reason and one key for each completion.
    P: positions of all of them but each one's last, L: mixtures of experts, K: experts or most probable tokens.

    ``version``: the weights that sampled them. ``told``: what the engine tells besides, by name: ``experts`` and
    ``expert_weights`` (P,L,K), ``support_words`` and ``support_counts`` (``Support``'s), ``top_ids`` and ``top_logp``
    (N,K).
    """

    tokens_N: Tensor
    length_B: Tensor
    logp_N: Tensor
    finish_reasons: Sequence[str]
    version: int
    keys: Sequence[int | None]
    told: Mapping[str, Tensor]

    @staticmethod
    def of(prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> Completions:
        """Of completions of one version, each with its prompt's tokens."""
        routes = zip(_ROUTES, routes_of(prompts, completions), strict=True)
        told = {name: torch.cat(found) for name, found in routes if found is not None}
        if (drawn := supports(completions)) is not None:
            support = Support.join(drawn)
            told |= {"support_words": support.words, "support_counts": support.counts}
        if (tops := most_probable(completions)) is not None:
            top = MostProbable.join(tops)
            told |= {"top_ids": top.ids_TK, "top_logp": top.logp_TK}
        return Completions(
            torch.tensor([token for completion in completions for token in completion.tokens], dtype=torch.int64),
            torch.tensor([len(completion.tokens) for completion in completions]),
            torch.cat([completion.logp_T for completion in completions]),
            [completion.finish_reason for completion in completions],
            completions[0].policy_version,
            [completion.key for completion in completions],
            told,
        )

    def split(self, prompts: Sequence[Sequence[int]]) -> list[Completion]:
        """The inverse of ``of``: each by itself, of its prompt."""
        lengths = self.length_B.tolist()
        positions = [len(prompt) + length - 1 for prompt, length in zip(prompts, lengths, strict=True)]
        nothing: list[None] = [None] * len(lengths)
        routes = [self.told[name].split(positions) if name in self.told else nothing for name in _ROUTES]
        drawn = support.split(lengths) if (support := self._support()) is not None else nothing
        tops = top.split(lengths) if (top := self._top()) is not None else nothing
        tokens, logps = self.tokens_N.split(lengths), self.logp_N.split(lengths)
        every: Any = zip(tokens, logps, self.finish_reasons, self.keys, *routes, drawn, tops, strict=True)
        return [
            Completion(tuple(part.tolist()), logp_T.clone(), reason, self.version, key, *beside)
            for part, logp_T, reason, key, *beside in every
        ]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The columns that are tensors, by the names that a file has for them."""
        return {"tokens": self.tokens_N, "lengths": self.length_B, "logp": self.logp_N, **self.told}

    def wrong(self, prompts: Sequence[Sequence[int]], embeddings: int) -> str | None:
        """Which of what a file held cannot be, of a model of so many ``embeddings``; None where all can."""
        tokens, lengths, logp = self.tokens_N, self.length_B, self.logp_N
        if not (tokens.dtype == torch.int64 and bool(((tokens >= 0) & (tokens < embeddings)).all())):
            return "tokens"
        whole = lengths.dtype == torch.int64 and bool((lengths >= 0).all()) and int(lengths.sum()) == len(tokens)
        if not whole or len(lengths) != len(prompts):
            return "lengths"
        support, top = self._support(), self._top()
        fits = {
            "logp": logp.dtype == torch.float32 and logp.shape == tokens.shape,
            "support": support is None or support.fits(tokens.tolist(), embeddings),
            "most probable tokens": top is None or top.fits(len(tokens), embeddings),
            "finish_reasons": len(self.finish_reasons) == len(lengths)
            and set(self.finish_reasons) <= set(get_args(FinishReason)),
            "keys": len(self.keys) == len(lengths)
            and all(key is None or number(key, -(1 << 63), (1 << 63) - 1, whole=True) for key in self.keys),
        }
        positions = sum(map(len, prompts)) + int(lengths.sum()) - len(prompts)
        for name, dtype in _ROUTES.items():
            if (route := self.told.get(name)) is not None:
                fits[name] = route.dtype == dtype and route.dim() == 3 and len(route) == positions
        return next((name for name, good in fits.items() if not good), None)

    def _support(self) -> Support | None:
        told = self.told
        return Support(told["support_words"], told["support_counts"]) if "support_counts" in told else None

    def _top(self) -> MostProbable | None:
        return MostProbable(self.told["top_ids"], self.told["top_logp"]) if "top_ids" in self.told else None
