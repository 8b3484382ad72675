"""Two kinds of sequences are told from one, from the size on that the page says; routers' single tokens are no kind."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import dumps
from mantissa.doctor.diagnosis import Basis, Verdict
from mantissa.doctor.dump import Scored
from mantissa.doctor.evidence import Evidence
from mantissa.doctor.examine import examine
from mantissa.doctor.sequences import seen_in_a_quarter, some_sequences

TESTS = 28


def evidence(sequences: list[Scored]) -> Evidence:
    return Evidence.of(dumps.dump_of(sequences, rollout_format="bf16", learner_format="bf16"), 0.16)


def mixed(times: float, seed: int, prompts: int = 32, length: int = 32) -> list[Scored]:
    """Every sequence is healthy, but that in a quarter of them, drawn anew, the error is ``times`` as large."""
    good = dumps.healthy(prompts, 4, length, size=0.03, seed=seed)
    bad = dumps.healthy(prompts, 4, length, size=0.03 * times, seed=seed + 1000)
    quarter = np.random.default_rng(seed).permutation(len(good)) < len(good) // 4
    return [b if q else g for g, b, q in zip(good, bad, quarter, strict=True)]


def test_a_quarter_of_twice_the_size_is_found_in_128_sequences_of_32_tokens() -> None:
    for seed in range(4):
        found = examine(dumps.dump_of(mixed(2.0, seed), rollout_format="bf16", learner_format="bf16"))
        assert found.fault is not None, found.headline
        assert found.fault.name == "some_sequences"
        assert 0.15 < found.fault.effect < 0.35
    ps = [some_sequences(evidence(mixed(1.0, seed)), TESTS).p for seed in range(4)]
    assert min(ps) > 0.05 / TESTS


def test_what_would_have_been_seen_is_seen() -> None:
    healthy = evidence(mixed(1.0, 7))
    size = seen_in_a_quarter(healthy, TESTS)
    assert size is not None
    times = size / healthy.clean.size
    assert 1.2 < times < 2.6
    hits = [some_sequences(evidence(mixed(times * 1.1, seed)), TESTS).p < 0.05 / TESTS for seed in range(6)]
    assert sum(hits) >= 5
    small = evidence(mixed(1.0, 7, prompts=10))
    of_few = seen_in_a_quarter(small, TESTS)
    assert of_few is None or of_few / small.clean.size >= times  # fewer sequences show no more


def flown(sequences: list[Scored], share: float, seed: int) -> list[Scored]:
    """From one place on in ``share`` of the sequences the error is larger, and single tokens fly: a router's choice."""
    draw, made = np.random.default_rng(seed), []
    for each in sequences:
        y, n = each.learner_logp.copy(), len(each.mask)
        if draw.random() < share:
            start = int(draw.integers(0, n - 1))
            y[start:] += draw.normal(0, 0.05, n - start)
            y[draw.integers(start, n)] -= 2.0
        made.append(dataclasses.replace(each, learner_logp=np.minimum(y, -1e-4)))
    return made


@pytest.mark.parametrize("share", [0.05, 0.2, 0.4])
def test_single_tokens_that_fly_make_no_second_kind(share: float) -> None:
    for seed in range(3):
        e = evidence(flown(mixed(1.0, seed), share, seed))
        assert some_sequences(e, TESTS).p > 0.05 / TESTS


def test_the_p_value_is_no_smaller_than_the_true_one() -> None:
    """Scales of one kind: of 400 samples p is below 0.05 in at most 5%, two standard deviations allowed."""
    from mantissa.doctor.sequences import _two

    scales = np.random.default_rng(0).normal(0, 0.3, (400, 96))
    p = 2 * np.exp(-_two(scales, np.full(96, 0.09), False).gain)
    assert (p < 0.05).mean() < 0.05 + 2 * np.sqrt(0.05 * 0.95 / 400)


def test_a_size_beyond_the_usual_in_few_prompts_is_not_called_healthy() -> None:
    """Eight prompts: each test's p is at least 2 ** -8 by prompts, so sequences are the units."""
    bad = dumps.healthy(8, 4, 24, size=1.0, seed=1)
    found = examine(dumps.dump_of(bad, rollout_format="bf16", learner_format="bf16"))
    assert found.verdict is not Verdict.HEALTHY, found.headline


def test_tokens_that_are_all_certain_and_alike_are_healthy() -> None:
    draw = np.random.default_rng(0)
    sure = [Scored(np.arange(20), 4, x := -np.abs(draw.normal(0, 1e-3, 16)) - 1e-6, x * (1 + draw.normal(0, 0.05, 16)),
                   np.ones(16, bool), group=n // 4) for n in range(64)]  # fmt: skip
    found = examine(dumps.dump_of(sure, rollout_format="bf16", learner_format="bf16"))
    assert found.verdict is Verdict.HEALTHY, found.headline
    assert found.basis is Basis.CERTAIN
    off = [dataclasses.replace(each, learner_logp=each.learner_logp - 5e-3) for each in sure]
    large = examine(dumps.dump_of(off, rollout_format="bf16", learner_format="bf16"))
    assert large.verdict is not Verdict.HEALTHY


def test_what_begins_with_a_second_turn_is_at_no_position() -> None:
    """Behind the place where it begins on average, sequences of a single turn are healthy."""
    draw = np.random.default_rng(0)

    def talk(n: int, s: Scored) -> Scored:
        at, mask, y = 6 + n % 6, s.mask.copy(), s.learner_logp.copy()
        if n % 6:
            mask[at : at + 5] = False
            y[at:] -= np.abs(draw.normal(0, 0.8, len(y) - at))
        return dataclasses.replace(s, mask=mask, learner_logp=y)

    found = examine(dumps.dump_of([talk(n, s) for n, s in enumerate(dumps.healthy(16, 4, 32))]))
    names = [each.name for each in (found.fault, found.second) if each is not None]
    assert not {"position", "onset"} & set(names), found.headline


def test_a_place_of_the_whole_sequence_is_no_token_of_its_own() -> None:
    """Behind a window's end the sides differ, wherever the response began."""
    draw, rows = np.random.default_rng(0), []
    for s in dumps.healthy(16, 4, 32, size=0.002):
        prompt = int(draw.integers(4, 24))
        tokens = np.concatenate([np.arange(prompt), s.tokens[s.prompt_length :]])
        behind = np.arange(len(s.mask)) + prompt >= 30
        moved = s.learner_logp + behind * draw.normal(0, 0.06, len(s.mask)) * -np.expm1(s.learner_logp)
        rows.append(dataclasses.replace(s, tokens=tokens, prompt_length=prompt, learner_logp=moved))
    found = examine(dumps.dump_of(rows, rollout_format="bf16", learner_format="bf16", experts=False))
    assert found.fault is None or found.fault.name != "mid_sequence", found.headline
