"""Generated tasks: their splits, arithmetic against numpy and Python's own evaluation, countdown against a search."""

from __future__ import annotations

import functools
import hashlib
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantissa.base.errors import MantissaError
from mantissa.tasks.generated import MAX_CHARACTERS, CountdownVerifier, ExpressionError, TextMatch, evaluate
from mantissa.tasks.types import Message, Problem, prompt_text, stable_id
from problems import everything, made

SEEDS = st.integers(0, 2**40)
KINDS: dict[str, dict[str, Any]] = {
    "running_sum": {"min_digits": 4, "max_digits": 9},
    "running_sum_aligned": {"min_digits": 4, "max_digits": 9, "aligned": True},
    "running_sum_mod_3": {"min_digits": 5, "max_digits": 5, "modulus": 3},
    "running_sum_long": {"min_digits": 300, "max_digits": 400},
    "addition": {"digits": 3},
    "chain": {"terms": 6},
}


@functools.cache
def of_kind(kind: str) -> Any:
    return made("running_sum" if kind.startswith("running_sum") else kind, **KINDS[kind])


def sums(train: int = 30, heldout: int = 20, warm_start: int = 25, seed: int = 0) -> Any:
    return made("running_sum", seed, sizes=(train, heldout, warm_start), min_digits=3, max_digits=4)


# splits


@settings(max_examples=25)
@given(
    seed=SEEDS, sizes=st.tuples(st.integers(1, 60), st.integers(0, 60), st.integers(0, 60)), numbers=st.integers(2, 3)
)
def test_splits_are_disjoint_and_distinct(seed: int, sizes: tuple[int, ...], numbers: int) -> None:
    # small spaces, where collisions are the rule
    for fields in ({"kind": "addition", "digits": 2}, {"kind": "countdown", "numbers": numbers, "max_number": 20}):
        problems = everything(made(**fields, seed=seed, sizes=sizes))  # type: ignore[arg-type]
        assert len(problems) == sum(sizes)
        assert len({p.prompt for p in problems}) == len({p.id for p in problems}) == len(problems)


def test_a_tiny_space_is_found_whole_and_one_too_small_is_an_error() -> None:
    task = made("addition", 3, digits=1, sizes=(70, 10, 20))
    assert {p.prompt for p in everything(task)} == {f"{a}+{b}=" for a in range(10) for b in range(10)}
    task = made("addition", 3, digits=1, sizes=(71, 10, 20))
    assert len(task.split("heldout")) == 10
    with pytest.raises(MantissaError, match="addition: 100 distinct prompts were found, but its splits ask for 101"):
        task.split("train")


def test_problems_depend_on_the_seed_and_little_on_the_sizes() -> None:
    one, other = sums(), sums()
    asked = {name: one.split(name) for name in ("train", "warm_start", "heldout")}
    assert asked == {name: other.split(name) for name in ("heldout", "train", "warm_start")}
    assert one.split("train") == one.split("train")
    assert sums(seed=1).split("train") != one.split("train")
    assert sums(train=90, warm_start=80).split("heldout") == one.split("heldout")
    assert sums(train=90).split("train", 30) == one.split("train")
    assert sums(train=90).split("warm_start") == one.split("warm_start")


# Of the id, prompt, answer and solution of every problem: the same in every process, whose hashes are randomised, and
# from one version to the next.
KNOWN = {
    "running_sum": "dd73021fdaff10ea",
    "addition": "41d86752bf576840",
    "chain": "203bc2a296799ea8",
    "countdown": "715de0a4f99513b8",
    "code": "aab54b6054a1f746",
}


@pytest.mark.parametrize("kind", KNOWN)
def test_problems_are_those_they_always_were(kind: str) -> None:
    told = [(p.id, p.prompt, p.answer, p.solution) for p in everything(made(kind, 7))]
    assert hashlib.sha256(repr(told).encode()).hexdigest()[:16] == KNOWN[kind]


def test_count_takes_a_prefix_and_refuses_more_than_there_is() -> None:
    task = sums()
    assert list(task.split("train", 7)) == list(task.split("train"))[:7]
    assert list(task.split("train", 0)) == []
    for count in (31, -1):
        with pytest.raises(MantissaError, match=f"asked for {count} problems of the train split, which holds 30"):
            task.split("train", count)
    with pytest.raises(ValueError, match="unknown split 'test'"):
        task.split("test")


def test_prompt_text_ignores_white_space_only_and_an_id_is_sha256() -> None:
    assert prompt_text(" a\n\tb ") == "a b"
    chat = (Message("system", "be  brief"), Message("user", "a\nb"))
    assert prompt_text(chat) == "system: be brief\nuser: a b"
    assert prompt_text((Message("user", "a b"),)) != prompt_text((Message("assistant", "a b"),))
    assert stable_id("t", "3141=") == "t-" + hashlib.new("sha256", b"3141=").hexdigest()[:16]
    assert stable_id("t", "\ud800").startswith("t-")  # a lone surrogate, as broken JSON brings them, is no crash


# arithmetic


@settings(max_examples=25)
@given(seed=SEEDS, low=st.integers(3, 60), more=st.integers(1, 60), modulus=st.integers(2, 10), aligned=st.booleans())
def test_running_sums_are_numpys_cumsum(seed: int, low: int, more: int, modulus: int, aligned: bool) -> None:
    fields = {"min_digits": low, "max_digits": low + more, "modulus": modulus, "aligned": aligned}
    for problem in everything(made("running_sum", seed, sizes=(5, 2, 3), **fields)):
        assert len(problem.prompt) == low + more + 1 or not aligned  # sums are equally far from their digits
        digits = np.array(list(problem.prompt.removesuffix("=").rstrip(".")), dtype=np.int64)
        assert problem.prompt[-1] == "="
        assert low <= len(digits) <= low + more
        want = "".join(map(str, np.cumsum(digits) % modulus))
        assert (problem.answer, problem.solution) == (want, want)


@settings(max_examples=25)
@given(seed=SEEDS, digits=st.integers(2, 40), terms=st.integers(4, 300))
def test_addition_and_chains_are_what_python_evaluates(seed: int, digits: int, terms: int) -> None:
    for problem in everything(made("addition", seed, digits=digits, sizes=(5, 2, 3))):
        left, right = problem.prompt.removesuffix("=").split("+")
        assert (len(left), len(right)) == (digits, digits)
        assert problem.answer == str(int(left) + int(right))
    for problem in everything(made("chain", seed, terms=terms, sizes=(5, 2, 3))):
        text = problem.prompt.removesuffix("=")
        assert text.count("+") + text.count("-") == terms - 1
        assert problem.answer == str(eval(text))


def test_every_length_and_digit_occurs_and_chains_are_negative_too() -> None:
    prompts = [
        p.prompt[:-1] for p in made("running_sum", 1, sizes=(400, 0, 0), min_digits=20, max_digits=23).split("train")
    ]
    assert min(np.bincount([len(prompt) for prompt in prompts])[20:24]) > 60  # 100 expected, 8.7 a standard deviation
    assert min(np.bincount([int(c) for prompt in prompts for c in prompt])) > 700  # 860 expected
    answers = [int(p.answer) for p in made("chain", sizes=(200, 0, 0), terms=8).split("train")]
    assert min(answers) < 0 < max(answers)


@pytest.mark.parametrize("kind", KINDS)
def test_every_solution_is_rewarded_and_stays_in_the_alphabet(kind: str) -> None:
    task = of_kind(kind)
    assert not task.verifier.isolated
    for problem in everything(task):
        assert isinstance(problem.prompt, str)
        reward = task.verifier(problem, f" {problem.solution}\n")
        assert (reward.value, reward.correct, reward.error) == (1.0, True, None)
    assert {c for p in everything(task) for c in f"{p.prompt}{p.solution}"} == set(task.alphabet)


@pytest.mark.parametrize(
    ("completion", "value"),
    [("3489", 1.0), ("348", 0.75), ("3480", 0.75), ("34890", 0.8), ("489", 0.0), ("", 0.0), ("3 489", 0.2),
     ("3389", 0.25)],
)  # fmt: skip
def test_prefix_reward_is_the_share_of_leading_characters(completion: str, value: float) -> None:
    reward = TextMatch("prefix")(Problem("p", "3141=", "3489", "s"), completion)
    assert (reward.value, reward.correct) == (value, value == 1.0)


@pytest.mark.parametrize(
    ("completion", "correct"),
    [("12", True), (" 12\n", True), ("6+6=12", True), ("6+6= 12 ", True), ("6+6=6+6", False), ("6+6=12.", False),
     ("6+6=1=12", True), ("12=6+6", False), ("6+6=", False), ("12 12", False), ("", False)],
)  # fmt: skip
def test_result_reward_judges_what_follows_the_last_equals_sign(completion: str, correct: bool) -> None:
    reward = TextMatch("result")(Problem("p", "6+6=", "12", "s"), completion)
    assert (reward.value, reward.correct) == (float(correct), correct)


@given(answer=st.text("0123", min_size=1, max_size=6), completion=st.text("0123", max_size=8))
def test_prefix_reward_against_a_naive_count(answer: str, completion: str) -> None:
    problem = Problem("p", "q", answer, "s")
    reward = TextMatch("prefix")(problem, completion)
    agreeing = max(n for n in range(len(answer) + 1) if completion[:n] == answer[:n] and len(completion) >= n)
    assert reward.value == agreeing / max(len(answer), len(completion))
    assert reward.correct == (completion == answer) == (reward.value == 1.0)
    assert TextMatch("exact")(problem, completion).value == float(completion == answer)


# countdown


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
    "text",
    [
        "", "3*7+x", "3*7+5; 1", "__import__('os')", "3*7+5.0", "3**3", "7//2", "-5+3", "+5", "5(3)", "(5,3)", "()",
        "05+3", "5/0", "5/(3-3)", "3 5", "3*7+5=26", "3\n+5", "٣+5", "(" * 100 + "5" + ")" * 99, "1+" * 100 + "1",
        "9" * 201, "(" * 100000,
    ],
)  # fmt: skip
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text)


def test_the_deepest_texts_that_fit_are_evaluated() -> None:
    assert evaluate("(" * 99 + "5" + ")" * 99)[0] == 5
    assert evaluate("1" + "+1" * 99)[0] == 100
    assert evaluate("9" * 99 + "*" + "9" * 100)[0] == int("9" * 99) * int("9" * 100)


@pytest.mark.parametrize(
    ("answer", "completion", "correct"),
    [
        ("3 5 7:26", "3*7+5", True), ("3 5 7:26", " 5 + 7*3 \n", True), ("3 5 7:26", "(7*3)+5", True),
        ("3 5 7:26", "5*5+1", False), ("3 5 7:26", "26", False),  # other numbers
        ("3 5 7:26", "3*7+5+5-5", False), ("3 5 7:21", "3*7", False),  # a number twice, a number left out
        ("3 3 7:16", "3*3+7", True), ("3 3 7:10", "3+7", False),  # given twice, used twice
        ("35 7:5", "35/7", True), ("3 5 7:5", "35/7", False),  # digits glued together
        ("3 8 3 8:24", "8/(3-8/3)", True),  # exact fractions: floats give 23.999999999999989
    ],
)  # fmt: skip
def test_rules_of_the_game(answer: str, completion: str, correct: bool) -> None:
    reward = CountdownVerifier()(problem(answer), completion)
    assert (reward.value, reward.correct, reward.error) == (float(correct), correct, None)


def test_only_the_tasks_operators_may_be_used() -> None:
    assert CountdownVerifier("+-")(problem("3 5 7:1"), "3+5-7").correct
    assert not CountdownVerifier("+-")(problem("3 5 7:26"), "3*7+5").correct


@pytest.mark.parametrize(
    ("numbers", "max_number", "max_target", "operations", "style"),
    [
        (2, 9, 99, "+-*/", "compact"), (4, 9, 30, "+-*/", "text"), (5, 25, 99, "+-", "compact"),
        (3, 50, 5000, "*+", "text"), (4, 12, 50, "/-", "compact"),
    ],
)  # fmt: skip
def test_solutions_verify(numbers: int, max_number: int, max_target: int, operations: str, style: str) -> None:
    fields = {"numbers": numbers, "max_number": max_number, "max_target": max_target, "operations": operations}
    task = made("countdown", 1, sizes=(60, 20, 20), style=style, **fields)
    for p in everything(task):
        assert isinstance(p.prompt, str)
        assert p.solution is not None
        assert task.verifier(p, p.solution).correct
        wrong = p.solution.replace("<answer>", "<answer>1+") if style == "text" else f"1+{p.solution}"
        assert not task.verifier(p, wrong).correct
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


def test_an_unreachable_setting_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mantissa.tasks.generated._PATIENCE", 500)
    task = made("countdown", sizes=(1, 0, 0), numbers=10, max_number=10_000, max_target=1, operations="*")
    with pytest.raises(MantissaError, match=r"gave no target in 1\.\.1; raise max_target or use fewer numbers"):
        task.split("train")
