"""Rewards of one's own: sums against sums by hand and who decides; functions, what they may return, how they fail."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mantissa.base.errors import MantissaError
from mantissa.tasks import Grader, Problem, Reward, Verifier
from mantissa.tasks.functions import FunctionVerifier
from mantissa.tasks.rewards import Dapo, Exact, Term, TermError, WeightedSum, weighted
from mantissa.tasks.types import RewardTerm

HERE = Path(__file__).parent
PROBLEM = Problem("p", "q", "4", "s")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


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


@pytest.mark.parametrize(
    ("terms", "verdicts"),
    [
        ([{"function": "a:f"}], False),
        ([{"function": "a:f", "correct_at": 0.5}], True),
        ([{"function": "a:f", "decides": True}], True),
        ([{"function": "a:f"}, {"verifier": "exact"}], True),
        ([{"function": "a:f"}, {"verifier": "exact", "decides": True}], True),
    ],
)
def test_a_functions_correctness_is_a_verdict_where_the_recipe_says_so(
    terms: list[dict[str, object]], verdicts: bool
) -> None:
    assert weighted([RewardTerm(**term) for term in terms], Exact()).decides is verdicts  # type: ignore[arg-type]


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


def test_verifier_and_functions_together_in_processes(tmp_path: Path) -> None:
    terms = [
        RewardTerm(verifier="task"),
        RewardTerm(function="hostile_verifiers:length", weight=-0.1),
        RewardTerm(function="hostile_verifiers:lengths", weight=0.01, batch_size=4),
    ]
    problem = Problem("p", "q", str(tmp_path / "4"), "s")
    said = [problem.answer, "x", "die", "yyyy", "raise", "zz"]
    with Grader(weighted(terms, Dapo())) as grader:
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


# functions


def obedient(name: str, **options: object) -> Grader:
    timeout_s = options.pop("timeout_s", 20.0)
    return Grader(FunctionVerifier(f"hostile_verifiers:{name}", **options), timeout_s=timeout_s, workers=2)  # type: ignore[arg-type]


def test_what_a_function_may_return_and_what_becomes_of_the_rest() -> None:
    returns = {
        "true": (1.0, True, {}),
        "dict": (0.25, True, {"words": 3.0}),
        "dict-float": (1.0, True, {}),
        "sleep 0": (1 / 8, False, {}),
    }
    errors = {
        "none": "TypeError: hostile_verifiers:obey returned NoneType None: expected a number, a bool or a dict",
        "text": "TypeError: hostile_verifiers:obey returned str '1.0'",
        "list": "TypeError: hostile_verifiers:obey returned list [1.0]",
        "inf": "ValueError: hostile_verifiers:obey returned inf: expected a finite number",
        "nan": "ValueError: hostile_verifiers:obey returned nan",
        "dict-empty": "ValueError: hostile_verifiers:obey returned a dict without 'reward': it has nothing",
        "dict-text": "TypeError: hostile_verifiers:obey returned str 'because'",
        "dict-correct": "TypeError: hostile_verifiers:obey: 'correct' is int 1: expected a bool",
        "raise": "KeyError: ",
        "leave": "SystemExit: 7",
    }
    said = [text for error in errors for text in (*returns, error)]
    with obedient("obey", timeout_s=2.0) as guarded:
        rewards = dict(zip(said, guarded.grade([(PROBLEM, text) for text in said]), strict=True))
    for text, (value, correct, parts) in returns.items():
        assert (rewards[text].value, rewards[text].correct, rewards[text].parts) == (value, correct, parts)
        assert rewards[text].error is None
    for text, start in errors.items():
        assert (rewards[text].value, rewards[text].correct) == (0.0, False)
        assert (rewards[text].error or "").startswith(start), rewards[text]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), (0.5, False)), (np.int64(2), (2.0, True)), (np.bool_(True), (1.0, True)),
        (np.array([0.25]), (0.25, False)), (torch.tensor(1.5), (1.5, True)), (torch.tensor(False), (0.0, False)),
        (-3, (-3.0, False)),
    ],
)  # fmt: skip
def test_scalars_of_libraries_are_numbers(value: object, expected: tuple[float, bool]) -> None:
    assert FunctionVerifier("m:f")._number(value) == expected


@pytest.mark.parametrize("value", [np.array([1.0, 2.0]), torch.ones(2), 1j, b"1", {1.0}, object()])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        FunctionVerifier("m:f")._number(value)


def test_correct_at_moves_the_threshold_only() -> None:
    with obedient("length", correct_at=0.3) as guarded:
        rewards = guarded.grade([(PROBLEM, "ab"), (PROBLEM, "abc")])
    assert [(r.value, r.correct) for r in rewards] == [(0.2, False), (0.3, True)]


def test_batches_are_cut_at_fixed_places_and_a_bad_sample_pays_alone(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    problem = Problem("p", "", str(log), "s")
    with obedient("lengths", batch_size=8, timeout_s=1.5) as guarded:
        rewards = guarded.grade([(problem, "x" * n) for n in range(20)])
        assert [r.value for r in rewards] == list(map(float, range(20)))
        assert sorted(map(int, log.read_text().split())) == [4, 8, 8]
        for bad, error in (
            ("raise", "KeyError"),
            ("die", "the verifier's process died (exit code 3)"),
            ("hang", "the verifier took longer than 1.5 s"),
        ):
            said = ["a", "bb", bad, "cccc", *["d"] * 10]
            rewards = guarded.grade([(problem, text) for text in said])
            assert (rewards[2].value, rewards[2].correct) == (0.0, False)
            assert (rewards[2].error or "").startswith(error)
            others = [r for i, r in enumerate(rewards) if i != 2]
            assert [r.value for r in others] == [float(len(t)) for i, t in enumerate(said) if i != 2]
            assert not any(r.error for r in others)


def test_a_batched_function_that_returns_too_few_is_an_error_not_a_shift() -> None:
    with obedient("too_few") as guarded:
        rewards = guarded.grade([(PROBLEM, "a"), (PROBLEM, "b")])
    assert [r.value for r in rewards] == [1.0, 1.0]  # one by one, one reward is the right number
    with pytest.raises(ValueError, match="returned 1 rewards for 2 samples"):
        FunctionVerifier("hostile_verifiers:too_few").grade([(PROBLEM, "a"), (PROBLEM, "b")])


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no_such_module:f", r"cannot import no_such_module \(ModuleNotFoundError"),
        ("broken_rewards:f", r"cannot import broken_rewards \(ZeroDivisionError: division by zero\)"),
        ("hostile_verifiers:lenght", "has no 'lenght'; did you mean 'length'"),
        ("hostile_verifiers:not_a_function", "has a int, not a function, at 'not_a_function'"),
    ],
)
def test_what_cannot_be_loaded_is_the_users_mistake(
    reference: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with Grader(FunctionVerifier(reference)) as guarded, pytest.raises(MantissaError, match=message):
        guarded.start()


def test_batch_size_of_a_function_that_is_not_batched_is_refused() -> None:
    with obedient("length", batch_size=4) as guarded, pytest.raises(MantissaError, match="batch_size does nothing"):
        guarded.start()


def test_the_current_folder_comes_first_and_this_process_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder_rewards.py").write_text("import os\ndef pid(problem, completion):\n    return os.getpid()\n")
    monkeypatch.chdir(tmp_path)
    with Grader(FunctionVerifier("folder_rewards:pid")) as guarded:
        guarded.start()
        (reward,) = guarded.grade([(PROBLEM, "")])
    assert reward.error is None
    assert reward.value > 1
    assert reward.value != os.getpid()
    assert "folder_rewards" not in sys.modules


def test_memory_of_the_grading_process_can_be_set() -> None:
    task = FunctionVerifier("hostile_verifiers:obey")
    with Grader(task, memory_gib=0.5) as guarded:
        # 16 GiB never fit; that 0.5 is what counts shows in the limit that the process has
        guarded.start()
        assert guarded._pool is not None
        (worker,) = guarded._pool._workers
        limits = Path(f"/proc/{worker._process.pid}/limits").read_text()
    assert [line for line in limits.splitlines() if "address space" in line and str(2**29) in line]
