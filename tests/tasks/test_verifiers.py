"""Verdicts by table, and the real math sets held against themselves."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from mantissa.errors import MantissaError
from mantissa.tasks import Grader, Problem, SplitName, Task, Verifier, read_problems, verifier_named
from mantissa.tasks.rewards import VERIFIERS, Dapo, Exact, MathVerify, math_equal


def problem(answer: str) -> Problem:
    return Problem("p", "q", answer, "s")


@dataclass
class Bare(Task):
    verifier: Verifier
    name: str = "bare"

    def _problems(self, name: SplitName) -> Sequence[Problem]:
        return ()


@pytest.mark.parametrize("name", sorted(VERIFIERS.keys() - {"code"}))
def test_142_0_is_142_under_every_verifier(name: str) -> None:
    verifier = verifier_named(name)
    wrap = {
        "exact": "{}",
        "math_verify": "thus \\boxed{{{}}}.",
        "dapo": "so\nAnswer: {}",
        "dapo_strict": "\\boxed{{{}}}",
    }[name]
    for answer, said, correct in (
        ("142.0", "142", True),
        ("142", "142.0", True),
        ("025", "25", True),
        ("142.0", "143", False),
        ("142.5", "142", False),
        ("-4.0", "4", False),
    ):
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
    with Grader(Bare(MathVerify()), timeout_s=2.5, workers=2) as grader:
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
def test_real_ground_truths_verify_against_themselves(shared_data: Path, name: str) -> None:
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


@pytest.mark.shared_data
@pytest.mark.parametrize("name", REAL_SETS)
def test_real_answers_of_other_problems_are_wrong(shared_data: Path, name: str) -> None:
    problems, _ = read_problems([shared_data / f"{name}.parquet"])
    dapo = Dapo(strict=True)
    for p, neighbour in pairwise(problems[:300]):
        said = f"\\boxed{{{neighbour.answer}}}"
        verdict = MathVerify()(p, said).correct
        if p.answer == neighbour.answer:
            assert verdict
        elif re.fullmatch(r"-?\d+", p.answer) and re.fullmatch(r"-?\d+", neighbour.answer):
            assert verdict == (int(p.answer) == int(neighbour.answer))
            assert dapo(p, said).correct == verdict


@pytest.mark.shared_data
@pytest.mark.parametrize("name", REAL_SETS)
def test_real_answers_under_the_dapo_rule(shared_data: Path, name: str) -> None:
    problems, _ = read_problems([shared_data / f"{name}.parquet"])
    for p in problems:
        assert Dapo()(p, f"steps\nAnswer: ${p.answer}$").correct
        assert Dapo(strict=True)(p, f"\\boxed{{{p.answer}}}").correct == (len(p.answer) <= 92), p
