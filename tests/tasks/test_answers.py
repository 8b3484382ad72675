"""Answers found and normalised, against naive searches and decimal arithmetic; verdicts by table and on real sets."""

from __future__ import annotations

import pickle
import re
import time
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantissa.errors import MantissaError
from mantissa.tasks import Grader, Problem, read_problems, rewards, verifier_named
from mantissa.tasks.rewards import (
    VERIFIERS,
    Dapo,
    Exact,
    MathVerify,
    last_boxed,
    math_equal,
    normalize_answer,
    plain_number,
)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("so \\boxed{42}.", "42"),
        ("\\boxed{1} and then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} \\boxed{2", "1"),  # cut off: the last complete one
        ("\\boxed {7}", "7"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),  # escaped braces do not count
        ("\\boxed{\\left\\{ 3 \\right\\}}", "\\left\\{ 3 \\right\\}"),
        ("} } \\boxed{5} }", "5"),
        ("{ \\boxed{5}", "5"),
        ("\\boxed{}", ""),
        ("boxed{5}", None),
        ("\\boxed 5", None),
        ("\\boxed{5", None),
        ("", None),
    ],
)
def test_last_boxed_by_example(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def naive_last_boxed(text: str) -> str | None:
    """Quadratic: walk from each box to its closing brace; of the complete ones, the one that closes last."""
    best: tuple[int, str] | None = None
    start = text.find("\\boxed{")
    while start >= 0:
        depth, at = 0, start + 6
        while at < len(text):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                if best is None or at > best[0]:
                    best = (at, text[start + 7 : at])
                break
            at += 1
        start = text.find("\\boxed{", start + 1)
    return None if best is None else best[1]


@settings(max_examples=150)
@given(parts=st.lists(st.sampled_from(["\\boxed{", "{", "}", "4", " "]), max_size=25))
def test_last_boxed_agrees_with_a_naive_search(parts: list[str]) -> None:
    text = "".join(parts)
    assert last_boxed(text) == naive_last_boxed(text)


def test_thousands_of_open_boxes_cost_linear_time() -> None:
    start = time.perf_counter()
    assert last_boxed("\\boxed{1}" + "\\boxed{" * 100_000) == "1"
    assert time.perf_counter() - start < 5  # measured 0.05 s; the naive search would take hours


numbers = st.from_regex(r"[+-]?[0-9]{1,8}(\.[0-9]{0,5})?", fullmatch=True)


@settings(max_examples=150)
@given(a=numbers, b=numbers)
def test_plain_numbers_agree_exactly_when_their_values_do(a: str, b: str) -> None:
    assert (plain_number(a) == plain_number(b)) == (Decimal(a) == Decimal(b))
    assert Decimal(plain_number(a) or "nan") == Decimal(a)


@given(number=st.integers(-(10**12), 10**12), zeros=st.integers(0, 3))
def test_every_usual_spelling_of_an_integer_is_one(number: int, zeros: int) -> None:
    spellings = [f"{number:,}", f"{number}." + "0" * zeros, f"  {number} ", f"${number:,}$", f"x = {number}"]
    spellings += [f"\\${number:,}", f"{number}^\\circ", f"\\text{{{number}}}", f"{number}\\%"]
    spellings += [f"{number} \\text{{ cm}}", f"{number:,}".replace(",", ",\\!")]
    assert {normalize_answer(s) for s in spellings} == {str(number)}


@pytest.mark.parametrize(
    "text", ["", ".", "+", "1/2", "1e5", "12,34", "1,2345", "0x10", "١٢", "1 2", "--1", "1.2.3", "inf"]
)
def test_what_is_no_plain_number(text: str) -> None:
    assert plain_number(text) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("142.0", "142"), ("025", "25"), ("-0.0", "0"), (".50", "0.5"), ("\\dfrac{1}{2}", "\\frac12"),
        ("\\frac{40}7", "\\frac {40}{7}"), ("\\frac{3}{7}", "3/7"), ("\\frac4{7}", "\\tfrac{4}{7}"),
        ("\\frac\\pi2", "\\frac\\pi2"), ("\\sqrt2", "\\sqrt{2}"), ("50^\\circ", "50^{\\circ}"),
        ("50°", "50 degrees"), ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})"),
        ("32\\text{ square cm}", "32"), ("9\\text{ cm}^2", "9"), ("9 \\mathrm{m}^2", "9"), ("9 ft.", "9"),
        ("\\frac{9}{2}\\text{ m}", "9/2"), ("\\$1,\\!657", "1657"), ("\\text{Evelyn}", "Evelyn"),
        ("\\(x+1\\)", "x + 1"), ("f(x) = x^2", "x^2"), ("\\boxed{5}", "5"), ("5.", "5"), ("x_1 = 3", "3"),
        ("\\text{(C)}", "(C)"),
    ],
)  # fmt: skip
def test_spellings_that_are_one(one: str, other: str) -> None:
    assert normalize_answer(one) == normalize_answer(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("142", "-142"), ("1.42", "142"), ("\\frac12", "\\frac21"), ("\\frac{1}{23}", "\\frac{12}{3}"),
        ("a=1,b=2", "a=7,b=2"), ("1,2", "12"), ("1,-2", "-2,1"), ("x<5", "x>5"), ("\\sqrt{2}", "2"),
        ("\\text{Evelyn}", "\\text{Carla}"), ("m", "n"), ("5x", "5"), ("(1,2)", "[1,2]"),
        ("\\leftarrow", "\\rightarrow"), ("10^5", "10^6"), ("", "0"), ("2m", "2"), ("5^{m}", "5"), ("9ftm", "9"),
    ],
)  # fmt: skip
def test_answers_that_stay_apart(one: str, other: str) -> None:
    assert normalize_answer(one) != normalize_answer(other)


@pytest.mark.parametrize(
    "filler", ["m", "mm ", "square ", "\\text{", "{", ".", " ", "$", "1,", "x=", "\\frac", "5\\text{m"]
)
def test_no_filler_makes_the_patterns_backtrack(filler: str) -> None:
    start = time.perf_counter()
    for opening in ("", "5", "5\\text{"):
        normalize_answer(opening + filler * (3000 // len(filler)) + "!")
    assert time.perf_counter() - start < 5  # measured under 0.1 s; exponential patterns would never return


@pytest.mark.parametrize("answer", ["." * 200_000 + "x", "1" + "cm^2" * 50_000 + "x", "1" + "m}" * 100_000])
def test_time_grows_with_the_length_and_not_its_square(answer: str) -> None:
    start = time.process_time()
    normalize_answer(answer)
    assert time.process_time() - start < 1  # quadratic patterns took minutes


PIECES = "1 2 } . ... cm ^2 ^{3} m ^ sq square hours \\text{ x= \\frac { $ \\circ degrees mph , cm^2}".split()  # noqa: SIM905 - shorter


@settings(max_examples=300)
@given(text=st.lists(st.sampled_from([*PIECES, " ", "\n"]), max_size=9).map("".join))
def test_the_two_linear_rewrites_are_the_plain_ones(text: str) -> None:
    """Against patterns that say ``$``, which try again from every place within a row that does not end the text."""
    for pattern, replacement in rewards._REWRITES:
        plain = pattern.pattern
        if plain == rewards._BARE_UNITS:
            plain += "$"
        elif plain.endswith("\\.++$"):
            plain = r"(?<=.)\.+$"
        expected = re.sub(plain, "" if callable(replacement) else replacement, text)
        text = pattern.sub(replacement, text)
        assert text == expected


@settings(max_examples=150)
@given(text=st.text(max_size=30) | st.text("\\frac{}12$=. ", max_size=30))
def test_normalising_never_fails_and_ignores_outer_space(text: str) -> None:
    assert normalize_answer(f" {text} ") == normalize_answer(text)


# verdicts


def problem(answer: str) -> Problem:
    return Problem("p", "q", answer, "s")


@pytest.mark.parametrize("name", sorted(VERIFIERS.keys() - {"code"}))
def test_142_0_is_142_under_every_verifier(name: str) -> None:
    verifier = verifier_named(name)
    boxed = "thus \\boxed{{{}}}."
    wrap = {"exact": "{}", "math_verify": boxed, "dapo": "so\nAnswer: {}", "dapo_strict": boxed}[name]
    same = (("142.0", "142", True), ("142", "142.0", True), ("025", "25", True))
    for answer, said, correct in (*same, ("142.0", "143", False), ("142.5", "142", False), ("-4.0", "4", False)):
        reward = verifier(problem(answer), wrap.format(said))
        assert (reward.correct, reward.error) == (correct, None), (answer, said)
        assert reward.value == (verifier.high if correct else verifier.low)


@pytest.mark.parametrize("name", VERIFIERS)
def test_verifiers_survive_pickling_and_declare_their_rewards(name: str) -> None:
    verifier = pickle.loads(pickle.dumps(verifier_named(name)))
    assert verifier == verifier_named(name)
    assert (verifier.low, verifier.high) == ((-1.0, 1.0) if name.startswith("dapo") else (0.0, 1.0))
    assert verifier.isolated == (name in ("math_verify", "code"))


def test_unknown_verifier_is_a_user_error_with_a_hint() -> None:
    with pytest.raises(MantissaError, match=r"unknown verifier 'mathverify'.*did you mean 'math_verify'"):
        verifier_named("mathverify")


@pytest.mark.parametrize(
    ("answer", "said", "correct"),
    [
        ("ab c", " ab c\n", True),
        ("ab c", "ab  c", False),
        ("1,657", "1657", True),
        ("1/2", "0.5", False),
        ("", "0", False),
    ],
)
def test_exact(answer: str, said: str, correct: bool) -> None:
    assert Exact()(problem(answer), said).correct == correct


@pytest.mark.parametrize(
    ("said", "correct"),
    [
        ("Answer: 34", True),
        ("answer :  $34$.", True),
        ("ANSWER:34", True),
        ("The final Answer: \\boxed{34}", True),
        ("Answer: 33\nAnswer: 34", True),  # the last one counts
        ("Answer: 34\nAnswer: 33", False),
        ("Answer: 34\nAnswer:\n", True),  # an empty line is no match
        ("Answer:\n34", True),  # white space after the colon may be a line break
        ("the answer is 34", False),
        ("\\boxed{34}", False),
        ("34", False),
        ("", False),
        ("Answer: 34" + "\n" + "x" * 289, True),  # 10 + 1 + 289 = 300 characters: just inside
        ("Answer: 34" + "\n" + "x" * 290, False),
        ("Answer: 34 or 35", False),
    ],
)
def test_dapo_rule(said: str, correct: bool) -> None:
    reward = Dapo()(problem("34"), said)
    assert (reward.correct, reward.value) == (correct, 1.0 if correct else -1.0)


@pytest.mark.parametrize(
    ("said", "correct"),
    [
        ("so \\boxed{34}", True),
        ("\\boxed{33} \\boxed{34.0}", True),
        ("\\boxed{34} \\boxed{33}", False),
        ("Answer: 34", False),
        ("\\boxed{34}" + "x" * 90, True),  # 10 + 90 = 100 characters: just inside
        ("\\boxed{34}" + "x" * 91, False),
        ("\\boxed{34", False),
    ],
)
def test_dapo_strict_rule(said: str, correct: bool) -> None:
    reward = Dapo(strict=True)(problem("34"), said)
    assert (reward.correct, reward.value) == (correct, 1.0 if correct else -1.0)


@pytest.mark.parametrize(
    ("answer", "said", "correct"),
    [
        ("\\frac{1}{2}", "\\boxed{0.5}", True),
        ("\\frac{1}{2}", "\\boxed{\\dfrac{2}{4}}", True),
        ("x^2-1", "\\boxed{(x-1)(x+1)}", True),
        ("\\sqrt{8}", "\\boxed{2\\sqrt2}", True),
        ("5", "\\boxed{x=5}", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\boxed{(3, \\pi/2)}", True),
        ("(1,2)", "\\boxed{(2,1)}", False),
        ("142", "\\boxed{141} \\boxed{142}", True),
        ("142", "\\boxed{142} \\boxed{141}", False),
        ("142,143", "\\boxed{142} or \\boxed{143}", False),  # several boxes are not a set
        ("142", "\\boxed{142} \\boxed{", True),
        ("142", "the answer is 142", True),  # no box: what the library finds
        ("142", "$142$ it is", True),
        ("142", "it is 142" + " so" * 100, False),  # beyond the last 300 characters
        ("142", "", False),
        ("142", "\\boxed{}", False),
        ("142", "no idea", False),
        ("142", "\\boxed{142" + " " * 1000 + "}", False),  # no answer is that long
        ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", True),
        ("\\text{Evelyn}", "\\boxed{\\text{Carla}}", False),
        ("05\\!:\\!00", "\\boxed{05\\!:\\!00}", True),  # equal as text, though sympy cannot compute it
        ("05\\!:\\!00", "\\boxed{06\\!:\\!00}", False),
    ],
)
def test_math_verify(answer: str, said: str, correct: bool) -> None:
    reward = MathVerify()(problem(answer), said)
    assert (reward.value, reward.correct) == (float(correct), correct)


def test_a_ground_truth_that_cannot_be_read_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="cannot read the ground truth ''"):
        MathVerify()(problem(""), "\\boxed{5}")


def test_the_self_check_notices_a_broken_library(monkeypatch: pytest.MonkeyPatch) -> None:
    MathVerify().prepare()
    monkeypatch.setattr("mantissa.tasks.rewards.math_equal", lambda answer, text: False)
    with pytest.raises(RuntimeError, match="reinstall"):
        MathVerify().prepare()


def test_expressions_that_hang_sympy_cost_one_sample_each() -> None:
    hanging = ["\\boxed{10^{10^{10}}}"]
    said = ["\\boxed{142}", hanging[0], "\\boxed{\\frac{284}{2}}", "\\boxed{141}"]
    with Grader(MathVerify(), timeout_s=2.5, workers=2) as grader:
        rewards = grader.grade([(problem("142"), s) for s in said])
    for text, reward in zip(said, rewards, strict=True):
        if text in hanging:
            assert reward.value == 0
            assert reward.error == "the verifier took longer than 2.5 s"
    assert [r.correct for r in rewards] == [True, False, True, False]
    assert [i for i, r in enumerate(rewards) if r.error] == [1]


REAL_SETS = {"aime24": 30, "amc23": 83, "math500": 500, "math_sanity_1460": 1460}


@pytest.mark.shared_data
@pytest.mark.parametrize("name", REAL_SETS)
def test_real_ground_truths_verify_against_themselves_and_no_others(shared_data: Path, name: str) -> None:
    problems, summary = read_problems([shared_data / f"{name}.parquet"])
    assert (summary.rows, summary.problems, summary.duplicates, summary.bad_rows) == (REAL_SETS[name],) * 2 + (0, ())
    # The library alone, without our shortcut for equal texts.
    library = sum(math_equal(p.answer, f"Hence \\boxed{{{p.answer}}}.") for p in problems)
    assert library == len(problems)
    verifier = MathVerify()
    assert all(verifier(p, f"Hence \\boxed{{{p.answer}}}.").correct for p in problems)
    # Another spelling, so that the shortcut cannot answer: display fractions, spaces in them, a trailing zero.
    for p in problems[::3]:
        other = re.sub(r"^(-?\d+)$", r"\1.0", p.answer.replace("\\frac", "\\dfrac").replace("}{", "} { "))
        assert verifier(p, f"\\boxed{{{other}}}").correct, (p.answer, other)
    # The answers of other problems are wrong.
    dapo = Dapo(strict=True)
    for p, neighbour in pairwise(problems[:300]):
        said = f"\\boxed{{{neighbour.answer}}}"
        verdict = MathVerify()(p, said).correct
        if p.answer == neighbour.answer:
            assert verdict
        elif re.fullmatch(r"-?\d+", p.answer) and re.fullmatch(r"-?\d+", neighbour.answer):
            assert verdict == (int(p.answer) == int(neighbour.answer))
            assert dapo(p, said).correct == verdict
    for p in problems:
        assert Dapo()(p, f"steps\nAnswer: ${p.answer}$").correct
        assert Dapo(strict=True)(p, f"\\boxed{{{p.answer}}}").correct == (len(p.answer) <= 92), p
