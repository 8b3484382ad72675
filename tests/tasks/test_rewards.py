"""Weighted sums against sums written out by hand; who decides; what a failing term costs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mantissa.tasks import Grader, Problem, Reward, SplitName, Task, Verifier
from mantissa.tasks.config import RewardTerm
from mantissa.tasks.rewards import Dapo, Exact, Term, TermError, WeightedSum, weighted

PROBLEM = Problem("p", "q", "4", "s")


class Fixed(Verifier):
    """Gives what it was told, and takes several at once."""

    low, high = -5.0, 5.0

    def __init__(self, value: float, correct: bool, chunk: int = 1) -> None:
        self.value, self.said, self.size = value, correct, chunk

    @property
    def chunk(self) -> int:
        return self.size

    def __call__(self, problem: Problem, completion: str) -> Reward:
        return Reward(self.value, self.said, parts={"extra": 7.0})


class Bare(Task):
    name = "bare"

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier

    def _problems(self, name: SplitName) -> tuple[Problem, ...]:
        return ()


@given(
    terms=st.lists(st.tuples(st.floats(-4, 4), st.floats(-5, 5), st.booleans(), st.booleans()), min_size=1, max_size=5)
)
def test_the_sum_and_the_verdict(terms: list[tuple[float, float, bool, bool]]) -> None:
    verifier = WeightedSum(
        tuple(
            Term(f"t{i}", Fixed(value, said), weight, decides) for i, (weight, value, said, decides) in enumerate(terms)
        )
    )
    reward = verifier(PROBLEM, "x")
    assert reward.value == pytest.approx(sum(weight * value for weight, value, _, _ in terms), abs=1e-12)
    assert reward.correct == all(said for _, _, said, decides in terms if decides)
    assert {reward.parts[f"t{i}"] for i in range(len(terms))} == {value for _, value, _, _ in terms}
    assert reward.parts["t0/extra"] == 7.0


@pytest.mark.parametrize(
    ("terms", "deciding"),
    [
        ([{"function": "a:f"}, {"verifier": "exact"}, {"verifier": "dapo"}], {"exact"}),
        ([{"function": "a:f"}, {"function": "a:g"}], {"f"}),
        ([{"function": "a:f", "decides": True}, {"verifier": "exact"}], {"f"}),
        ([{"verifier": "exact", "decides": True}, {"verifier": "dapo", "decides": True}], {"exact", "dapo"}),
        ([{"function": "a:f"}, {"verifier": "task"}], {"task"}),
    ],
)
def test_who_decides(terms: list[dict[str, object]], deciding: set[str]) -> None:
    verifier = weighted([RewardTerm.model_validate(term) for term in terms], Exact())
    assert isinstance(verifier, WeightedSum)
    assert {term.name for term in verifier.terms if term.decides} == deciding


def test_failure_is_the_weighted_sum_of_the_terms_failures() -> None:
    function = weighted([RewardTerm(function="a:f", weight=3), RewardTerm(function="a:g", weight=-1)], Exact())
    assert function.failure == 0.0
    mixed = weighted([RewardTerm(verifier="dapo", weight=0.5), RewardTerm(function="a:g")], Exact())
    assert mixed.failure == -0.5


def test_a_bad_term_is_named_and_out_of_bounds_is_bad() -> None:
    verifier = WeightedSum((Term("good", Exact()), Term("bad", Fixed(6.0, True))))
    with pytest.raises(TermError, match=r"bad: ValueError: reward 6.0 lies outside \[-5.0, 5.0\]"):
        verifier(PROBLEM, "4")


def test_the_chunk_is_the_smallest_of_the_batched_terms() -> None:
    def chunk(*sizes: int) -> int:
        return WeightedSum(tuple(Term(str(i), Fixed(0, True, size)) for i, size in enumerate(sizes))).chunk

    assert [chunk(1, 1), chunk(1, 16), chunk(32, 1, 8)] == [1, 16, 8]


def test_verifier_and_functions_together_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    terms = [
        RewardTerm(verifier="task"),
        RewardTerm(function="hostile_verifiers:length", weight=-0.1),
        RewardTerm(function="hostile_verifiers:lengths", weight=0.01, batch_size=4),
    ]
    problem = Problem("p", "q", str(tmp_path / "4"), "s")
    said = [problem.answer, "x", "die", "yyyy", "raise", "zz"]
    with Grader(Bare(weighted(terms, Dapo()))) as grader:
        grader.start()
        rewards = grader.grade([(problem, f"Answer: {problem.answer}" if s == said[0] else s) for s in said])
    for text, reward in zip(said, rewards, strict=True):
        if text in ("die", "raise"):
            assert (reward.value, reward.correct, reward.parts) == (-1.0, False, {})
            assert reward.error
            continue
        right, length = text == said[0], len(text) + 8 * (text == said[0])
        assert reward.value == pytest.approx((1 if right else -1) - 0.1 * length / 10 + 0.01 * length)
        assert reward.correct == right
        assert reward.parts == {"task": 1.0 if right else -1.0, "length": length / 10, "lengths": float(length)}
    assert (rewards[4].error or "").startswith("TermError: lengths: KeyError")
