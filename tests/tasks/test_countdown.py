"""Countdown against Python's eval over fractions, and against a brute-force search of all expressions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantissa.errors import MantissaError
from mantissa.tasks.generated import MAX_CHARACTERS, Countdown, CountdownVerifier, ExpressionError, evaluate
from mantissa.tasks.types import Problem

SIZES = {"train": 60, "heldout": 20, "warm_start": 20}


def problem(answer: str) -> Problem:
    return Problem("p", f"{answer}=", answer, "countdown")


expressions = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
        st.tuples(inner, st.sampled_from(["+", " - ", "*", "/ "]), inner).map("".join),
        inner.map(lambda t: f"( {t})"),
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(text=expressions)
def test_evaluate_agrees_with_python_over_fractions(text: str) -> None:
    try:
        want = eval(re.sub(r"\d+", r"Fraction(\g<0>)", text), {"Fraction": Fraction})
    except ZeroDivisionError:
        want = None
    if want is None or len(text.strip()) > MAX_CHARACTERS:
        with pytest.raises(ExpressionError):
            evaluate(text)
        return
    value, numbers, operators = evaluate(text)
    assert value == want
    assert numbers == [int(n) for n in re.findall(r"\d+", text)]
    assert operators == set(re.findall(r"[-+*/]", text))


@settings(max_examples=150)
@given(text=st.text("0123456789+-*/() \n.e_x", max_size=40) | st.text(max_size=20))
def test_arbitrary_text_is_a_verdict_never_a_crash(text: str) -> None:
    reward = CountdownVerifier()(problem("3 5 7:26"), text)
    assert reward.value == float(reward.correct)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "nothing"),
        ("3*7+x", "a name"),
        ("3*7+5; 1", "a statement"),
        ("__import__('os')", "a call"),
        ("3*7+5.0", "a decimal"),
        ("3**3", "a power, which could be huge"),
        ("7//2", "floor division"),
        ("-5+3", "a sign"),
        ("+5", "a sign"),
        ("5(3)", "a call"),
        ("(5,3)", "a tuple"),
        ("()", "an empty tuple"),
        ("05+3", "a leading zero"),
        ("5/0", "division by zero"),
        ("5/(3-3)", "division by zero"),
        ("3 5", "no operator"),
        ("3*7+5=26", "an equation"),
        ("3\n+5", "a line break"),
        ("٣+5", "a digit that is not ASCII"),
        ("(" * 100 + "5" + ")" * 99, "unbalanced"),
        ("1+" * 100 + "1", "too long"),
        ("9" * 201, "too long"),
        ("(" * 100000, "much too long"),
    ],
)
def test_what_is_no_expression_is_refused(text: str, why: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text)


def test_the_deepest_texts_that_fit_are_evaluated() -> None:
    assert evaluate("(" * 99 + "5" + ")" * 99)[0] == 5
    assert evaluate("1" + "+1" * 99)[0] == 100
    assert evaluate("9" * 99 + "*" + "9" * 100)[0] == int("9" * 99) * int("9" * 100)


@pytest.mark.parametrize(
    ("answer", "completion", "correct"),
    [
        ("3 5 7:26", "3*7+5", True),
        ("3 5 7:26", " 5 + 7*3 \n", True),
        ("3 5 7:26", "(7*3)+5", True),
        ("3 5 7:26", "5*5+1", False),  # other numbers
        ("3 5 7:26", "3*7+5+5-5", False),  # a number twice
        ("3 5 7:21", "3*7", False),  # a number left out
        ("3 3 7:16", "3*3+7", True),  # given twice, used twice
        ("3 3 7:10", "3+7", False),
        ("35 7:5", "35/7", True),
        ("3 5 7:5", "35/7", False),  # digits glued together
        ("3 8 3 8:24", "8/(3-8/3)", True),  # exact fractions: floats give 23.999999999999989
        ("3 5 7:26", "26", False),
    ],
)
def test_rules_of_the_game(answer: str, completion: str, correct: bool) -> None:
    reward = CountdownVerifier()(problem(answer), completion)
    assert (reward.value, reward.correct, reward.error) == (float(correct), correct, None)


def test_only_the_tasks_operators_may_be_used() -> None:
    assert CountdownVerifier("+-")(problem("3 5 7:1"), "3+5-7").correct
    assert not CountdownVerifier("+-")(problem("3 5 7:26"), "3*7+5").correct


def all_expressions(numbers: tuple[int, ...], operations: str) -> Iterator[tuple[str, Fraction]]:
    """Every full expression over the numbers in their given order, fully parenthesised: the slow, obvious search."""
    if len(numbers) == 1:
        yield str(numbers[0]), Fraction(numbers[0])
        return
    for cut in range(1, len(numbers)):
        for left, a in all_expressions(numbers[:cut], operations):
            for right, b in all_expressions(numbers[cut:], operations):
                for symbol in operations:
                    if symbol != "/" or b != 0:
                        yield (
                            f"({left}{symbol}{right})",
                            {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else a}[symbol],
                        )


def test_problems_are_solvable_and_all_their_solutions_accepted() -> None:
    task = Countdown({"train": 12, "heldout": 0, "warm_start": 0}, 5, numbers=3)
    several = 0
    for p in task.split("train"):
        numbers, target = p.answer.split(":")
        values = tuple(map(int, numbers.split()))
        right = 0
        for order in set(permutations(values)):
            for text, value in all_expressions(order, "+-*/"):
                assert task.verify(p, text).correct == (value == int(target)), (p, text)
                right += value == int(target)
        assert right >= 1
        several += right > 1
    assert several >= 6


@pytest.mark.parametrize("style", ["compact", "text"])
@pytest.mark.parametrize(
    ("numbers", "max_number", "max_target", "operations"),
    [(2, 9, 99, "+-*/"), (4, 9, 30, "+-*/"), (5, 25, 99, "+-"), (3, 50, 5000, "*+"), (4, 12, 50, "/-")],
)
def test_solutions_verify(numbers: int, max_number: int, max_target: int, operations: str, style: str) -> None:
    task = Countdown(SIZES, 1, numbers, max_number, max_target, operations, style)  # type: ignore[arg-type]
    for p in (*task.split("train"), *task.split("heldout"), *task.split("warm_start")):
        assert isinstance(p.prompt, str)
        assert p.solution is not None
        assert task.verify(p, p.solution).correct
        assert not task.verify(
            p, p.solution.replace("<answer>", "<answer>1+") if style == "text" else f"1+{p.solution}"
        ).correct
        given, target = p.answer.split(":")
        assert len(given.split()) == numbers
        assert all(1 <= int(n) <= max_number for n in given.split())
        assert 1 <= int(target) <= max_target
        if style == "compact":
            assert p.prompt == f"{p.answer}="
            assert set(p.prompt) | set(p.solution) <= set(task.alphabet or "")
        else:
            assert task.alphabet is None
            assert given in p.prompt
            assert f"equals {target}." in p.prompt


def test_text_style_takes_the_last_tag() -> None:
    verifier = CountdownVerifier(style="text")
    assert verifier(problem("3 5 7:26"), "<answer>1</answer> no: <answer>\n3*7+5 </answer>.").correct
    assert not verifier(problem("3 5 7:26"), "<answer>3*7+5</answer> no: <answer>1</answer>").correct
    assert not verifier(problem("3 5 7:26"), "3*7+5").correct
    assert not verifier(problem("3 5 7:26"), "<answer>3*7+5").correct


def test_every_operator_occurs_in_the_solutions() -> None:
    task = Countdown({"train": 300, "heldout": 0, "warm_start": 0}, 0)
    assert {c for p in task.split("train") for c in p.solution or ""} == set("0123456789+-*/()") - {"0"}


def test_an_unreachable_setting_is_a_clear_error() -> None:
    task = Countdown(
        {"train": 1, "heldout": 0, "warm_start": 0}, 0, numbers=10, max_number=10_000, max_target=1, operations="*"
    )
    with pytest.raises(MantissaError, match=r"gave no target in 1\.\.1; raise max_target or use fewer numbers"):
        task.split("train")
