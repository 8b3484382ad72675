"""A name is said where its evidence excludes what else fits, and is else what the gap looks like."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import dumps
from mantissa.doctor import examine as examination
from mantissa.doctor.diagnosis import Basis, Diagnosis, Finding, Verdict
from mantissa.doctor.dump import Scored
from mantissa.doctor.evidence import Evidence
from mantissa.doctor.examine import examine
from mantissa.doctor.signatures import Judged, _too_little
from mantissa.doctor.words import first_line

WORDS = 30
Law = Callable[[np.ndarray, np.random.Generator], np.ndarray]


@functools.cache
def contexts(prompts: int, samples: int, length: int) -> list[tuple[int, list[int], list[np.ndarray]]]:
    """(prompt, tokens, the log-probs of all words at each) of samples of a softmax policy."""
    draw, known = np.random.default_rng(1), dict[tuple[int, ...], np.ndarray]()
    made = []
    for group in np.repeat(np.arange(prompts), samples).tolist():
        tokens, laws = list[int](), list[np.ndarray]()
        for _ in range(length):
            key = (group, *tokens)
            if key not in known:
                known[key] = normal(draw.normal(0, 2, WORDS))
            laws.append(known[key])
            tokens.append(int(np.searchsorted(np.exp(laws[-1]).cumsum(), draw.random() * (1 - 1e-9))))
        made.append((group, tokens, laws))
    return made


def rolled(law: Law, prompts: int = 16, samples: int = 4, length: int = 24) -> list[Scored]:
    """Samples of a softmax policy over ``WORDS`` words; the learner's are ``law`` of these, and noise."""
    noise, known = np.random.default_rng(2), dict[int, np.ndarray]()
    made = []
    for group, tokens, laws in contexts(prompts, samples, length):
        for x in laws:
            if id(x) not in known:
                known[id(x)] = law(normal(x + 0.01 * noise.normal(0, 1, WORDS)), noise)
        one, other = (np.array([row[token] for row, token in zip(rows, tokens, strict=True)])
                      for rows in (laws, [known[id(x)] for x in laws]))  # fmt: skip
        made.append(Scored(np.array([1, 2, 3, *tokens]), 3, one, other, np.ones(length, dtype=bool), group=group))
    return made


def told(rows: list[Scored], experts: bool = False) -> Diagnosis:
    return examine(dumps.dump_of(rows, rollout_format="bf16", learner_format="bf16", experts=experts, temperature=1.0))


def normal(x: np.ndarray) -> np.ndarray:
    return x - np.logaddexp.reduce(x)


def biased(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    return normal(x + np.where(np.arange(WORDS) < 2, by, 0.0))


def unlike(number: int, x: np.ndarray, by: float, where: np.ndarray) -> np.ndarray:
    """Log-odds that are moved to one side or the other by noise of this size, at some tokens."""
    odds = x - np.log(-np.expm1(x)) + by * np.where(where, np.random.default_rng(number).normal(0, 1, len(x)), 0.0)
    return -np.logaddexp(0, -odds)


LAWS: dict[str, tuple[str, Law]] = {
    "a smoothed loss": ("smoothed", lambda x, draw: 0.9 * x + 0.1 * x.mean()),
    "smoothed probabilities": ("smoothed", lambda x, draw: np.log(0.8 * np.exp(x) + 0.2 / WORDS)),
    "a temperature": ("temperature", lambda x, draw: normal(0.7 * x)),
    "more words than the other's": ("support", lambda x, draw: x - draw.uniform(0.1, 0.9)),
    "a bias": ("logit_bias", lambda x, draw: biased(x, np.full(WORDS, -2.0))),
}


@pytest.mark.parametrize("side", ["learner", "rollout"])
@pytest.mark.parametrize("name", LAWS)
def test_a_law_is_named_and_no_other_that_fits_as_well(name: str, side: str) -> None:
    wanted, law = LAWS[name]
    rows = rolled(law)
    if side == "rollout":
        rows = [dataclasses.replace(s, rollout_logp=s.learner_logp, learner_logp=s.rollout_logp) for s in rows]
    found = told(rows)
    assert found.fault is not None, found.headline
    assert (found.verdict, found.fault.name, found.candidates) == (Verdict.FAULT, wanted, ()), found.headline


def test_words_that_move_by_another_factor_in_each_context_are_no_bias() -> None:
    found = told(rolled(lambda x, draw: biased(x, -draw.uniform(1, 12, WORDS))))
    assert (found.verdict, found.basis, found.candidates[0].name) == (Verdict.LARGE, Basis.LIKELY, "logit_bias")
    assert "not proven" in first_line(found)
    assert "another factor" in found.headline


SHIFT = np.random.default_rng(3).normal(0, 1, WORDS)


@pytest.mark.parametrize(("own", "named"), [(0.9, True), (0.45, False)])
def test_most_of_what_other_weights_do_to_a_token_is_its_own(own: float, named: bool) -> None:
    """A law, a place or another prompt leaves a little of it, too."""
    found = told(rolled(lambda x, draw: normal(x + own * SHIFT + np.sqrt(1 - own**2) * draw.normal(0, 1, WORDS))))
    size = next(each for each in found.findings if each.name == "weights")
    assert size.found
    assert (found.basis is Basis.FINDINGS) == named, (size.effect, found.headline)
    assert (found.fault if named else found.candidates[0]).name == "weights", found.headline  # type: ignore[union-attr]


def plain(x: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    return x


def changed(change: Callable[[int, Scored], np.ndarray], mask: np.ndarray | None = None) -> list[Scored]:
    return [dataclasses.replace(s, learner_logp=change(number, s), mask=s.mask if mask is None else mask)
            for number, s in enumerate(rolled(plain))]  # fmt: skip


def test_tokens_that_one_side_lacks_are_not_all_where_the_others_differ_too() -> None:
    rounded, noisy = rolled(plain), rolled(lambda x, draw: normal(x + draw.normal(0, 1, WORDS)))
    alone, found = (told([dataclasses.replace(s, learner_logp=np.where(np.arange(24) % 8 == n % 8, 0.0, s.learner_logp))
                          for n, s in enumerate(rows)]) for rows in (rounded, noisy))  # fmt: skip
    assert alone.fault is not None
    assert (alone.verdict, alone.fault.name) == (Verdict.FAULT, "unscored"), alone.headline
    assert (found.verdict, found.basis, found.candidates[0].name) == (Verdict.LARGE, Basis.LIKELY, "unscored")
    assert "scored on one side only" in found.headline
    assert "does not explain" in found.headline


TURN = np.ones(24, dtype=bool)
TURN[8:11] = False


@pytest.mark.parametrize("end", [24, 13], ids=["from there on", "at the border"])
def test_a_fault_that_begins_with_the_second_turn(end: int) -> None:
    """Where the tools' answers stand at other places in each sequence, as they do."""
    rows = []
    for number, s in enumerate(rolled(plain)):
        by = number % 3
        at = (np.arange(24) >= 11 + by) & (np.arange(24) < end + by)
        rows.append(
            dataclasses.replace(s, learner_logp=unlike(number, s.learner_logp, 2.0, at), mask=np.roll(TURN, by))
        )
    found = told(rows)
    assert found.fault is not None, found.headline
    assert (found.verdict, found.fault.name) == (Verdict.FAULT, "turn"), found.headline
    assert told(changed(lambda n, s: s.learner_logp, TURN)).verdict is Verdict.HEALTHY


@pytest.mark.parametrize("experts", [True, False])
def test_experts_that_are_full_at_the_end_of_each_batch(experts: bool) -> None:
    found = told(changed(lambda n, s: unlike(n, s.learner_logp, 2.0, np.full(24, n % 16 >= 7))), experts)
    names = {found.fault.name, *found.fault.also} if found.fault is not None else set()
    assert ("capacity" in names) is experts, found.headline
    assert found.verdict is not Verdict.HEALTHY


@pytest.mark.parametrize(("kept", "named"), [(0.2, True), (0.4, False)])
def test_what_still_goes_together_is_not_of_other_tokens(kept: float, named: bool) -> None:
    """A model that is broken keeps some of the order of its words; another text keeps how frequent they are."""
    found = told(rolled(lambda x, draw: normal(kept * x + draw.normal(0, 2, WORDS))))
    assert (found.verdict is Verdict.FAULT) == named, found.headline
    assert (found.fault if named else found.candidates[0]).name == "unrelated", found.headline  # type: ignore[union-attr]


def test_a_part_of_the_gap_is_no_name_for_all_of_it() -> None:
    """Where two were to explain it together, and one of them is not proven."""
    half, tokens = (Finding(name, True, 1e-9, 1.0, "", None, "", share=share)
                    for name, share in (("half_logits", 0.26), ("single_tokens", 0.6)))  # fmt: skip
    assert "74%" in _too_little([half, tokens], [half])
    assert not _too_little([half, tokens], [half, tokens])
    assert not _too_little([dataclasses.replace(half, share=0.6), tokens], [dataclasses.replace(half, share=0.6)])


def one_way(until: Callable[[int], int], size: float = 0.4) -> list[Scored]:
    """Noise, and the learner's log-probs below the rollout's by another amount in each context before a place."""

    rows = list[Scored]()
    for number, row in enumerate(rolled(plain, prompts=64, samples=1)):
        draw = np.random.default_rng(number)
        by = np.where(np.arange(24) < until(number), draw.exponential(size, 24), 0.0)
        rows.append(
            dataclasses.replace(row, learner_logp=row.learner_logp - by * (1 - np.exp(row.rollout_logp)), group=number)
        )
    return rows


@pytest.mark.parametrize(("until", "named"), [(24, True), (12, False)], ids=["everywhere", "at first"])
def test_words_that_are_ruled_out_know_no_place(until: int, named: bool) -> None:
    # At first alone, and one sequence ended there all the same: no end is banned, and no word is either.
    found = told(one_way(lambda number: until if number else 24))
    assert (found.fault is not None and found.fault.name == "support") == named, found.headline
    if not named:
        assert found.basis is Basis.LIKELY or found.basis is Basis.SIZE, found.headline


def test_a_floor_under_one_side_is_of_the_same_tokens() -> None:
    rows = rolled(plain)
    for number, row in enumerate(rows):
        floor = np.random.default_rng(number).uniform(-1.2, -0.8, 24)
        rows[number] = dataclasses.replace(row, rollout_logp=np.maximum(row.rollout_logp, floor))
    found = told(rows)
    assert found.fault is None or found.fault.name != "unrelated", found.headline


def test_a_place_of_all_sequences_is_no_token_of_their_own() -> None:
    """A window of 30 tokens: what lies beyond it differs more the farther it is, and prompts are of many lengths."""
    draw, rows = np.random.default_rng(0), list[Scored]()
    for row in rolled(plain):
        prompt = int(draw.integers(4, 26))
        beyond = np.maximum(prompt + np.arange(24) - 30, 0)
        by = np.minimum(beyond, 6) / 6 * draw.normal(0, 0.8, 24) * (1 - np.exp(row.rollout_logp))
        tokens = np.concatenate([np.arange(prompt), row.tokens[row.prompt_length :]])
        rows.append(dataclasses.replace(row, tokens=tokens, prompt_length=prompt,
                                        learner_logp=np.minimum(row.learner_logp + by, -1e-6)))  # fmt: skip
    found = told(rows, experts=False)
    assert found.fault is None or found.fault.name != "mid_sequence", found.headline


def test_a_temperature_is_not_lost_to_a_bias_of_one_sign() -> None:
    """Likely words gain and others lose, which a bias on these words would do as well, if each lost by one factor."""
    found = told(rolled(lambda x, draw: normal(0.8 * x), prompts=48, samples=1))
    assert found.fault is not None, found.headline
    assert "temperature" in (found.fault.name, *found.fault.also), found.headline


@pytest.mark.parametrize(("named", "verdict"), [("bf16", Verdict.LARGE), (None, Verdict.UNKNOWN)])
def test_a_size_of_fp8_is_not_judged_where_no_format_is_named(named: str | None, verdict: Verdict) -> None:
    rows = [dataclasses.replace(s, learner_logp=unlike(n, s.learner_logp, 0.3, np.full(24, True)))
            for n, s in enumerate(rolled(plain, prompts=64, samples=1))]  # fmt: skip
    found = examine(dumps.dump_of(rows, rollout_format=named, experts=False, temperature=1.0))
    assert found.verdict is verdict, found.headline
    assert ("rollout_format" in found.headline) == (named is None), found.headline


def test_a_part_of_a_healthy_gap_that_is_larger_is_no_fault() -> None:
    """A third of the sequences differs more than the others, a tenth of what bf16 makes."""
    size = [0.013 if n % 7 < 2 else 0.009 for n in range(64)]
    rows = [dataclasses.replace(s, learner_logp=unlike(n, s.rollout_logp, size[n], np.full(24, True)))
            for n, s in enumerate(rolled(plain, prompts=64, samples=1))]  # fmt: skip
    assert told(rows).verdict is Verdict.HEALTHY, told(rows).headline


def test_a_rival_that_comes_without_a_quarter_of_the_prompts_leaves_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rolled(lambda x, draw: normal(0.7 * x))
    whole = told(rows).fault
    assert whole is not None
    kept = examination._proven

    def proven(e: Evidence, without: Sequence[str]) -> tuple[list[Finding], Judged]:
        every, held = kept(e, without)
        part = any(not each.mask.any() for each in e.dump.sequences)
        return every, Judged((dataclasses.replace(held.named[0], name="weights"),)) if part else held

    monkeypatch.setattr(examination, "_proven", proven)
    found = told(rows)
    assert (found.verdict, found.basis, found.candidates[0].name) == (Verdict.LARGE, Basis.LIKELY, whole.name)
    assert "without a quarter of the prompts" in found.headline


def test_a_side_of_e4m3_numbers_is_told_by_its_grid() -> None:
    def of_e4m3(number: int, row: Scored) -> np.ndarray:
        step = 2.0 ** (np.floor(np.log2(-row.learner_logp)) - 3)
        return np.round(row.learner_logp / step) * step

    found = told(changed(of_e4m3))
    assert found.fault is not None, found.headline
    assert found.fault.name == "coarse_logprobs", found.headline
    assert "e4m3" in found.headline
