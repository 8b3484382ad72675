"""Answers found and normalised, against naive searches and decimal arithmetic; verdicts by table and on real sets."""

from __future__ import annotations

import re
import time
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantissa.base.errors import MantissaError
from mantissa.tasks import Grader, Problem, rewards, verifier_named
from mantissa.tasks.rewards import (
    Dapo,
    MathVerify,
    last_boxed,
    math_equal,
    normalize_answer,
    plain_number,
    stated_answer,
)
from problems import problems_in


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{1} \\boxed{2", "1"),  # cut off: the last complete one
        ("\\boxed {7}", "7"),
        ("\\boxed{\\left\\{ 3 \\right\\}}", "\\left\\{ 3 \\right\\}"),  # escaped braces do not count
        ("} } \\boxed{5} }", "5"), ("{ \\boxed{5}", "5"), ("\\boxed{}", ""),
        ("boxed{5}", None), ("\\boxed 5", None), ("\\boxed{5", None), ("", None),
    ],
)  # fmt: skip
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


@settings(max_examples=100)
@given(parts=st.lists(st.sampled_from(["\\boxed{", "{", "}", "4", " "]), max_size=25))
def test_last_boxed_agrees_with_a_naive_search(parts: list[str]) -> None:
    text = "".join(parts)
    assert last_boxed(text) == naive_last_boxed(text)


numbers = st.from_regex(r"[+-]?[0-9]{1,8}(\.[0-9]{0,5})?", fullmatch=True)


@settings(max_examples=100)
@given(a=numbers, b=numbers)
def test_plain_numbers_agree_exactly_when_their_values_do(a: str, b: str) -> None:
    assert (plain_number(a) == plain_number(b)) == (Decimal(a) == Decimal(b))
    assert Decimal(plain_number(a) or "nan") == Decimal(a)


@settings(max_examples=50)
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


FILLERS = ["m", "mm ", "square ", "\\text{", "{", ".", " ", "$", "1,", "x=", "\\frac", "5\\text{m"]
LONG = ["." * 200_000 + "x", "1" + "cm^2" * 50_000 + "x", "1" + "m}" * 100_000, "\\boxed{1}" + "\\boxed{" * 100_000]


@pytest.mark.parametrize("texts", [*([opening + f * (3000 // len(f)) + "!" for opening in ("", "5", "5\\text{")]
                                     for f in FILLERS), *([text] for text in LONG)])  # fmt: skip
def test_time_grows_with_the_length_and_not_its_square(texts: list[str]) -> None:
    start = time.process_time()
    for text in texts:
        normalize_answer(text)
        last_boxed(text)
    assert time.process_time() - start < 20  # quadratic patterns took minutes, exponential ones would never return


PIECES = "1 2 } . ... cm ^2 ^{3} m ^ sq square hours \\text{ x= \\frac { $ \\circ degrees mph , cm^2}".split()  # noqa: SIM905 - shorter


@settings(max_examples=200)
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


@settings(max_examples=100)
@given(text=st.text(max_size=30) | st.text("\\frac{}12$=. ", max_size=30))
def test_normalising_never_fails_and_ignores_outer_space(text: str) -> None:
    assert normalize_answer(f" {text} ") == normalize_answer(text)


# verdicts


def problem(answer: str) -> Problem:
    return Problem("p", "q", answer, "s")


# (answer, what was said): right; wrong
VERDICTS: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "exact": (
        [("ab c", " ab c\n"), ("1,657", "1657"), ("142", "142.0"), ("025", "25")],
        [("ab c", "ab  c"), ("1/2", "0.5"), ("", "0"), ("142.5", "142"), ("-4.0", "4")],
    ),
    "dapo": (
        [
            ("34", "Answer: 34"), ("34", "answer :  $34$."), ("34", "ANSWER:34"), ("34.0", "so\nAnswer: 34"),
            ("34", "The final Answer: \\boxed{34}"), ("34", "Answer: 33\nAnswer: 34"),  # the last one counts
            ("34", "Answer: 34\nAnswer:\n"),  # an empty line is no match
            ("34", "Answer:\n34"),  # white space after the colon may be a line break
            ("34", "Answer: 34" + "\n" + "x" * 289),  # 10 + 1 + 289 = 300 characters: just inside
        ],
        [
            ("34", "Answer: 34\nAnswer: 33"), ("34", "the answer is 34"), ("34", "\\boxed{34}"), ("34", "34"),
            ("34", ""), ("34", "Answer: 34 or 35"), ("34", "Answer: 34" + "\n" + "x" * 290),
        ],
    ),
    "dapo_strict": (
        [("34", "so \\boxed{34}"), ("34", "\\boxed{33} \\boxed{34.0}"), ("34", "\\boxed{34}" + "x" * 90)],
        [("34", "\\boxed{34} \\boxed{33}"), ("34", "Answer: 34"), ("34", "\\boxed{34}" + "x" * 91)],
    ),
    "math_verify": (
        [
            ("142.0", "\\boxed{142}"), ("\\frac{1}{2}", "\\boxed{0.5}"), ("\\frac{1}{2}", "\\boxed{\\dfrac{2}{4}}"),
            ("x^2-1", "\\boxed{(x-1)(x+1)}"), ("\\sqrt{8}", "\\boxed{2\\sqrt2}"), ("5", "\\boxed{x=5}"),
            ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\boxed{(3, \\pi/2)}"), ("142", "\\boxed{141} \\boxed{142}"),
            ("142", "\\boxed{142} \\boxed{"), ("142", "the answer is 142"), ("142", "$142$ it is"),
            ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}"),
            ("05\\!:\\!00", "\\boxed{05\\!:\\!00}"),  # equal as text, though sympy cannot compute it
        ],
        [
            ("142.5", "\\boxed{142}"), ("(1,2)", "\\boxed{(2,1)}"), ("142", "\\boxed{142} \\boxed{141}"),
            ("142,143", "\\boxed{142} or \\boxed{143}"),  # several boxes are not a set
            ("142", "it is 142" + " so" * 100),  # beyond the last 300 characters
            ("142", ""), ("142", "\\boxed{}"), ("142", "no idea"),
            ("142", "\\boxed{142" + " " * 1000 + "}"),  # no answer is that long
            ("\\text{Evelyn}", "\\boxed{\\text{Carla}}"), ("05\\!:\\!00", "\\boxed{06\\!:\\!00}"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(name: str) -> None:
    verifier = verifier_named(name)
    lowest = -1.0 if name.startswith("dapo") else 0.0
    for cases, correct in zip(VERDICTS[name], (True, False), strict=True):
        for answer, said in cases:
            reward = verifier(problem(answer), said)
            assert (reward.correct, reward.value) == (correct, 1.0 if correct else lowest), (answer, said)
            assert reward.error is None
    with pytest.raises(MantissaError, match=r"unknown verifier 'mathverify'.*did you mean 'math_verify'"):
        verifier_named("mathverify")


def test_math_verify_says_where_it_cannot_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cannot read the ground truth ''"):
        MathVerify()(problem(""), "\\boxed{5}")
    MathVerify().prepare()
    monkeypatch.setattr("mantissa.tasks.rewards.math_equal", lambda answer, text: False)
    with pytest.raises(RuntimeError, match="reinstall"):
        MathVerify().prepare()


def test_an_expression_that_hangs_sympy_costs_one_sample() -> None:
    said = ["\\boxed{142}", "\\boxed{10^{10^{10}}}", "\\boxed{\\frac{284}{2}}", "\\boxed{141}"]
    with Grader(MathVerify(), timeout_s=2.0, workers=1) as grader:
        rewards = grader.grade([(problem("142"), s) for s in said])
    assert [r.correct for r in rewards] == [True, False, True, False]
    assert [r.error for r in rewards] == [None, "the verifier took longer than 2 s", None, None]


REAL_SETS = {"aime24": 30, "amc23": 83, "math500": 500, "math_sanity_1460": 1460}


@pytest.mark.shared_data
@pytest.mark.parametrize("name", REAL_SETS)
def test_real_ground_truths_verify_against_themselves_and_no_others(shared_data: Path, name: str) -> None:
    problems, summary = problems_in([shared_data / f"{name}.parquet"])
    assert (summary.rows, summary.problems, summary.duplicates, summary.bad_rows) == (REAL_SETS[name],) * 2 + (0, ())
    # The library alone, without our shortcut for equal texts.
    assert all(math_equal(p.answer, f"Hence \\boxed{{{p.answer}}}.") for p in problems)
    verifier, dapo = MathVerify(), Dapo(strict=True)
    # Another spelling, so that the shortcut cannot answer: display fractions, spaces in them, a trailing zero.
    for p in problems[::3]:
        other = re.sub(r"^(-?\d+)$", r"\1.0", p.answer.replace("\\frac", "\\dfrac").replace("}{", "} { "))
        assert verifier(p, f"\\boxed{{{other}}}").correct, (p.answer, other)
    # The answers of other problems are wrong.
    for p, neighbour in pairwise(problems[:300]):
        said = f"\\boxed{{{neighbour.answer}}}"
        verdict = verifier(p, said).correct
        if p.answer == neighbour.answer:
            assert verdict
        elif re.fullmatch(r"-?\d+", p.answer) and re.fullmatch(r"-?\d+", neighbour.answer):
            assert verdict == (int(p.answer) == int(neighbour.answer))
            assert dapo(p, said).correct == verdict
    for p in problems:
        assert Dapo()(p, f"steps\nAnswer: ${p.answer}$").correct
        assert dapo(p, f"\\boxed{{{p.answer}}}").correct == (len(p.answer) <= 92), p


# By kind: a ground truth, spellings of it that are right, and answers that are wrong.
KINDS: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "whole": [("34", ["34", "x = 34", "34 apples", "34.0", " 34 ", "034", "$34$"], ["43", "35", "-34", "3"])],
    "thousands": [("48480", ["48480", "48,480", "48480.0", "48{,}480"], ["4848", "48.480", "484800"])],
    "negative": [("-7", ["-7", "- 7", "-7.0", "−7"], ["7", "-17"])],
    "decimal": [("0.5", ["0.5", ".5", "\\frac{1}{2}", "1/2", "0.50"], ["0.05", "5", "2"])],
    "fraction": [("\\frac{3}{4}", ["3/4", "\\frac34", "0.75", "\\dfrac{3}{4}", "6/8"], ["4/3", "3", "0.7"])],
    "percent": [("50%", ["50%", "50\\%", "50"], ["5%", "51%"])],
    "units": [("5 km", ["5 km", "5\\text{ km}", "5"], ["6 km", "50 km"])],
    "money": [("$18", ["$18", "\\$18", "18"], ["$81", "-18"])],
    "interval": [("(1,3]", ["(1,3]", "(1, 3]"], ["(1,3)", "[1,3]", "(3,1]"])],
    "pair": [("(3,4)", ["(3,4)", "(3, 4)"], ["(4,3)", "(3,5)"])],
    "set": [("\\{1,2\\}", ["\\{1,2\\}", "\\{2, 1\\}"], ["\\{1,3\\}", "\\{1\\}"])],
    "list": [("1,-2", ["1,-2", "-2, 1"], ["1,2", "1"])],
    "root": [("2\\sqrt{3}", ["2\\sqrt{3}", "2\\sqrt3", "\\sqrt{12}"], ["3\\sqrt{2}", "2\\sqrt{2}"])],
    "letter": [("B", ["B", "(B)", " B ", "B.", "\\text{B}"], ["A", "C", "AB", "D"])],
    "time": [("05:00", ["05:00"], ["06:00", "04:59"]), ("12:30", ["12:30"], ["12:31", "1:30"])],
    "text": [
        ("yes", ["yes", "Yes", "\\text{yes}"], ["no", "maybe"]),
        ("Monday", ["Monday", "monday"], ["Tuesday", "Sunday"]),
        ("New York", ["New York", "new york"], ["York", "Boston"]),
    ],
    "variable": [("x+1", ["x+1", "1+x"], ["x-1", "x"])],
    "power": [("2^{10}", ["2^{10}", "1024"], ["2^9", "10"])],
    "pi": [("\\frac{\\pi}{2}", ["\\frac{\\pi}{2}", "\\pi/2"], ["\\pi", "\\pi/3"])],
    "base": [("10_2", ["10_2"], ["11_2"])],
    "degrees": [("90^\\circ", ["90^\\circ", "90", "90°"], ["91", "9"])],
    "infinity": [("(-\\infty,2)", ["(-\\infty,2)", "(-\\infty, 2)"], ["(-\\infty,2]", "(2,\\infty)"])],
}


@pytest.mark.parametrize(
    "way", ["<think>so</think>\n<answer>{}</answer>", "<answer>\n {} </answer>", "so \\boxed{{{}}}."]
)
def test_a_table_of_answers_in_tags_and_boxes(way: str) -> None:
    verdicts = [
        (kind, truth, said, right, MathVerify()(Problem("p", "q", truth, "s"), way.format(said)))
        for kind, rows in KINDS.items()
        for truth, good, bad in rows
        for said, right in [*((each, True) for each in good), *((each, False) for each in bad)]
    ]
    assert len(verdicts) > 120
    assert all(reward.found for *_, reward in verdicts)
    assert [(kind, truth, said) for kind, truth, said, right, reward in verdicts if reward.correct != right] == []


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("<answer>3</answer> <answer> 4 </answer>", "4"), ("\\boxed{1} <answer>2</answer>", "2"),
        ("<answer>2</answer> \\boxed{1}", "1"), ("<answer>so \\boxed{7}</answer>", "7"),
        ("<answer><answer>5</answer>", "5"), ("<answer>5", None), ("5</answer>", None), ("\\boxed{6} <answer>5", "6"),
        ("<answer></answer>", ""),
    ],
)  # fmt: skip
def test_the_answer_that_stands_last(text: str, stated: str | None) -> None:
    assert stated_answer(text) == stated


def test_many_open_tags_cost_no_more_than_their_length() -> None:
    started = time.perf_counter()
    assert stated_answer("<answer>" * 50_000) is None
    assert stated_answer("<answer>" + "x" * 400_000) is None
    assert time.perf_counter() - started < 2


def test_whether_an_answer_was_found_is_told() -> None:
    problem = Problem("p", "q", "34", "s")
    for name, good, none in (("math_verify", "it is 34", "no idea"), ("dapo", "Answer: 34", "34"), ("exact", "", "")):
        verifier = verifier_named(name)
        assert verifier(problem, good).found is (None if name == "exact" else True)
        assert verifier(problem, none).found is (None if name == "exact" else False)
