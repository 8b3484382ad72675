"""A recipe's reward functions, from the file to the metrics; and the code task in a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mantissa.errors import MantissaError
from mantissa.rl import load_recipe, make_config, start
from mantissa.rl.assemble import Parts
from mantissa.rl.config import RunConfig
from mantissa.runs.directory import RunDirectory

FUNCTIONS = """
from mantissa.tasks import batched

def brevity(problem, completion):
    if completion.endswith("7"):
        raise RuntimeError("sevens")
    return {"reward": 1 / (1 + len(completion)), "characters": len(completion)}

@batched
def even(problems, completions):
    return [len(text) % 2 == 0 for text in completions]
"""
TERMS = [
    {"verifier": "task"},
    {"function": "run_rewards:brevity", "weight": 0.5},
    {"function": "run_rewards:even", "weight": -0.25, "name": "parity"},
]


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("functions")
def test_every_logged_reward_is_the_weighted_sum_of_its_completion(small: dict[str, Any], tmp_path: Path) -> None:
    task = small["task"] | {"reward": TERMS}
    start(make_config(small | {"task": task, "steps": 2, "run_dir": str(tmp_path / "run"), "warm_start": None}, "test"))
    run = RunDirectory.open(tmp_path / "run")
    errors = 0
    for metrics in run.read_metrics():
        rows = run.read_rollouts(metrics["step"])
        good = [row for row in rows if not row["completion"].endswith("7")]
        for row in rows:
            if row not in good:
                assert row["reward"] == 0
                assert "brevity: RuntimeError: sevens" in row["error"]
                continue
            text = row["completion"]
            right = text.strip() == row["answer"]
            assert row["reward"] == pytest.approx(right + 0.5 / (1 + len(text)) - 0.25 * (len(text) % 2 == 0))
            assert row["correct"] == right
        errors += len(rows) - len(good)
        assert metrics["reward/verifier_errors"] == len(rows) - len(good)
        assert metrics["reward_part/brevity/characters"] == pytest.approx(
            sum(len(row["completion"]) for row in good) / len(good)
        )
        assert metrics["reward_part/parity"] == sum(len(row["completion"]) % 2 == 0 for row in good) / len(good)
    assert errors > 0  # or half of this test held nothing
    again = load_recipe(tmp_path / "run" / "config.yaml")
    assert again.task.reward[2].label == "parity"  # type: ignore[union-attr, index]


@pytest.mark.usefixtures("functions")
def test_a_function_that_is_not_there_leaves_no_folder(small: dict[str, Any], tmp_path: Path) -> None:
    for function, message in (("run_rewards:brevty", "did you mean 'brevity'"), ("absent:f", "cannot import absent")):
        task = small["task"] | {"reward": [{"function": function}]}
        with pytest.raises(MantissaError, match=message):
            start(make_config(small | {"task": task, "run_dir": str(tmp_path / "run")}, "test"))
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            [{"functio": "a:b"}],
            r"unknown key 'task.reward.0.functio'; did you mean 'function'\? \(known here: function,",
        ),
        ([{"function": "a.b"}], "task.reward.0.function: expected package.module:function, .* got 'a.b'"),
        ("exat", "task.reward: input should be 'exact', 'prefix' or 'result', got 'exat'"),
        ([{"verifier": "task", "weight": "x"}], "task.reward.0.weight: expected a number, without quotes, got 'x'"),
    ],
)
def test_mistakes_name_the_key(small: dict[str, Any], reward: Any, message: str) -> None:
    with pytest.raises(MantissaError, match=message):
        make_config(small | {"task": small["task"] | {"reward": reward}}, "test")


CODE = {"kind": "code", "variables": 1, "train_size": 60, "heldout_size": 8, "warm_start_size": 20, "product": False}


def test_a_program_may_not_have_longer_than_its_grader(small: dict[str, Any]) -> None:
    with pytest.raises(MantissaError, match=r"task.time_limit_s=2 is not below grading.timeout_s=2"):
        make_config(small | {"task": CODE, "grading": {"timeout_s": 2.0}}, "test")


def test_the_code_task_runs_and_the_run_records_its_isolation(small: dict[str, Any], tmp_path: Path) -> None:
    start(make_config(small | {"task": CODE, "steps": 1, "run_dir": str(tmp_path / "run")}, "test"))
    run = RunDirectory.open(tmp_path / "run")
    (metrics,) = run.read_metrics()
    assert metrics["reward/verifier_errors"] == 0
    assert metrics["reward_part/passed"] >= metrics["reward/accuracy"]
    (note,) = json.loads((tmp_path / "run" / "environment.json").read_text())["grading"]
    assert note.startswith("code sandbox: programs cannot read files, write files, reach the network")


def test_a_character_policy_can_write_prompts_and_solutions(
    configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts]
) -> None:
    parts = parts_of(configure("task={kind: code, train_size: 20, heldout_size: 5, warm_start_size: 30}"))
    problems = parts.task.split("warm_start")
    for problem in problems:
        assert parts.tokenizer.decode(parts.tokenizer.encode(problem.solution or "")) == problem.solution
        assert parts.sampler.encode(problem)
    rewards = parts.sampler.grader.grade([(problem, problem.solution or "") for problem in problems])
    assert all(reward.correct for reward in rewards)
