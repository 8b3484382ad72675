"""Generated arithmetic against numpy and Python's own evaluation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantissa.tasks.generated import Addition, Chain, GeneratedTask, RunningSum, TextMatch
from mantissa.tasks.types import Problem

SIZES = {"train": 60, "heldout": 20, "warm_start": 40}
Builder = Callable[[int], GeneratedTask]
BUILDERS: dict[str, Builder] = {
    "running_sum": lambda seed: RunningSum(SIZES, seed, 4, 9),
    "running_sum_aligned": lambda seed: RunningSum(SIZES, seed, 4, 9, aligned=True),
    "running_sum_mod_3": lambda seed: RunningSum(SIZES, seed, 5, 5, modulus=3),
    "running_sum_long": lambda seed: RunningSum(SIZES, seed, 300, 400),
    "addition": lambda seed: Addition(SIZES, seed, 3),
    "chain": lambda seed: Chain(SIZES, seed, 6),
}


def everything(task: GeneratedTask) -> list[Problem]:
    return [p for name in ("train", "heldout", "warm_start") for p in task.split(name)]


@settings(max_examples=25)
@given(seed=st.integers(0, 2**40), low=st.integers(3, 60), more=st.integers(0, 60), modulus=st.integers(2, 10))
def test_running_sums_are_numpys_cumsum(seed: int, low: int, more: int, modulus: int) -> None:
    task = RunningSum({"train": 5, "heldout": 2, "warm_start": 3}, seed, low, low + more, modulus)
    for problem in everything(task):
        digits = np.array(list(problem.prompt[:-1]), dtype=np.int64)
        assert problem.prompt[-1] == "="
        assert low <= len(digits) <= low + more
        want = "".join(map(str, np.cumsum(digits) % modulus))
        assert (problem.answer, problem.solution) == (want, want)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**40), digits=st.integers(2, 40))
def test_addition_of_exactly_that_many_digits(seed: int, digits: int) -> None:
    for problem in everything(Addition({"train": 5, "heldout": 2, "warm_start": 3}, seed, digits)):
        left, right = problem.prompt.removesuffix("=").split("+")
        assert (len(left), len(right)) == (digits, digits)
        assert problem.answer == str(int(left) + int(right))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**40), terms=st.integers(4, 300))
def test_chains_are_what_python_evaluates(seed: int, terms: int) -> None:
    for problem in everything(Chain({"train": 5, "heldout": 2, "warm_start": 3}, seed, terms)):
        text = problem.prompt.removesuffix("=")
        assert text.count("+") + text.count("-") == terms - 1
        assert problem.answer == str(eval(text))


def test_chain_results_are_negative_too() -> None:
    answers = [int(p.answer) for p in Chain({"train": 200, "heldout": 0, "warm_start": 0}, 0, 8).split("train")]
    assert min(answers) < 0 < max(answers)


def test_lengths_and_digits_are_uniform() -> None:
    # 3000 draws over 4 lengths and 10 digits: bounds are five standard deviations of the binomial.
    task = RunningSum({"train": 3000, "heldout": 0, "warm_start": 0}, 1, 20, 23)
    lengths = np.bincount([len(p.prompt) - 1 for p in task.split("train")])[20:]
    assert np.all(np.abs(lengths - 750) < 5 * np.sqrt(3000 * 0.25 * 0.75))
    digits = np.bincount([int(c) for p in task.split("train") for c in p.prompt[:-1]])
    assert np.all(np.abs(digits - digits.sum() / 10) < 5 * np.sqrt(digits.sum() * 0.1 * 0.9))


@pytest.mark.parametrize("kind", BUILDERS)
def test_every_solution_is_rewarded_and_stays_in_the_alphabet(kind: str) -> None:
    task = BUILDERS[kind](0)
    assert not task.isolated
    for problem in everything(task):
        assert isinstance(problem.prompt, str)
        assert task.alphabet is not None
        assert set(problem.prompt) | set(problem.solution or "?") <= set(task.alphabet)
        reward = task.verify(problem, f" {problem.solution}\n")
        assert (reward.value, reward.correct, reward.error) == (1.0, True, None)
    assert {c for p in everything(task) for c in f"{p.prompt}{p.solution}"} == set(task.alphabet or "")


@settings(max_examples=150)
@given(data=st.data(), kind=st.sampled_from(sorted(set(BUILDERS) - {"running_sum_long"})), edit=st.sampled_from("rid"))
def test_any_edit_of_the_solution_is_wrong(data: st.DataObject, kind: str, edit: str) -> None:
    task = BUILDERS[kind](0)
    problem = data.draw(st.sampled_from(task.split("heldout")))
    right = problem.solution or ""
    at = data.draw(st.integers(0, len(right) - 1))
    character = data.draw(st.sampled_from([c for c in "0123456789-" if c != right[at]]))
    end = at + (edit != "i")
    wrong = right[:at] + ("" if edit == "d" else character) + right[end:]
    reward = task.verify(problem, wrong)
    assert (reward.value, reward.correct) == (0.0, False)


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("3489", 1.0),
        ("348", 0.75),
        ("3480", 0.75),
        ("34890", 0.8),
        ("489", 0.0),
        ("", 0.0),
        ("3 489", 0.2),
        ("3389", 0.25),
    ],
)
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


def test_the_builders_pass_the_reward_kind_on() -> None:
    for build in (
        partial(RunningSum, min_digits=4, max_digits=4),
        partial(Addition, digits=3),
        partial(Chain, terms=4),
    ):
        problem = build(SIZES, 0, reward="prefix").split("train")[0]
        half = build(SIZES, 0, reward="prefix").verify(problem, f"{problem.answer}0")
        assert 0 < half.value < 1
        assert build(SIZES, 0).verify(problem, f"{problem.answer}0").value == 0


def test_aligned_sums_stand_at_one_distance_from_their_digits() -> None:
    task = RunningSum({"train": 200, "heldout": 0, "warm_start": 0}, 3, 2, 9, aligned=True)
    for problem in task.split("train"):
        digits, equals, padding = problem.prompt.rstrip("=").rstrip("."), problem.prompt[-1], problem.prompt[:-1]
        assert (len(padding), equals) == (9, "=")
        assert len(problem.answer) == len(digits)
        assert [int(c) for c in problem.answer] == (np.cumsum([int(c) for c in digits]) % 10).tolist()
    assert {len(problem.answer) for problem in task.split("train")} == set(range(2, 10))
