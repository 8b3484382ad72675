"""From problems to graded completions: draws, groups, rates, dynamic sampling and the price of length, by loops."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import _disable_current_modes

from mantissa.algorithms import ADVANTAGES, AdvantageKind, advantage
from mantissa.base.errors import MantissaError
from mantissa.base.seeds import derive_seed, generator, stream_slice
from mantissa.kernels import resolve, rollout_kernels
from mantissa.model import Decoder, FreshModelConfig, character_tokenizer, policy_weights, save_model
from mantissa.precision import FP32, PrecisionPolicy
from mantissa.rl.ahead import pack, unpack
from mantissa.rl.assemble import Parts
from mantissa.rl.batch import (
    Batch,
    Collector,
    Sample,
    Sampler,
    by_group,
    fate,
    groups_to_train,
    overlong_penalty,
    success_rates,
    with_penalty,
)
from mantissa.rl.config.sections import DynamicConfig, OverlongConfig, RolloutConfig
from mantissa.rl.experience import Experience
from mantissa.rollout import Completion, NativeEngine, SamplingParams
from mantissa.rollout.support import MostProbable, Support, encode
from mantissa.runs.directory import RunDirectory
from mantissa.tasks import Grader, Message, Problem, Reward
from mantissa.training import load_checkpoint
from small_run import QUICK, rows_of


@settings(deadline=None)
@given(population=st.integers(1, 40), start=st.integers(0, 200), count=st.integers(0, 100), seed=st.integers(0, 9))
def test_any_slice_is_the_long_streams(population: int, start: int, count: int, seed: int) -> None:
    epochs = -(-(start + count) // population) if start + count else 0
    long: list[int] = []
    for epoch in range(epochs):  # an independent writing of the stream: whole epochs, one after another
        digest = hashlib.sha256(f"{seed}/prompts/{epoch}".encode()).digest()
        shuffled = torch.randperm(
            population, generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") // 2)
        )
        assert sorted(shuffled.tolist()) == list(range(population))
        long += shuffled.tolist()
    assert stream_slice(population, start, count, seed, "prompts") == long[start : start + count]


def test_purposes_and_seeds_have_streams_of_their_own() -> None:
    names = [(0, "prompts"), (1, "prompts"), (0, "update"), (0, "prompts", 0), (0, 0, "prompts")]
    assert len({derive_seed(*name) for name in names}) == len(names)
    assert all(0 <= derive_seed(*name) < 2**63 for name in names)
    draws = {tuple(torch.randint(1000, (4,), generator=generator(*name)).tolist()) for name in names}
    assert len(draws) == len(names)
    assert derive_seed(0, "rollout", 1) == 8911054625556009685  # on every machine


@pytest.fixture
def parts(made: Callable[..., Parts]) -> Parts:
    return made("precision=fp32")


def test_a_completion_depends_on_seed_problem_index_and_sample_alone(parts: Parts) -> None:
    sampler, problems = parts.sampler, parts.task.split("train", 6)
    params = sampler.params(6, 1.0)
    whole = sampler.sample(problems, 4, params, 0, 7, "test")
    again = sampler.sample(problems[:2], 3, params, 0, 7, "test")
    for number, same in enumerate(again):
        sample = whole[4 * (number // 3) + number % 3]
        assert (sample.group, sample.prompt, sample.completion.tokens) == (
            same.group, same.prompt, same.completion.tokens,
        )  # fmt: skip
        # to rounding: batches of another size go through other kernels of the matrix product
        torch.testing.assert_close(sample.completion.logp_T, same.completion.logp_T, rtol=0, atol=1e-5)
    other = sampler.sample(problems, 4, params, 0, 8, "test")
    assert [s.completion.tokens for s in other] != [s.completion.tokens for s in whole]
    assert len({s.completion.tokens for s in whole[:4]}) > 1  # the samples of one prompt are draws of their own


def test_texts_are_flat_in_group_order_without_end_tokens(parts: Parts) -> None:
    problems = parts.task.split("train", 3)
    sampled = parts.sampler.sample(problems, 2, parts.sampler.params(6, 1.0), 0, 7, "test")
    letters = parts.task.alphabet
    assert letters is not None
    for number, sample in enumerate(sampled):
        problem = problems[number // 2]
        spelled = "".join(letters[t - 2] for t in sample.completion.tokens if t >= 2)  # 0 pad, 1 eos
        assert (sample.problem, sample.group, sample.text) == (problem, number // 2, spelled)
        assert list(sample.prompt) == [letters.index(c) + 2 for c in str(problem.prompt)]


def test_rows_beyond_the_tokenizer_are_sampled_as_transformers_does_and_named(parts: Parts, tmp_path: Path) -> None:
    """A vocabulary padded by 6 rows, whose logits are large: the texts are short, and a warning says why."""
    from transformers import AutoModelForCausalLM

    tokenizer, problems = parts.sampler.tokenizer, parts.task.split("heldout", 4)
    words = tokenizer.vocab_size
    shape = FreshModelConfig(layers=1, hidden_size=32, initializer_range=0.3, tie_embeddings=False).model(words + 6)
    padded = Decoder(shape).initialize(torch.Generator().manual_seed(2))
    with torch.no_grad():
        padded.head_weight[words:] *= 4
    kernels = rollout_kernels(resolve(PrecisionPolicy.parse("fp32"), "cpu"))
    engine = NativeEngine(shape, kernels, kv_format=FP32, slots=4, max_length=64)
    engine.sync(policy_weights(padded), 0)
    sampler = Sampler(engine, tokenizer, parts.sampler.grader)
    with pytest.warns(
        UserWarning, match=rf"the ids 1\d.* for which this vocabulary has no token \(it ends at {words - 1}\)"
    ):
        sampled = sampler.sample(problems, 8, sampler.params(6, 1.0), 0, 7, "test")
    assert any(set(sample.completion.tokens) - set(range(words)) for sample in sampled)
    save_model(padded, tokenizer, tmp_path / "padded")
    with _disable_current_modes(), torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "padded").eval()
        for sample in sampled:
            tokens, drawn = torch.tensor([[*sample.prompt, *sample.completion.tokens]]), sample.completion.tokens
            logp_TV = torch.log_softmax(theirs(tokens).logits[0, len(sample.prompt) - 1 : -1], -1)  # over all rows
            expected = logp_TV[torch.arange(len(drawn)), torch.tensor(drawn)]
            torch.testing.assert_close(sample.completion.logp_T, expected, rtol=0, atol=1e-4)
            kept = [token for token in drawn if token < words]
            assert sample.text == tokenizer.decode(kept) == tokenizer.backend.decode(drawn, skip_special_tokens=True)
        greedy = theirs.generate(torch.tensor([sampled[0].prompt]), max_new_tokens=6, do_sample=False)[0]
    assert int(greedy.max()) >= words
    best = sampler.sample(problems[:1], 1, sampler.params(6, 0.0), 0, 7, "test")[0]
    assert [*best.prompt, *best.completion.tokens] == greedy.tolist()


def test_success_rates_belong_to_their_own_problem() -> None:
    completion, problem = Completion((1,), torch.zeros(1), "stop", 0), Problem("p", "1=", "1", "s")
    sampled = [Sample(problem, group, (1,), completion, "") for group in (0, 0, 3, 3, 3, 3, 4)]
    verdicts = [True, False, True, False, False, False, True]
    rewards = [Reward(-1.0 if correct else 9.0, correct) for correct in verdicts]  # rates count verdicts, not rewards
    assert success_rates(sampled, rewards) == [0.5, 0.25, 1.0]


def test_accuracy_is_the_mean_over_problems_of_what_the_verifier_says(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = parts.task.split("heldout", 8)
    params = parts.sampler.params(6, 1.0)
    seen: list[bool] = []

    def verdict(pairs: list[tuple[Problem, str]]) -> list[Reward]:
        seen[:] = [len(text) % 2 == 0 for _, text in pairs]
        return [Reward(0.0, correct) for correct in seen]

    monkeypatch.setattr(parts.sampler.grader, "grade", verdict)
    accuracy = parts.sampler.accuracy(problems, 3, params, 0, 1, "test")
    assert len(seen) == 24
    assert accuracy == pytest.approx(sum(seen) / 24)
    assert 0 < accuracy < 1


def test_a_prompt_that_cannot_be_written_names_its_problem(parts: Parts) -> None:
    sampler = Sampler(parts.sampler.engine, character_tokenizer("0123"), Grader(parts.task.verifier))
    with pytest.raises(MantissaError, match="problem p-7: tokenizer: '19=' holds '9='"):
        sampler.encode(Problem("p-7", "19=", "1", "s"))
    with pytest.raises(MantissaError, match=r"problem p-8: .*no chat template"):
        sampler.encode(Problem("p-8", (Message("user", "12"),), "1", "s"))


# Dynamic sampling against a loop over single prompts: what is kept, what is counted, where the data stands

CPU = torch.device("cpu")
PROBLEMS = [Problem(f"p-{i}", "x", "1", "s") for i in range(9)]
VALUES = st.sampled_from([0.0, 1.0, 0.5, 0.1, 0.1 + 1e-12, -1.0])


class FakeSampler:
    """Completions and verdicts that are functions of the seed, the prompt's number in the step and the sample."""

    def __init__(self, right: float) -> None:
        self.right = right
        self.tokenizer = self

    def encode(self, problem: Problem) -> list[int]:
        return [int(problem.id[2:]) + 1]

    def decode(self, tokens: Sequence[int]) -> str:
        return ",".join(map(str, tokens))

    def completion(self, seed: int, sample: int, version: int) -> Completion:
        draw = random.Random(f"{seed}/{sample}")
        tokens = tuple(draw.randrange(1000) for _ in range(draw.randint(1, 8)))
        logp_T = torch.tensor([draw.uniform(-3, 0) for _ in tokens])
        return Completion(tokens, logp_T, draw.choice(("stop", "length")), version)

    def sample(
        self, problems: Sequence[Problem], samples: int, params: Any, version: int, *seed: int | str, first: int = 0
    ) -> list[Sample]:
        seeds = [derive_seed(*seed, first + i) for i in range(len(problems))]
        drawn = [(i, self.completion(seed, j, version)) for i, seed in enumerate(seeds) for j in range(samples)]
        return [Sample(problems[i], first + i, self.encode(problems[i]), c, self.decode(c.tokens)) for i, c in drawn]

    def verdict(self, text: str) -> Reward:
        correct = random.Random(text).random() < self.right
        return Reward(float(correct), correct, None if correct else "it's wrong")

    def grade(self, samples: Sequence[Sample]) -> list[Reward]:
        return [self.verdict(sample.text) for sample in samples]


def collector(sampler: FakeSampler, config: RolloutConfig, kept: Sequence[int]) -> Collector:
    return Collector(sampler, PROBLEMS, kept, config, SamplingParams(8), 7)  # type: ignore[arg-type]


def naive(
    sampler: FakeSampler, config: RolloutConfig, kept: Sequence[int], step: int, start: int
) -> tuple[list[tuple[int, list[tuple[int, ...]]]], dict[str, float], int]:
    """Groups trained on (problem, tokens), counts, and the position after: one prompt after another, by hand."""
    dynamic = config.dynamic
    assert dynamic is not None
    per_try = dynamic.batch_prompts or config.prompts
    good: list[tuple[int, list[tuple[int, ...]]]] = []
    count = dict.fromkeys(("prompts", "all_right", "all_wrong", "equal", "good"), 0)
    while count["prompts"] < per_try * dynamic.max_generation_batches:
        place = stream_slice(len(kept), start + count["prompts"], 1, 7, "prompts")[0]
        seed = derive_seed(7, "rollout", step, count["prompts"])
        group = [sampler.completion(seed, j, 0) for j in range(config.samples)]
        right = [sampler.verdict(sampler.decode(c.tokens)).correct for c in group]
        final = [
            float(r) + overlong_penalty(len(c.tokens), config.max_tokens, config.overlong)
            for r, c in zip(right, group, strict=True)
        ]
        count["prompts"] += 1
        if all(right):
            count["all_right"] += 1
        elif not any(right):
            count["all_wrong"] += 1
        elif max(final) - min(final) < 1e-9:
            count["equal"] += 1
        else:
            count["good"] += 1
            good.append((kept[place], [c.tokens for c in group]))
        if count["prompts"] % per_try == 0 and count["good"] >= config.prompts:
            break
    return good[: config.prompts], count, start + count["prompts"]


@settings(max_examples=60, deadline=None)
@given(
    right=st.sampled_from([0.1, 0.5, 0.9]),
    prompts=st.integers(1, 6),
    samples=st.integers(2, 4),
    batch=st.none() | st.integers(1, 9),
    kept=st.lists(st.integers(0, 8), min_size=1, max_size=9, unique=True),
    overlong=st.none() | st.just(OverlongConfig(buffer=1, factor=1.0)),
)
def test_it_keeps_what_a_naive_loop_keeps(
    right: float, prompts: int, samples: int, batch: int | None, kept: list[int], overlong: OverlongConfig | None
) -> None:
    dynamic = DynamicConfig(batch_prompts=batch, max_generation_batches=60, when_exhausted="continue")
    config = RolloutConfig(prompts=prompts, samples=samples, max_tokens=8, dynamic=dynamic, overlong=overlong)
    sampler = FakeSampler(right)
    ours, position = collector(sampler, config, kept), 0
    for step in (1, 2, 3):
        made = ours.collect(step, 0)
        groups, count, position = naive(sampler, config, kept, step, position)
        assert made.position == ours.position == position
        assert len(groups) == prompts  # 60 tries are always enough here
        found = by_group(made.samples, [sample.completion.tokens for sample in made.samples])
        assert list(zip(made.indices, found, strict=True)) == groups
        named = [f"p-{index}" for index in made.indices for _ in range(samples)]
        assert [sample.problem.id for sample in made.samples] == named
        assert made.experience(CPU).group_B.tolist() == [i for i in range(prompts) for _ in range(samples)]
        for name in ("prompts", "all_right", "all_wrong", "equal"):
            assert made.metrics[f"dynamic/{name}"] == count[name], name
        assert made.metrics["dynamic/generation_batches"] == count["prompts"] / (batch or prompts)
        assert made.metrics["dynamic/kept_fraction"] == count["good"] / count["prompts"]
        assert made.metrics["dynamic/surplus"] == count["good"] - prompts
        assert made.metrics["dynamic/trained"] == prompts


@given(st.lists(st.tuples(VALUES, st.booleans(), st.sampled_from([0.0, -0.5, -1.0])), min_size=2, max_size=5))
def test_a_group_that_is_kept_has_advantages_and_one_whose_rewards_are_equal_has_none(
    group: list[tuple[float, bool, float]],
) -> None:
    graded = [Reward(value, correct) for value, correct, _ in group]
    final = [with_penalty(reward, penalty) for reward, (_, _, penalty) in zip(graded, group, strict=True)]
    alive = [
        bool(advantage(torch.tensor([r.value for r in rewards]), torch.zeros(len(group)).long(), "dr_grpo")[0].any())
        for rewards in (graded, final)
    ]
    verdicts = {correct for _, correct, _ in group}
    why = {True: "all_right", False: "all_wrong"}[next(iter(verdicts))] if len(verdicts) == 1 else "equal"
    assert fate(graded, final) == ("kept" if all(alive) else why)


def test_used_up_tries_are_an_error_or_less_to_train_on() -> None:
    fates = ["all_right", "kept", "all_wrong", "equal", "kept", "all_right"]
    with pytest.raises(
        MantissaError, match=r"2 of 3 groups have a gradient after 2 .*\(6 prompts: 2 all right, 1 all wr"
    ):
        groups_to_train(fates, 3, DynamicConfig(max_generation_batches=2))  # type: ignore[arg-type]
    go_on = DynamicConfig(max_generation_batches=2, when_exhausted="continue")
    assert groups_to_train(fates, 3, go_on) == [1, 4]  # type: ignore[arg-type]
    assert groups_to_train(["kept", "equal", "kept", "kept"], 2, DynamicConfig()) == [0, 2]
    assert groups_to_train(["all_right"] * 4, 3, go_on) == [0, 1, 2]  # nothing to learn from, but something to measure


def test_where_every_group_is_kept_nothing_changes() -> None:
    sampler = FakeSampler(0.5)
    config = RolloutConfig(prompts=1, samples=64, max_tokens=8)  # 64 tosses of a coin are never all alike
    dynamic = config.model_copy(update={"dynamic": DynamicConfig()})
    for step in (1, 2):
        plain, ours = (collector(sampler, c, [3, 4, 5]).collect(step, 5) for c in (config, dynamic))
        assert [s.completion.tokens for s in plain.samples] == [s.completion.tokens for s in ours.samples]
        assert (plain.rewards, plain.position, plain.version) == (ours.rewards, ours.position, 5)
        assert plain.metrics.items() <= ours.metrics.items()


def test_batches_survive_a_checkpoint_to_the_last_bit() -> None:
    sampler = FakeSampler(0.5)
    config = RolloutConfig(prompts=4, samples=3, max_tokens=8, dynamic=DynamicConfig())
    ours = collector(sampler, config, range(9))
    made = [ours.collect(step, version) for step, version in ((4, 9), (5, 11))]
    again = unpack(*pack(made), PROBLEMS, sampler, 2**31)  # type: ignore[arg-type]
    for one, other in zip(made, again, strict=True):
        names = ("step", "version", "position", "indices", "metrics", "rewards")
        assert all(getattr(one, name) == getattr(other, name) for name in names)
        for a, b in zip(one.samples, other.samples, strict=True):
            c, d = a.completion, b.completion
            assert (a.problem, a.prompt, a.text) == (b.problem, b.prompt, b.text)
            assert (c.tokens, c.finish_reason, c.policy_version) == (d.tokens, d.finish_reason, d.policy_version)
            assert torch.equal(c.logp_T, d.logp_T)
        assert torch.equal(one.experience(CPU).group_B, other.experience(CPU).group_B)
    assert pack([]) == ({}, [])


def full_completion(length: int, prompt: int, version: int, draw: torch.Generator) -> Completion:
    """Of a vocabulary of 64, with something in every field; its log-probs no number that a decimal text would keep."""
    tokens = tuple(torch.randint(0, 64, (length,), generator=draw).tolist())
    kept_TV = torch.rand(length, 64, generator=draw) < 0.3
    kept_TV[range(length), tokens] = True
    route = (prompt + length - 1, 2, 2)  # positions, mixtures, experts each
    return Completion(
        tokens,
        -torch.rand(length, generator=draw),
        ("stop", "length", "abort")[length % 3],
        version,
        key=int(torch.randint(-(1 << 62), 1 << 62, (1,), generator=draw)),
        experts_SLK=torch.randint(0, 8, route, dtype=torch.int16, generator=draw),
        expert_weights_SLK=torch.rand(route, generator=draw),
        support=Support.of(encode(kept_TV)),
        most_probable=MostProbable(
            torch.randint(0, 64, (length, 3), dtype=torch.int32, generator=draw), -torch.rand(length, 3, generator=draw)
        ),
    )


def full_batch(step: int, lengths: Sequence[int]) -> tuple[Batch, FakeSampler]:
    """Three groups, of responses of these lengths."""
    sampler, draw = FakeSampler(0.5), torch.Generator().manual_seed(step)
    size, indices = len(lengths) // 3, [7, 0, 7]
    samples = []
    for place, length in enumerate(lengths):
        group, problem = place // size, PROBLEMS[indices[place // size]]
        prompt = sampler.encode(problem)
        completion = full_completion(length, len(prompt), 11, draw)
        samples.append(Sample(problem, group, prompt, completion, sampler.decode(completion.tokens)))
    rewards = [
        Reward(
            0.1 * place,
            place % 2 == 0,
            "it's wrong" if place % 2 else None,
            {"part": place / 3},
            ((place / 7, 2.0),),
            place % 3 == 1,
        )
        for place in range(len(lengths))
    ]
    return Batch(step, 11, 40 + step, indices, samples, rewards, {"reward/accuracy": 1 / 3}, {"rollout": 1.0}), sampler


def alike(one: Any, other: Any) -> bool:
    """Equal in kind and in every field of theirs, tensors by dtype, shape and bits."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return type(one) is type(other) and all(alike(getattr(one, n), getattr(other, n)) for n in names)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(value, other[name]) for name, value in one.items())
    return type(one) is type(other) and bool(one == other)


def through_a_checkpoint(batch: Batch, sampler: FakeSampler) -> Batch:
    tensors, plain = pack([batch])
    (again,) = unpack(tensors, json.loads(json.dumps(plain)), PROBLEMS, sampler, 64)  # type: ignore[arg-type]
    return again


@pytest.mark.parametrize("lengths", [(3, 1, 4, 2, 5, 1), (0, 3, 2, 0, 0, 0), (0, 0, 0, 0, 0, 0)])
def test_no_field_of_a_batch_is_lost_in_a_checkpoint(lengths: tuple[int, ...]) -> None:
    """All fields there are, each with something in it that is not its default."""
    batch, sampler = full_batch(4, lengths)
    for record in (batch.samples[0].completion, batch.samples[0], batch.rewards[1], batch):
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            default = field.default_factory() if callable(field.default_factory) else field.default
            assert type(value) is not type(default) or value != default, f"{field.name} needs a value here"
    again = through_a_checkpoint(batch, sampler)
    assert again.seconds == {}  # a resume spends none
    assert alike(dataclasses.replace(batch, seconds={}), again)
    assert alike(batch.experience(CPU), again.experience(CPU))


def test_what_no_engine_told_is_not_there_after_a_checkpoint() -> None:
    """Of a foreign engine: tokens and log-probs alone. And of an empty response alone, of which nothing is told."""
    batch, sampler = full_batch(4, (3, 1, 4, 0, 5, 1))
    unknown = {field.name: None for field in dataclasses.fields(Completion) if field.default is None}
    assert len(unknown) == 5
    bare = [dataclasses.replace(s, completion=dataclasses.replace(s.completion, **unknown)) for s in batch.samples]
    plain = dataclasses.replace(batch, samples=bare, seconds={})
    assert alike(plain, through_a_checkpoint(plain, sampler))

    mixed = dataclasses.replace(batch, samples=[*batch.samples[:3], bare[3], *batch.samples[4:]])
    found = through_a_checkpoint(mixed, sampler).samples
    assert alike(mixed.samples[:3], found[:3])
    assert alike(mixed.samples[4:], found[4:])
    assert (found[3].completion.tokens, found[3].completion.key) == ((), None)
    one, other = mixed.experience(CPU), through_a_checkpoint(mixed, sampler).experience(CPU)
    assert alike(one, other)
    assert one.support
    assert bool((one.column("experts_BTLK")[3] == -1).all())


@pytest.mark.parametrize("name", ["support", "most_probable", "experts_SLK", "expert_weights_SLK"])
def test_what_an_engine_tells_of_some_responses_alone_is_refused(name: str) -> None:
    """Taken for none, the others would be scored by another distribution than they were drawn from."""
    batch, _ = full_batch(4, (3, 1, 4, 2, 5, 1))
    completions = [sample.completion for sample in batch.samples]
    completions[2] = dataclasses.replace(completions[2], **{name: None})
    prompts = [sample.prompt for sample in batch.samples]
    with pytest.raises(MantissaError, match=r"told .* and not of 1 of 6 in the same batch"):
        Experience.of(prompts, completions, [0] * 6, [0.0] * 6, CPU)


DAMAGE: dict[str, Callable[[dict[str, torch.Tensor], dict[str, Any]], object]] = {
    "tokens": lambda t, _: (t.pop("support_counts"), t["tokens"].__setitem__(0, 64)),
    "lengths": lambda t, _: t["lengths"].__setitem__(slice(2), torch.tensor([-1, 5])),
    "logp": lambda t, _: t.update(logp=t["logp"].double()),
    "support": lambda t, _: t.update(support_counts=t["support_counts"][:-1]),
    "most probable tokens": lambda t, _: t["top_ids"].__setitem__((0, 0), 64),
    "experts": lambda t, _: t.update(experts=t["experts"][1:]),
    "expert_weights": lambda t, _: t.update(expert_weights=t["expert_weights"].double()),
    "indices": lambda _, s: s.update(indices=[0, 9, 1]),
    "groups": lambda _, s: s.update(indices=[0, 1, 2, 3]),
    "finish_reasons": lambda _, s: s.update(finish_reasons=[*s["finish_reasons"][:-1], "eos"]),
    "keys": lambda _, s: s.update(keys=[*s["keys"][:-1], 1 << 63]),
    "rewards": lambda _, s: s.update(rewards=s["rewards"][:-1]),
    "metrics": lambda _, s: s.update(metrics={"reward/accuracy": "high"}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_batch_of_a_checkpoint_is_refused_by_its_field(name: str) -> None:
    batch, sampler = full_batch(4, (3, 1, 4, 2, 5, 1))
    packed, (state,) = pack([batch])
    tensors = {each.rpartition("/")[2]: tensor.clone() for each, tensor in packed.items()}
    DAMAGE[name](tensors, state)
    with pytest.raises(MantissaError, match=f"batch of step 4 has wrong {name}; it is damaged"):
        unpack({f"ahead/4/{each}": t for each, t in tensors.items()}, [state], PROBLEMS, sampler, 64)  # type: ignore[arg-type]


def test_a_batch_that_an_earlier_version_kept_is_read_without_keys() -> None:
    batch, sampler = full_batch(4, (3, 1, 4, 2, 5, 1))
    tensors, (state,) = pack([batch])
    del state["keys"]
    (again,) = unpack(tensors, [state], PROBLEMS, sampler, 64)  # type: ignore[arg-type]
    assert "key_B" not in again.experience(CPU).columns


@given(st.integers(2, 20480), st.data())
def test_the_formula_in_fractions(max_tokens: int, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(1, max_tokens - 1))
    length = data.draw(st.integers(1, max_tokens))
    factor = data.draw(st.floats(0.01, 100))
    expected = min(Fraction(0), Fraction(-(length - (max_tokens - buffer)), buffer) * Fraction(factor))
    found = overlong_penalty(length, max_tokens, OverlongConfig(buffer=buffer, factor=factor))
    assert found == pytest.approx(float(expected), rel=1e-14)
    assert overlong_penalty(length, max_tokens, None) == 0


def test_the_verdict_and_the_error_stay() -> None:
    reward = Reward(1.0, True, "late")
    assert with_penalty(reward, -0.25) == Reward(0.75, True, "late")
    assert with_penalty(reward, 0.0) is reward


@pytest.mark.parametrize("kind", [kind for kind, estimator in ADVANTAGES.items() if not estimator.decoupled])
def test_the_factor_says_what_a_long_answer_is_worth(kind: AdvantageKind) -> None:
    """A right answer of 9 of 10 tokens against a short wrong one, which cost as much at a factor of 5/4."""
    lengths, right = [9, 2, 5, 3], [True, False, True, False]
    found = {}
    for factor in (0.125, 1.0, 2.0):
        config = OverlongConfig(buffer=5, factor=factor)
        graded = [
            with_penalty(Reward(float(good), good, terms=((float(good), 1.0),)), overlong_penalty(length, 10, config))
            for length, good in zip(lengths, right, strict=True)
        ]
        rewards = torch.tensor([reward.value for reward in graded])
        torch.testing.assert_close(rewards[0], torch.tensor(1 - 0.8 * factor))
        found[factor] = advantage(rewards, torch.zeros(4, dtype=torch.int64), kind)[0]
    assert [bool(each[0] > each[1]) for each in found.values()] == [True, True, False]


RUN = (*QUICK, "steps=3", "evaluation=null")


def test_a_run_trains_on_full_batches_that_all_carry_a_gradient(train: Callable[..., RunDirectory]) -> None:
    more = ("rollout.dynamic.batch_prompts=3", "checkpoint.every=1")
    run, again = train(*RUN, *more), train(*RUN, *more)
    rows = run.metrics.read()
    assert rows_of(run.path) == rows_of(again.path)
    for row in rows:
        rollouts = run.read_rollouts(row["step"])
        assert len(rollouts) == 8 * 4
        groups = [[r["reward"] for r in rollouts[start : start + 4]] for start in range(0, 32, 4)]
        assert all(len(set(group)) > 1 for group in groups)
        assert row["advantage/degenerate_group_fraction"] == 0
        assert row["dynamic/prompts"] == 3 * row["dynamic/generation_batches"] >= 9
        assert row["reward/accuracy_trained"] == sum(r["correct"] for r in rollouts) / 32
    total = sum(row["dynamic/prompts"] for row in rows)
    assert load_checkpoint(run.checkpoints).state["position"] == total > 24


def test_a_run_out_of_tries_stops_or_goes_on(train: Callable[..., RunDirectory]) -> None:
    hopeless = (*RUN, "task.reward=exact", "warm_start=null", "rollout.dynamic.max_generation_batches=2")
    with pytest.raises(MantissaError, match=r"rollout\.dynamic: 0 of 8 groups .* 2 generation batches \(16 prompts: 0"):
        train(*hopeless)
    for row in train(*hopeless, "rollout.dynamic.when_exhausted=continue").metrics.read():
        assert (row["dynamic/trained"], row["dynamic/all_wrong"], row["optim/updates"]) == (0, 16, 0)
    few = (*RUN, "rollout.dynamic={max_generation_batches: 1, when_exhausted: continue, batch_prompts: 2}")
    run = train(*few, "optimizer.updates_per_batch=32")  # more updates than completions that are left: empty parts
    assert all(row["dynamic/prompts"] == 2 for row in run.metrics.read())
    assert all(0 < len(run.read_rollouts(step)) <= 8 for step in (1, 2, 3))


def test_a_run_penalises_the_reward_and_not_the_accuracy(
    train: Callable[..., RunDirectory], finished: Callable[..., RunDirectory]
) -> None:
    plain = finished(*QUICK).read_rollouts(1)
    run = train(*QUICK, "steps=1", "evaluation=null", "rollout.overlong={buffer: 4, factor: 3}")
    first, penalised = run.metrics.read()[0], run.read_rollouts(1)
    penalty = {1: 0.0, 2: 0.0, 3: -0.75, 4: -1.5, 5: -2.25, 6: -3.0}
    assert [row["tokens"] for row in penalised] == [row["tokens"] for row in plain]
    for row, before in zip(penalised, plain, strict=True):
        assert row["reward"] == pytest.approx(before["reward"] + penalty[row["length"]], abs=1e-12)
        assert row["correct"] == before["correct"]
    lengths = [row["length"] for row in penalised]
    assert len(set(lengths)) > 2
    assert first["reward/overlong_penalty"] == pytest.approx(sum(penalty[n] for n in lengths) / len(lengths))
    assert first["reward/overlong_fraction"] == sum(n > 2 for n in lengths) / len(lengths)
    assert first["reward/accuracy"] == sum(row["correct"] for row in plain) / len(plain)
    assert first["reward/mean"] == pytest.approx(sum(row["reward"] for row in penalised) / len(penalised), rel=1e-6)
    for start in range(0, len(penalised), 4):  # dr_grpo: the shaped reward, less the group's mean of it
        group = penalised[start : start + 4]
        mean = sum(row["reward"] for row in group) / 4
        assert [row["advantage"] for row in group] == pytest.approx([row["reward"] - mean for row in group], abs=1e-6)
