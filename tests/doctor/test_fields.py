"""Numbers that are no log-prob a token are told from laws and weights, by what they are of the other side's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

import dumps
from mantissa.doctor.diagnosis import Basis, Diagnosis, Verdict
from mantissa.doctor.dump import Scored
from mantissa.doctor.examine import examine

SIZES = {"large": dumps.healthy(32, 4, 48), "small": dumps.healthy(8, 4, 32)}
Change = Callable[[np.ndarray], np.ndarray]


def swapped(s: Scored) -> Scored:
    return dataclasses.replace(s, rollout_logp=s.learner_logp, learner_logp=s.rollout_logp)


def answer(size: str, change: Change, side: str = "learner") -> Diagnosis:
    rows = [dataclasses.replace(s, learner_logp=change(s.learner_logp.copy())) for s in SIZES[size]]
    rows = rows if side == "learner" else [swapped(s) for s in rows]
    return examine(dumps.dump_of(rows, rollout_format="bf16", learner_format="bf16", experts=False, temperature=1.0))


def first(x: np.ndarray, value: float) -> np.ndarray:
    x[0] = value
    return x


def beyond(x: np.ndarray, place: int) -> np.ndarray:
    x[place:] = np.nan
    return x


def overflown(x: np.ndarray) -> np.ndarray:
    """No number from a token of its own on, in a third of the sequences."""
    at = int(1e6 * abs(x[0])) % (3 * len(x))
    x[at:] = np.nan
    return x


CHANGES: dict[str, tuple[str, Change]] = {
    "clamped at -3": ("clamped", lambda x: np.maximum(x, -3.0)),
    "clamped at -2": ("clamped", lambda x: np.maximum(x, -2.0)),
    "clamped at -0.05": ("clamped", lambda x: np.minimum(x, -0.05)),
    "running sums": ("summed", np.cumsum),
    "sums to the end": ("summed", lambda x: np.cumsum(x[::-1])[::-1]),
    "running means": ("summed", lambda x: np.cumsum(x) / np.arange(1, len(x) + 1)),
    "over the length": ("summed", lambda x: x / len(x)),
    "the mean": ("repeated", lambda x: np.full_like(x, x.mean())),
    "the sum": ("repeated", lambda x: np.full_like(x, x.sum())),
    "the first one": ("repeated", lambda x: np.full_like(x, x[0])),
    "no first number in some": ("unscored", lambda x: first(x, np.nan if int(1e6 * abs(x[0])) % 4 else x[0])),
    "0 as first number": ("unscored", lambda x: first(x, 0.0)),
    "none from the twentieth on": ("unscored", lambda x: beyond(x, 20)),
    "an overflow": ("nonfinite", overflown),
}


@pytest.mark.parametrize("side", ["learner", "rollout"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CHANGES)
def test_a_wrong_field_is_called_by_its_name(name: str, size: str, side: str) -> None:
    wanted, change = CHANGES[name]
    found = answer(size, change, side)
    assert found.fault is not None, found.headline
    assert (found.verdict, found.fault.name) == (Verdict.FAULT, wanted), found.headline
    assert found.second is None, found.headline
    assert side in found.headline or wanted in ("unscored",), found.headline


@pytest.mark.parametrize("size", SIZES)
def test_a_healthy_dump_has_no_wrong_field(size: str) -> None:
    assert answer(size, lambda x: x).verdict is Verdict.HEALTHY


def test_the_rest_is_judged_where_a_bound_cut_some() -> None:
    found = answer("large", lambda x: np.maximum(x, -3.0))
    assert found.figures["u_rms"] < 0.16  # what the clamp moved by nats is not in it
    assert "stands at" in found.headline


def test_a_few_values_just_above_zero_are_a_remark() -> None:
    """A log-sum-exp in a half makes such values of certain tokens."""
    count = iter(range(10**6))
    found = answer("large", lambda x: np.where(np.arange(len(x)) == 5, 0.0015, x) if next(count) == 3 else x)
    assert found.verdict is Verdict.HEALTHY, found.headline
    assert any("above 0" in remark for remark in found.remarks)


def test_a_few_values_far_above_zero_are_no_logprobs() -> None:
    found = answer("large", lambda x: np.where(x > np.sort(x)[-2], 0.6, x))
    assert found.fault is not None
    assert found.fault.name == "not_logprobs", found.headline


@pytest.mark.parametrize("size", SIZES)
def test_some_rows_that_are_shifted_are_no_engine_with_other_weights(size: str) -> None:
    rows = [
        dataclasses.replace(s, learner_logp=np.append(s.learner_logp[1:], s.learner_logp[:1])) if n % 4 == 1 else s
        for n, s in enumerate(SIZES[size])
    ]
    found = examine(dumps.dump_of(rows, rollout_format="bf16", learner_format="bf16", experts=False))
    assert found.fault is not None, found.headline
    assert found.fault.name == "moved_from", found.headline


def test_rows_in_another_order_with_gaps_are_said_as_that() -> None:
    """Rows of other lengths leave places without a number, which is no overflow."""
    draw = np.random.default_rng(4)
    rows = []
    for s in SIZES["large"]:
        n = int(draw.integers(20, len(s.mask) + 1))
        cut = {name: getattr(s, name)[:n] for name in ("rollout_logp", "learner_logp", "mask")}
        rows.append(dataclasses.replace(s, tokens=s.tokens[: s.prompt_length + n], **cut))
    other = [rows[(n + 5) % len(rows)].learner_logp for n in range(len(rows))]
    rows = [
        dataclasses.replace(s, learner_logp=np.append(y, np.full(99, np.nan))[: len(s.mask)])
        for s, y in zip(rows, other, strict=True)
    ]
    found = examine(dumps.dump_of(rows, rollout_format="bf16", learner_format="bf16", experts=False))
    assert found.fault is not None, found.headline
    assert found.fault.name == "rows", found.headline


def test_equal_sides_may_be_one_side_twice() -> None:
    rows = [dataclasses.replace(s, learner_logp=s.rollout_logp) for s in SIZES["large"]]
    found = examine(dumps.dump_of(rows))
    assert (found.verdict, found.basis) == (Verdict.HEALTHY, Basis.EQUAL)
    assert "copy" in found.headline
    ours = dataclasses.replace(dumps.dump_of(rows), framework="mantissa")
    assert "copy" not in examine(ours).headline  # its own exact kernels


def test_rows_that_stand_twice_are_said_and_counted_once() -> None:
    rows = SIZES["small"]
    found = examine(dumps.dump_of([*rows, *rows, *rows], rollout_format="bf16", learner_format="bf16"))
    assert any("64 of 96" in remark for remark in found.remarks), found.remarks
    assert found.figures["sequences"] == len(rows)


def some(change: Change, every: int = 8) -> Diagnosis:
    """The answer where one of ``every`` so many sequences is changed."""
    rows = [
        dataclasses.replace(s, learner_logp=change(s.learner_logp.copy())) if n % every == 0 else s
        for n, s in enumerate(SIZES["large"])
    ]
    return examine(dumps.dump_of(rows, rollout_format="bf16", learner_format="bf16", experts=False))


@pytest.mark.parametrize(
    ("name", "change"),
    [("units", lambda x: x / np.log(2)), ("summed", np.cumsum), ("repeated", lambda x: np.full_like(x, x.mean()))],
)
def test_a_field_of_some_sequences_is_no_engine_with_other_weights(name: str, change: Change) -> None:
    found = some(change)
    assert found.fault is not None, found.headline
    assert found.fault.name == name, found.headline
    assert "16 of 12" in found.headline  # of those that are long enough


def test_two_rows_that_were_exchanged_are_seen() -> None:
    rows = list(SIZES["large"])
    one, other = rows[3], rows[90]
    rows[3] = dataclasses.replace(one, learner_logp=other.learner_logp)
    rows[90] = dataclasses.replace(other, learner_logp=one.learner_logp)
    found = examine(dumps.dump_of(rows, rollout_format="bf16", learner_format="bf16", experts=False))
    assert found.fault is not None, found.headline
    assert found.fault.name == "rows", found.headline
    assert "2 of 128 sequences" in found.headline


@pytest.mark.parametrize("size", SIZES)
def test_log_of_p_and_a_number_is_no_temperature(size: str) -> None:
    found = answer(size, lambda x: np.log(np.exp(x) + 0.1))
    assert found.fault is not None, found.headline
    assert found.fault.name == "raised", found.headline


@pytest.mark.parametrize("size", SIZES)
def test_a_clipped_difference_is_no_bias(size: str) -> None:
    draw = np.random.default_rng(1)
    rows = [
        dataclasses.replace(s, learner_logp=s.rollout_logp + np.clip(draw.normal(0, 0.2, len(s.mask)), -0.1, 0.1))
        for s in SIZES[size]
    ]
    found = examine(dumps.dump_of(rows, rollout_format="bf16", learner_format="bf16", experts=False))
    assert found.fault is not None, found.headline
    assert found.fault.name == "clipped_gap", found.headline


def test_log_probs_of_other_tokens_are_unrelated_and_no_weights() -> None:
    draw = np.random.default_rng(2)
    every = np.concatenate([s.learner_logp for s in SIZES["large"]])
    found = answer("large", lambda x: draw.choice(every, len(x)))
    assert found.fault is not None, found.headline
    assert found.fault.name == "unrelated", found.headline


def test_a_missing_last_number_is_not_what_is_wrong_with_a_large_gap() -> None:
    draw, count = np.random.default_rng(3), iter(range(10**6))

    def noisy(x: np.ndarray) -> np.ndarray:
        y = np.minimum(x + draw.normal(0, 1.5, len(x)) * -np.expm1(x), -1e-4)
        y[-1] = np.nan if next(count) % 16 == 0 else y[-1]
        return y

    found = answer("large", noisy)
    assert found.fault is None or found.fault.name not in ("nonfinite", "end_token"), found.headline
    assert any("scored on one side only" in remark for remark in found.remarks), found.remarks


def test_one_value_of_a_whole_number_is_a_filler() -> None:
    """-1 where the engine gave nothing; a policy gives no whole numbers."""
    found = answer("large", lambda x: np.where(np.arange(len(x)) == 7, -1.0, x), "rollout")
    assert found.fault is not None, found.headline
    assert found.fault.name == "unscored", found.headline
    assert found.fillers[0].low == -1.0


@pytest.mark.parametrize("length", range(1, 9))
def test_short_answers_have_an_answer(length: int) -> None:
    rows = dumps.healthy(16, 4, length)
    for sequences in (rows, [dataclasses.replace(s, learner_logp=s.learner_logp * 3) for s in rows]):
        assert examine(dumps.dump_of(sequences)).headline


def test_a_list_that_lost_a_value_in_its_middle_is_not_only_short() -> None:
    """The last value is missing, and what came after the lost one belongs to the token before: both are said."""
    plain = dumps.healthy(24, 4, 16)

    def without(place: int) -> list[Scored]:
        """Every eighth row's list without one value."""
        return [
            dataclasses.replace(each, learner_logp=np.append(np.delete(each.learner_logp, place), np.nan))
            if row % 8 == 0 else each for row, each in enumerate(plain)
        ]  # fmt: skip

    short, moved = (examine(dumps.dump_of(without(place))) for place in (15, 4))
    assert short.fault is not None
    assert short.fault.name in ("unscored", "end_token")
    assert "differ beyond rounding too" not in short.headline
    assert moved.fault is not None
    assert moved.fault.name in ("moved_from", "shift") or "differ beyond rounding too" in moved.headline, moved.headline


def test_a_first_token_that_no_engine_scored_is_said_and_no_fault() -> None:
    """Where every response lacks it and the rest is rounding; where the learner lacks it, or the end, it is a fault."""
    plain = dumps.healthy(16, 4, 16)

    def lacking(name: str, place: int) -> Diagnosis:
        def one(s: Scored) -> Scored:
            values = getattr(s, name).copy()
            values[place] = np.nan
            return dataclasses.replace(s, **{name: values})

        return examine(dumps.dump_of([one(each) for each in plain]))

    healthy = lacking("rollout_logp", 0)
    assert healthy.verdict is Verdict.HEALTHY, healthy.headline
    assert healthy.headline.startswith("the rollout has no log-prob of the first token of each response: 64 tokens")
    assert healthy.figures["tokens"] == 64 * 15
    for name, place, wanted in (("learner_logp", 0, "unscored"), ("rollout_logp", -1, "end_token")):
        found = lacking(name, place)
        assert found.fault is not None
        assert (found.verdict, found.fault.name) == (Verdict.FAULT, wanted), found.headline


def test_tokens_that_an_engine_gave_no_number_here_and_there_are_said_and_no_fault() -> None:
    """Where chance alone says which; where it is one word, one row in four or the learner's, it is a fault."""
    plain, draw = dumps.healthy(16, 4, 16), np.random.default_rng(0)
    word = int(plain[0].tokens[plain[0].prompt_length + 3])

    def lacking(name: str, at: Callable[[int, Scored], np.ndarray]) -> Diagnosis:
        rows = [
            dataclasses.replace(s, **{name: np.where(at(n, s), np.nan, getattr(s, name))}) for n, s in enumerate(plain)
        ]
        return examine(dumps.dump_of(rows))

    def by_chance(n: int, s: Scored) -> np.ndarray:
        return draw.random(len(s.mask)) < 0.06

    def in_some_rows(n: int, s: Scored) -> np.ndarray:
        return (n % 4 == 0) & (draw.random(len(s.mask)) < 0.3)

    def of_one_word(n: int, s: Scored) -> np.ndarray:
        return s.tokens[s.prompt_length :] == word

    healthy = lacking("rollout_logp", by_chance)
    assert healthy.verdict is Verdict.HEALTHY, healthy.headline
    assert "tokens here and there, compared without them" in healthy.headline
    assert healthy.figures["tokens"] < 64 * 16
    for name, at in (("rollout_logp", in_some_rows), ("rollout_logp", of_one_word), ("learner_logp", by_chance)):
        found = lacking(name, at)
        assert found.fault is not None, found.headline
        assert (found.verdict, found.fault.name) == (Verdict.FAULT, "unscored"), found.headline
        assert (f"every token with id {word}" in found.headline) is (at is of_one_word)


def test_one_sequence_of_sums_counts_beside_healthy_ones_alone() -> None:
    rows = list(SIZES["small"])
    rows[3] = dataclasses.replace(rows[3], learner_logp=np.cumsum(rows[3].rollout_logp))
    found = examine(dumps.dump_of(rows, rollout_format="bf16", learner_format="bf16", experts=False))
    assert found.fault is not None
    assert found.fault.name == "summed", found.headline
    broken = [
        dataclasses.replace(s, learner_logp=s.learner_logp[::-1] * 3) if n != 3 else s for n, s in enumerate(rows)
    ]
    found = examine(dumps.dump_of(broken, rollout_format="bf16", learner_format="bf16", experts=False))
    assert found.fault is None or found.fault.name != "summed", found.headline


def test_values_that_hardly_differ_are_no_means_of_others() -> None:
    """An entropy in place of log-probs: among nearly equal values each order of them fits a running mean."""
    draw = np.random.default_rng(0)
    rows = [
        Scored(draw.integers(0, 700, 33), 1, draw.normal(-5.3, 0.4, 32), draw.normal(-5.1, 1.5, 32), np.ones(32, bool))
        for _ in range(32)
    ]
    found = examine(dumps.dump_of(rows, experts=False))
    assert found.fault is None or found.fault.name != "summed", found.headline
    means = [dataclasses.replace(s, rollout_logp=np.cumsum(s.learner_logp) / np.arange(1, 33)) for s in rows]
    found = examine(dumps.dump_of(means, experts=False))
    assert found.fault is not None, found.headline
    assert found.fault.name == "summed", found.headline


def test_a_nucleus_is_no_clipped_difference() -> None:
    """Its tokens share -log p at most, and many that much to within a rare word's own probability."""
    draw = np.random.default_rng(0)
    rows = []
    for s in SIZES["small"]:
        kept = s.learner_logp - np.log(0.8 + draw.exponential(0.001, len(s.mask)))
        rows.append(dataclasses.replace(s, rollout_logp=np.minimum(kept, 0.0)))
    found = examine(dumps.dump_of(rows, rollout_format="fp32", learner_format="fp32", experts=False))
    assert found.fault is None or found.fault.name != "clipped_gap", found.headline


def test_no_number_at_certain_tokens_alone_may_be_an_overflow() -> None:
    """A sum of exponentials in a half has none where a logit is largest; by chance it is no sign."""
    sure = np.sort(np.concatenate([s.rollout_logp for s in SIZES["large"]]))[-40]
    found = answer("large", lambda x: np.where(x > sure - 0.001, np.nan, x))
    assert found.fault is not None, found.headline
    assert (found.fault.name, found.fault.also) == ("nonfinite", ("unscored",)), found.headline
    draw = np.random.default_rng(0)
    found = answer("large", lambda x: np.where(draw.random(len(x)) < 0.01, np.nan, x))
    assert found.fault is not None, found.headline
    assert (found.fault.name, found.fault.also) == ("unscored", ()), found.headline


def answered(
    spread: float, change: Callable[[int, np.ndarray, np.random.Generator], np.ndarray], rows: int = 96
) -> Diagnosis:
    """What is said of a policy of independent normal logits, 32,300 in a sequence, which ``change`` makes the
    rollout's."""
    draw, made = np.random.default_rng(0), list[Scored]()
    for number in range(rows):
        z = draw.normal(0, spread, (32, 300))
        x, y = (each - np.logaddexp.reduce(each, 1)[:, None] for each in (change(number, z, draw), z))
        tokens = (x + draw.gumbel(size=x.shape)).argmax(1)
        x, y = x[np.arange(32), tokens], y[np.arange(32), tokens]
        made.append(Scored(np.append(1, tokens), 1, x, y, np.ones(32, bool)))
    return examine(dumps.dump_of(made, rollout_format="bf16", learner_format="bf16", experts=False))


@pytest.mark.parametrize(("contexts", "named"), [(1.0, True), (0.2, False)])
def test_a_bias_on_few_words_is_no_likeliest_token(contexts: float, named: bool) -> None:
    """All other words are a little below, which a likeliest token's log-prob never is. And where some contexts have
    none, other sequences do not foretell what it does: it is of something else, as biases of a layer are."""
    few = np.arange(300) < 4
    found = answered(2.0, lambda number, z, draw: z + 3.0 * (few & (draw.random((32, 1)) < contexts)))
    assert (found.fault is not None and found.fault.name == "logit_bias") == named, found.headline
    assert named or [each.name for each in found.candidates] == ["logit_bias"], found.headline


def test_a_temperature_of_some_rows_is_no_likeliest_token() -> None:
    """It is above the other side wherever it differs far; but of the likeliest tokens some differ too."""
    found = answered(3.5, lambda number, z, draw: z / (1.4 if number % 2 == 0 else 1.0), 32)
    assert not next(each for each in found.findings if each.name == "argmax").found
