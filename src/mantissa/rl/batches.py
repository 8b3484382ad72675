"""From a position in the data to the graded groups of one step.

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

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mantissa.bounds import boundary, count
from mantissa.bounds import number as is_number
from mantissa.errors import MantissaError
from mantissa.rl.config import DynamicConfig, OverlongConfig, RolloutConfig
from mantissa.rl.sampling import Sampled, Sampler
from mantissa.rl.seeds import stream_slice
from mantissa.rollout import Completion, SamplingParams
from mantissa.runs.metrics import REWARD_PART
from mantissa.tasks import Problem, Reward


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
    group's training problem. ``rewards``: flat; their values as advantages see them, overlong penalty included.
    ``metrics``: of everything sampled, dropped groups included. ``seconds``: wall clock of ``rollout`` and ``reward``.
    """

    step: int
    version: int
    position: int
    indices: Sequence[int]
    sampled: Sampled
    rewards: Sequence[Reward]
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class _Group:
    """One prompt's completions, graded and shaped."""

    index: int
    problem: Problem
    prompt: Sequence[int]
    completions: Sequence[Completion]
    texts: Sequence[str]
    rewards: Sequence[Reward]
    fate: Fate


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
        if dynamic is None:
            groups = self._generate(step, version, config.prompts, 0)
            return self._batch(step, version, groups, groups, {})
        groups, tries, kept = [], 0, 0
        while kept < config.prompts and tries < dynamic.max_generation_batches:
            groups += self._generate(step, version, dynamic.batch_prompts or config.prompts, len(groups))
            tries, kept = tries + 1, sum(group.fate == "kept" for group in groups)
        fates = [group.fate for group in groups]
        trained = [groups[index] for index in chosen(fates, config.prompts, dynamic)]
        rewards = [reward for group in trained for reward in group.rewards]
        metrics = dynamic_metrics(fates, min(kept, config.prompts), tries)
        metrics["reward/accuracy_trained"] = sum(reward.correct for reward in rewards) / len(rewards)
        return self._batch(step, version, groups, trained, metrics)

    def _generate(self, step: int, version: int, count: int, first: int) -> list[_Group]:
        """Sample and grade the next ``count`` prompts, the step's prompts ``first`` and on."""
        samples, seed = self.config.samples, self.seed
        places = stream_slice(len(self.kept), self.position, count, seed, "prompts")
        self.position += count
        indices = [self.kept[place] for place in places]
        problems = [self.problems[index] for index in indices]
        started = time.perf_counter()
        sampled = self.sampler.sample(problems, samples, self.params, version, seed, "rollout", step, first=first)
        generated = time.perf_counter()
        graded = self.sampler.grade(sampled)
        self._seconds["rollout"] += generated - started
        self._seconds["reward"] += time.perf_counter() - generated
        groups = []
        for number, (index, problem) in enumerate(zip(indices, problems, strict=True)):
            flat = slice(number * samples, (number + 1) * samples)
            completions, rewards = sampled.groups[number], graded[flat]
            penalised = [shaped(r, self._penalty(c)) for r, c in zip(rewards, completions, strict=True)]
            groups.append(
                _Group(
                    index,
                    problem,
                    sampled.prompts[number],
                    completions,
                    sampled.texts[flat],
                    penalised,
                    fate(rewards, penalised),
                )
            )
        return groups

    def _penalty(self, completion: Completion) -> float:
        return overlong_penalty(len(completion.tokens), self.config.max_tokens, self.config.overlong)

    def _batch(
        self,
        step: int,
        version: int,
        groups: Sequence[_Group],
        trained: Sequence[_Group],
        metrics: dict[str, float],
    ) -> Batch:
        sampled = Sampled(
            [group.problem for group in trained],
            [group.prompt for group in trained],
            [group.completions for group in trained],
            [text for group in trained for text in group.texts],
        )
        rewards = [reward for group in trained for reward in group.rewards]
        whole = self._sample_metrics(groups) | metrics
        indices = [group.index for group in trained]
        return Batch(step, version, self.position, indices, sampled, rewards, whole, self._seconds)

    def _sample_metrics(self, groups: Sequence[_Group]) -> dict[str, float]:
        """Metrics of everything that was sampled."""
        completions = [completion for group in groups for completion in group.completions]
        rewards = [reward for group in groups for reward in group.rewards]
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


def pack(batches: Sequence[Batch]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Batches as tensors and plain values, for a checkpoint. ``seconds`` are left out: a resume spends none."""
    tensors, plain = {}, []
    for batch in batches:
        completions = [completion for group in batch.sampled.groups for completion in group]
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
        return [_unpacked(tensors, state, problems, sampler, embeddings) for state in plain]


def _unpacked(
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
    flat = [
        Completion(tuple(part.tolist()), logp_T.clone(), reason, version)
        for part, logp_T, reason in zip(
            tokens.split(lengths.tolist()), logp.split(lengths.tolist()), reasons, strict=True
        )
    ]
    size = len(flat) // len(indices)
    sampled = Sampled(
        [problems[index] for index in indices],
        [sampler.encode(problems[index]) for index in indices],
        [flat[start : start + size] for start in range(0, len(flat), size)],
        [sampler.tokenizer.decode(completion.tokens) for completion in flat],
    )
    rewards = [Reward(*reward) for reward in state["rewards"]]
    return Batch(step, version, position, indices, sampled, rewards, state["metrics"], {})
