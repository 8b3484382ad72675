"""The code verifier, and the generated task against Python's own evaluation of its solutions."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mantissa.base.errors import MantissaError
from mantissa.tasks import Grader, Problem, code
from mantissa.tasks.code import CodeVerifier, last_block, read_tests, same
from mantissa.tasks.sandbox.run import Isolation, Outcome, Sandbox
from problems import everything, made

SIZES = (40, 15, 20)
ANSWER = json.dumps({"function": "f", "tests": [[[1, 2], 3], [[5, 5], 10], [[0, 0], 0], [[-1, 4], 3]]})
PROBLEM = Problem("p", "q", ANSWER, "s")


@pytest.fixture(autouse=True, scope="module")
def _close() -> Iterator[None]:
    yield
    for limits in (CodeVerifier()._limits, CodeVerifier(time_limit_s=0.5)._limits):
        code._sandbox(limits).close()
    code._sandbox.cache_clear()
    code._probed.cache_clear()


GOOD = "def f(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    ("completion", "passed"),
    [
        (GOOD, 1.0),
        (f"First I thought\n```\ndef f(a, b): return 0\n```\nbut\n```python\n{GOOD}```\nis right.", 1.0),
        (f"```python\n{GOOD}", 0.0),  # never closed, and the fence is no Python
        ("def f(a, b):\n    return float(a + b)", 1.0),
        ("def f(a, b):\n    return a * b", 0.25),
        ("def f(a, b):\n    return abs(a) + abs(b)", 0.75),
        ("def f(a, b):\n    return str(a + b)", 0.0),
        ("def g(a, b):\n    return a + b", 0.0),
        ("import sys\nsys.exit(0)\n" + GOOD, 0.0),
        ("print('4 passed')\nimport os\nos._exit(0)", 0.0),
        ("class E(int):\n    def __eq__(s, o): return True\ndef f(a, b): return E(1)", 0.0),
        ("import os\nos.write(3, b'{\"value\": true}\\n' * 4)\nos._exit(0)", 0.0),
        (
            "import gc\ndef f(a, b):\n    return [o for o in gc.get_objects() if 'tests' in str(o)][0]",
            0.0,
        ),
        (f"{GOOD}g = f\ndef f(a, b):\n    if a < 0:\n        __import__('os')._exit(0)\n    return g(a, b)", 0.75),
        ("\ud800", 0.0),
        ("#" * 200_000 + "\n" + GOOD, 0.0),
        ("", 0.0),
    ],
)
def test_verdicts(completion: str, passed: float) -> None:
    reward = CodeVerifier()(PROBLEM, completion)
    assert reward.error is None
    assert reward.parts["passed"] == passed
    assert (reward.value, reward.correct) == (float(passed == 1), passed == 1)
    assert CodeVerifier(reward="fraction")(PROBLEM, completion).value == passed


def test_tests_in_a_file_and_our_own_generator_are_out_of_reach(tmp_path: Path) -> None:
    """A faked pass: find the tests, or make the problem again from its seed, and look the value up by the input."""
    (tmp_path / "tests.json").write_text(ANSWER)
    package = str(Path(code.__file__).parents[2])
    generated = made("code", 3, sizes=SIZES).split("train")[0]
    cheats = {
        f"""
import json, os
def f(*given):
    for folder, _, names in os.walk({str(tmp_path)!r}):
        for name in names:
            for arguments, value in json.load(open(os.path.join(folder, name)))["tests"]:
                if arguments == list(given): return value
""": PROBLEM,
        f"""
import sys
sys.path.append({package!r})
def f(*given):
    import json
    from mantissa.tasks import CodeConfig, build_task
    section = CodeConfig(kind="code", train_size=40, heldout_size=15, warm_start_size=20)
    for problem in build_task(section, 3).split("train"):
        for arguments, value in json.loads(problem.answer)["tests"]:
            if arguments == list(given): return value
""": replace(PROBLEM, answer=json.dumps(json.loads(generated.answer) | {"before": ""})),
    }
    for source, problem in cheats.items():
        reward = CodeVerifier(time_limit_s=5)(problem, source)
        assert (reward.value, reward.parts["passed"]) == (0.0, 0.0)


def test_a_program_that_hangs_is_wrong_and_no_verifier_error() -> None:
    verifier = CodeVerifier(time_limit_s=0.5)
    reward = verifier(PROBLEM, GOOD + "g = f\ndef f(a, b):\n    while a == 0: pass\n    return g(a, b)")
    assert (reward.value, reward.correct, reward.error) == (0.0, False, None)
    assert reward.parts == {"passed": 0.5, "ended": 0.0}  # the two before it


def test_in_grading_processes_with_a_hostile_program_between(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [GOOD, "while True: pass", GOOD, "import os\nwhile True: os.fork()", GOOD]
    verifier = pickle.loads(pickle.dumps(CodeVerifier(time_limit_s=1.0)))
    with Grader(verifier, timeout_s=20) as grader:
        grader.start()
        assert "; can " not in grader.notes[0]
        rewards = grader.grade([(PROBLEM, text) for text in said])
    assert [r.value for r in rewards] == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert [r.error for r in rewards] == [None] * 5


def test_a_machine_without_isolation_is_refused_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    open_one = Isolation(("write files",), ("look into other processes", "use a terminal"), ("resource limits",))
    monkeypatch.setattr(code, "_probed", lambda limits: open_one)
    with pytest.raises(
        MantissaError,
        match=r"can look into other processes, use a terminal here \(resource limits\).*isolation: limits",
    ):
        CodeVerifier().prepare()
    lax = CodeVerifier(isolation="limits")
    lax.prepare()
    assert "cannot write files; can look into other processes, use a terminal" in lax.notes()[0]


def test_a_lost_sandbox_is_a_verifier_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sandbox, "run", lambda *_: Outcome("sandbox lost", ()))
    with pytest.raises(RuntimeError, match="sandbox died"):
        CodeVerifier()(PROBLEM, GOOD)


@pytest.mark.parametrize(
    "answer",
    [
        "{", "[]", '{"function": "f"}', '{"function": "f", "tests": []}', '{"function": "f", "tests": [[1, 2]]}',
        '{"function": "f", "tests": [[[1], 2]], "test": 1}',
    ],
)  # fmt: skip
def test_an_answer_without_tests_is_an_error_not_a_pass(answer: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting|an object with|every program would pass|a test is a list"):
        read_tests(answer)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-3, 3) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)


def strict(value: Any) -> Any:
    """A value whose plain equality is the one wanted: bools marked, so that they are no numbers."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, list):
        return [strict(v) for v in value]
    return {k: strict(v) for k, v in value.items()} if isinstance(value, dict) else value


@given(a=values, b=values)
def test_equality_tells_true_from_one_at_any_depth(a: Any, b: Any) -> None:
    assert same(a, b) == (strict(a) == strict(b))
    assert same(a, json.loads(json.dumps(a)))


def test_the_last_closed_block_counts() -> None:
    assert last_block("x") == "x"
    assert last_block("```py\na\n```\n```\nb\n```") == "\nb\n"
    assert last_block("```py\na\n```\n```\nb") == "\na\n"
    assert last_block("use `` ` `` and ```inline``` here") == "use `` ` `` and ```inline``` here"


@pytest.mark.parametrize(("variables", "product"), [(1, False), (2, True), (3, False), (3, True)])
def test_solutions_have_the_values_that_prompts_show_and_tests_want(variables: int, product: bool) -> None:
    task = made("code", 3, sizes=(20, 5, 10), variables=variables, product=product)
    assert len({problem.solution for problem in everything(task)}) == 35  # no function of one split is in another
    for problem in task.split("train"):
        function, tests, before = read_tests(problem.answer)
        namespace: dict[str, Any] = {}
        exec(f"{before}{problem.solution}", namespace)
        assert all(namespace[function](*arguments) == value for arguments, value in tests)
        shown = [int(n) for n in str(problem.prompt).rstrip(":").split()]
        assert [value for _, value in tests][: len(shown)] == shown
        assert len(tests) == len(shown) + 4
        assert set(str(problem.prompt)) | set(problem.solution or "") <= set(task.alphabet or "")
    assert len({len(str(p.prompt)) for p in task.split("train")}) == 1  # every number at a place of its own


def test_examples_fix_the_function_so_that_another_is_wrong() -> None:
    task = made("code", sizes=SIZES)
    problems = task.split("train", 5)
    for problem in problems:
        assert task.verifier(problem, problem.solution or "").correct
        for other in problems:
            if other is not problem:
                assert not task.verifier(problem, other.solution or "").correct
    shown = "".join(f"{v} if (x,y,z)==({x},{y},{z}) else " for (x, y, z), v in read_tests(problems[0].answer)[1][:4])
    assert task.verifier(problems[0], f"{shown}0").parts["passed"] == 0.5  # the examples by heart, no further point
    assert task.verifier(problems[0], f"({problems[0].solution})*2/2").correct  # any expression with these values


def test_the_text_style_asks_for_a_block_and_grades_it() -> None:
    task = made("code", style="text", variables=2, product=True, sizes=(3, 0, 0), reward="fraction")
    assert task.alphabet is None
    problem = task.split("train")[0]
    shown = re.findall(r"f\((\d), (\d)\) == (\d+)", str(problem.prompt))
    assert [(a, b) for a, b, _ in shown] == [("0", "0"), ("1", "0"), ("0", "1"), ("1", "1")]
    assert task.verifier(problem, f"So:\n{problem.solution}").value == 1.0
    wrong = task.verifier(problem, f"```\ndef f(x, y):\n    return {shown[0][2]} if x + y == 0 else -1\n```")
    assert 0 < wrong.value < 1
    assert not wrong.correct
