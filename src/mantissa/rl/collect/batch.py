"""The batch of one step, from a position in the data: made, and kept in a checkpoint where it was made ahead.

A step's batch is a function of the run's seed, the step, the weights that sample it and the data position: an integer,
the number of prompts sampled before. Without dynamic sampling it is ``(step - 1) * rollout.prompts``; with it, it
counts every prompt, dropped ones included. So whoever holds weights and position can make a batch again, or ahead.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mantissa.base.bounds import boundary, count, number
from mantissa.base.errors import MantissaError
from mantissa.base.seeds import stream_slice
from mantissa.rl.collect.sampler import Sample, Sampler, _packed, _unpacked, by_group
from mantissa.rl.config.sections import DynamicConfig, OverlongConfig, RolloutConfig
from mantissa.rl.experience import Experience, routes_of
from mantissa.rollout import SamplingParams
from mantissa.rollout.most_probable import MostProbable
from mantissa.rollout.sampling import FinishReason
from mantissa.rollout.support import Support
from mantissa.runs.catalogue import REWARD_PART
from mantissa.tasks import Problem, Reward


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


def pack(batches: Iterable[Batch]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Batches as tensors and plain values, for a checkpoint. ``seconds`` are left out: a resume spends none."""
    tensors: dict[str, Tensor] = {}
    plain = []
    for batch in batches:
        tokens, lengths, logp, reasons, _, keys, _, support, top = _packed([s.completion for s in batch.samples])
        packed = {"tokens": tokens, "lengths": torch.tensor(lengths), "logp": logp} | _routes_packed(batch)
        if support is not None:
            packed |= {"support_words": support.words, "support_counts": support.counts}
        if top is not None:
            packed |= {"top_ids": top.ids_TK, "top_logp": top.logp_TK}
        tensors |= {f"ahead/{batch.step}/{name}": tensor for name, tensor in packed.items()}
        plain.append(
            {
                "step": batch.step,
                "version": batch.version,
                "position": batch.position,
                "indices": list(batch.indices),
                "finish_reasons": reasons,
                "keys": keys,
                "rewards": [[r.value, r.correct, r.error, dict(r.parts), r.terms, r.found] for r in batch.rewards],
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
    keys = state.get("keys", [None] * len(lengths))  # those of earlier versions have none
    support = None
    if f"ahead/{step}/support_counts" in tensors:
        support = Support(*(tensors[f"ahead/{step}/support_{name}"] for name in ("words", "counts")))
    top = None
    if f"ahead/{step}/top_ids" in tensors:
        top = MostProbable(*(tensors[f"ahead/{step}/top_{name}"] for name in ("ids", "logp")))
    checks = {
        "tokens": tokens.dtype == torch.int64 and bool(((tokens >= 0) & (tokens < embeddings)).all()),
        "lengths": lengths.dtype == torch.int64 and bool((lengths >= 0).all()) and int(lengths.sum()) == len(tokens),
        "logp": logp.dtype == torch.float32 and logp.shape == tokens.shape,
        "support": support is None or support.fits(tokens.tolist(), embeddings),
        "most probable tokens": top is None or top.fits(len(tokens), embeddings),
        "indices": all(number(index, 0, len(problems) - 1, whole=True) for index in indices),
        "groups": len(indices) > 0 and len(lengths) % len(indices) == 0,
        "finish_reasons": len(reasons) == len(lengths) and set(reasons) <= set(get_args(FinishReason)),
        "keys": len(keys) == len(lengths)
        and all(key is None or number(key, -(1 << 63), (1 << 63) - 1, whole=True) for key in keys),
        "rewards": len(state["rewards"]) == len(lengths)
        and all(number(each[0], -math.inf, math.inf) for each in state["rewards"]),
        "metrics": all(isinstance(value, (int, float)) for value in state["metrics"].values()),
    }
    wrong = next((name for name, good in checks.items() if not good), None)
    if wrong is not None:
        raise MantissaError(f"checkpoint's batch of step {step} has wrong {wrong}; it is damaged")
    size = len(lengths) // len(indices)
    prompts = [sampler.encode(problems[index]) for index in indices]
    positions = [len(prompts[place // size]) + length - 1 for place, length in enumerate(lengths.tolist())]
    routes = _routes_unpacked(tensors, step, positions)
    completions = _unpacked((tokens, lengths.tolist(), logp, reasons, version, keys, routes, support, top))
    samples = []
    for place, completion in enumerate(completions):
        group = place // size
        text = sampler.tokenizer.decode(completion.tokens)
        samples.append(Sample(problems[indices[group]], group, prompts[group], completion, text))
    rewards = [_reward(*reward) for reward in state["rewards"]]
    return Batch(step, version, position, indices, samples, rewards, state["metrics"], {})


def _reward(
    value: float,
    correct: bool,
    error: str | None,
    parts: dict[str, float],
    terms: Any = (),
    found: bool | None = None,
) -> Reward:
    """A reward as a checkpoint holds it; those of earlier versions lack the terms and what was found."""
    return Reward(value, correct, error, parts, tuple((float(term), float(weight)) for term, weight in terms), found)


_ROUTES = {"experts": torch.int16, "expert_weights": torch.float32}  # as a checkpoint names them


def _routes_packed(batch: Batch) -> dict[str, Tensor]:
    """The experts of a batch's positions and their weights, where the engine told them."""
    found = routes_of([sample.prompt for sample in batch.samples], [sample.completion for sample in batch.samples])
    return {name: torch.cat(routes) for name, routes in zip(_ROUTES, found, strict=True) if routes is not None}


def _routes_unpacked(
    tensors: Mapping[str, Tensor], step: int, positions: list[int]
) -> list[tuple[Tensor | None, Tensor | None]]:
    """The inverse of ``_routes_packed``, for completions of so many positions."""
    parts: list[Sequence[Tensor | None]] = []
    for name, dtype in _ROUTES.items():
        stored = tensors.get(f"ahead/{step}/{name}")
        if stored is None:
            parts.append([None] * len(positions))
            continue
        if stored.dtype != dtype or stored.dim() != 3 or len(stored) != sum(positions):
            raise MantissaError(f"checkpoint's batch of step {step} has wrong {name}; it is damaged")
        parts.append(stored.split(positions))
    return list(zip(*parts, strict=True))


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
