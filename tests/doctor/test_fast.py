"""What the doctor does quickly, against the plain way of doing it, to the last bit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mantissa.base.readers.json import _has_run
from mantissa.doctor.dump import Dump, Scored, Settings
from mantissa.doctor.evidence import Evidence
from mantissa.doctor.locations import _stood
from mantissa.doctor.readers import LARGEST_FLOAT, _ids, _logp, read_dump
from mantissa.doctor.sample import Tokens, ranked, sums_by
from mantissa.doctor.sample import tested as jackknife
from mantissa.doctor.values import shift

Array = np.ndarray


def evidence(seed: int, rows: int = 40, words: int = 50) -> Evidence:
    """Sequences of many lengths with masked and missing tokens, some of none; the learner's are moved by one."""
    draw = np.random.default_rng(seed)
    sequences = []
    for row in range(rows):
        prompt, length = int(draw.integers(0, 9)), int(draw.integers(0 if row % 7 else 1, 30))
        x = np.log(draw.uniform(0.01, 1, length))
        y = np.roll(x, 1) + draw.normal(0, 0.02, length)
        x[draw.random(length) < 0.05] = np.nan
        mask = draw.random(length) < 0.9
        tokens = draw.integers(0, words, prompt + length)
        sequences.append(Scored(tokens, prompt, x, np.minimum(y, -1e-6), mask, group=row // 4))
    return Evidence.of(Dump("plain", Path("made"), sequences, Settings(1.0)), 0.16)


def slow_repeated(e: Evidence) -> Array:
    found = []
    for s, at in zip(e.clean.sequence.tolist(), e.clean.position.tolist(), strict=True):
        each = e.dump.sequences[s]
        place = each.prompt_length + at
        found.append(each.tokens[place] in each.tokens[:place])
    return np.array(found)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("words", [3, 50, 2**31 - 1])
def test_tokens_that_stood_in_their_sequence_before(seed: int, words: int) -> None:
    e = evidence(seed, words=words)
    assert ((_stood(e.texts, e.begins)[e.places] > 0) == slow_repeated(e)).all()
    assert slow_repeated(e).any() == (words <= 50)


def test_more_sequences_than_fit_into_one_number() -> None:
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 2**31 - 1, 3000)
    tokens[::2] = tokens[1::2]  # each token twice, side by side: the second one is known, but at a sequence's beginning
    begins = np.arange(0, 3000, 3)
    expected = [tokens[at] in tokens[at // 3 * 3 : at] for at in range(3000)]
    tokens[-1] = 2**31 - 1
    assert ((_stood(tokens, begins) > 0)[:-1] == expected[:-1]).all()
    assert (_stood(tokens, begins) > 0).sum() > 500


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("most", [5, 900, 10**6, 2**40, 2**61])
def test_ranks_are_those_of_unique(seed: int, most: int) -> None:
    values = np.random.default_rng(seed).integers(0, most, 2000)
    assert (ranked(values, most) == np.unique(values, return_inverse=True)[1]).all()


@pytest.mark.parametrize("seed", range(4))
def test_what_a_cause_leaves_is_a_dump(seed: int) -> None:
    e = evidence(seed)
    t = e.clean
    rest = np.where(np.random.default_rng(seed).random(len(t.x)) < 0.3, np.nan, t.d / 2)
    left = [(s.rollout_logp.copy(), s.learner_logp.copy(), np.zeros_like(s.mask)) for s in e.dump.sequences]
    y = np.minimum(t.x + rest, -1e-3)
    for at in np.flatnonzero(~np.isnan(rest)):
        x_side, y_side, mask = left[t.sequence[at]]
        x_side[t.position[at]], y_side[t.position[at]] = min(y[at] - rest[at], -1e-6), y[at]
        mask[t.position[at]] = True
    for each, (x_side, y_side, mask) in zip(e.after(rest).sequences, left, strict=True):
        np.testing.assert_array_equal(each.rollout_logp, x_side)
        np.testing.assert_array_equal(each.learner_logp, y_side)
        np.testing.assert_array_equal(each.mask, mask)


def slow_shift(t: Tokens, usual: float, tests: int) -> tuple[float, int, Array]:
    best, at, rest = -np.inf, 0, t.d
    for k in (-2, -1, 1, 2):
        pairs = [(i, i + k) for i in range(len(t.x)) if 0 <= i + k < len(t.x)
                 and t.sequence[i] == t.sequence[i + k] and t.position[i + k] - t.position[i] == k]  # fmt: skip
        i, j = np.array(pairs).T
        moved = replace(t.where(i), y=t.y[j])
        u, own = (np.minimum(np.abs(each.u), 5.0) for each in (moved, t.where(i)))
        sums = sums_by(moved.unit, own, u, np.ones(len(i)))
        found = jackknife(sums, lambda s: np.log(s[..., 0] / (s[..., 1] + usual / 4 * s[..., 2])), 0.0, tests)
        if found.value > best:
            best, at, rest = found.value, k, np.full(len(t.x), np.nan)
            rest[i] = moved.d
    return best, at, rest


@pytest.mark.parametrize("seed", range(3))
def test_shift(seed: int) -> None:
    e = evidence(seed, rows=60)
    value, at, rest = slow_shift(e.clean, e.usual, 28)
    found = shift(e, 28)
    assert at == 1
    assert found.p < 1e-3
    assert found.effect == float(np.exp(value))
    assert f"moved by {at:+d}" in found.said
    np.testing.assert_array_equal(found.rest, rest)


@pytest.mark.parametrize("digits", [16, 77, 309])
def test_runs_of_digits(digits: int) -> None:
    draw = np.random.default_rng(digits)
    for case in range(300):
        run = digits + int(draw.integers(-2, 3))
        before = "".join(draw.choice(list("0123456789.,e- [é"), int(draw.integers(0, 40))))
        text = before + "".join(draw.choice(list("0123456789"), run)) + ("" if case % 2 else "é.5, 7")
        assert _has_run(text, digits) == (re.search(rf"[0-9]{{{digits}}}", text) is not None), text


def test_values_as_before() -> None:
    assert _ids("here", "tokens", [3, 2**31 - 1, 0]).tolist() == [3, 2**31 - 1, 0]
    for odd in ([1.5], [-1], [2**31], ["a"], [[[1]]]):
        with pytest.raises(Exception, match="here: tokens"):
            _ids("here", "tokens", odd)
    given = [-1.5, None, -0.0, 1e300, float("inf"), float("nan")]
    found = _logp("here", "learner_logp", given, 6)
    np.testing.assert_array_equal(found, [-1.5, np.nan, 0.0, np.nan, np.nan, np.nan])
    assert _logp("here", "learner_logp", [-LARGEST_FLOAT, 2], 2).tolist() == [-LARGEST_FLOAT, 2]


def test_settings_that_rows_do_not_share_are_not_known(tmp_path: Path) -> None:
    row = '{"tokens": [1, 2], "rollout_logp": [-1.0], "learner_logp": [-1.0], "temperature": %s, "top_k": 5}\n'
    path = tmp_path / "dump.jsonl"
    path.write_text(row % 1 + row % 1.0 + row % 0.5 + row % 1 + row % 0.5)
    assert read_dump(path).settings == Settings(top_k=5)
    path.write_text(row % 0.5 + row % 0.5)
    assert read_dump(path).settings == Settings(temperature=0.5, top_k=5)
