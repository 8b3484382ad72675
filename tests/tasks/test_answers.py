"""Finding and normalising answers, against naive searches and decimal arithmetic."""

from __future__ import annotations

import re
import time
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantissa.tasks import rewards
from mantissa.tasks.rewards import last_boxed, normalize_answer, plain_number


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
    spellings += [
        f"\\${number:,}",
        f"{number}^\\circ",
        f"\\text{{{number}}}",
        f"{number}\\%",
        f"{number} \\text{{ cm}}",
    ]
    spellings += [f"{number:,}".replace(",", ",\\!")]
    assert {normalize_answer(s) for s in spellings} == {str(number)}


@pytest.mark.parametrize(
    "text", ["", ".", "+", "1/2", "1e5", "12,34", "1,2345", "0x10", "١٢", "1 2", "--1", "1.2.3", "inf"]
)
def test_what_is_no_plain_number(text: str) -> None:
    assert plain_number(text) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("142.0", "142"),
        ("025", "25"),
        ("-0.0", "0"),
        (".50", "0.5"),
        ("\\dfrac{1}{2}", "\\frac12"),
        ("\\frac{40}7", "\\frac {40}{7}"),
        ("\\frac{3}{7}", "3/7"),
        ("\\frac4{7}", "\\tfrac{4}{7}"),
        ("\\frac\\pi2", "\\frac\\pi2"),
        ("\\sqrt2", "\\sqrt{2}"),
        ("50^\\circ", "50^{\\circ}"),
        ("50°", "50 degrees"),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})"),
        ("32\\text{ square cm}", "32"),
        ("9\\text{ cm}^2", "9"),
        ("9 \\mathrm{m}^2", "9"),
        ("9 ft.", "9"),
        ("\\frac{9}{2}\\text{ m}", "9/2"),
        ("\\$1,\\!657", "1657"),
        ("\\text{Evelyn}", "Evelyn"),
        ("\\(x+1\\)", "x + 1"),
        ("f(x) = x^2", "x^2"),
        ("\\boxed{5}", "5"),
        ("5.", "5"),
        ("x_1 = 3", "3"),
        ("\\text{(C)}", "(C)"),
    ],
)
def test_spellings_that_are_one(one: str, other: str) -> None:
    assert normalize_answer(one) == normalize_answer(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("142", "-142"),
        ("1.42", "142"),
        ("\\frac12", "\\frac21"),
        ("\\frac{1}{23}", "\\frac{12}{3}"),
        ("a=1,b=2", "a=7,b=2"),
        ("1,2", "12"),
        ("1,-2", "-2,1"),
        ("x<5", "x>5"),
        ("\\sqrt{2}", "2"),
        ("\\text{Evelyn}", "\\text{Carla}"),
        ("m", "n"),
        ("5x", "5"),
        ("(1,2)", "[1,2]"),
        ("\\leftarrow", "\\rightarrow"),
        ("10^5", "10^6"),
        ("", "0"),
        ("2m", "2"),
        ("5^{m}", "5"),
        ("9ftm", "9"),
    ],
)
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
