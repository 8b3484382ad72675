"""Tasks in runs: files from jsonl and parquet to the report, a recipe's own reward functions, and programs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mantissa.base.errors import MantissaError
from mantissa.model import byte_tokenizer, save_model
from mantissa.rl import load_recipe, make_config, start
from mantissa.rl.assemble import Parts
from mantissa.rl.config.run import RunConfig
from mantissa.runs.directory import RunDirectory

Train = Callable[..., RunDirectory]
TWO_STEPS = (
    "steps=2",
    "warm_start=null",
    "rollout={prompts: 3, samples: 2, max_tokens: 8, slots: 8}",
    "evaluation={every: 2, problems: 2, samples: 1}",
)
BYTES = ("model.tokenizer=bytes", "model.fresh.max_positions=4096")


@pytest.mark.usefixtures("with_report")
def test_a_plain_file_with_math_verify(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(30)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = f"{{kind: dataset, files: {tmp_path / 'sums.jsonl'}, verifier: math_verify, heldout_fraction: 0.2}}"
    run = train(f"task={task}", *TWO_STEPS, *BYTES)
    screen = " ".join(capsys.readouterr().out.split())
    assert "sums.jsonl: 30 rows, 30 problems, 0 duplicates" in screen
    rows = run.metrics.read()
    assert rows[0]["reward/no_answer_fraction"] == 1
    assert "no completion of the first step has an answer" in screen
    assert run.environment["verdicts"] is True
    assert [row["reward/accuracy"] for row in rows] == [0, 0]  # a policy of random bytes
    assert [row["reward/verifier_errors"] for row in rows] == [0, 0]
    assert rows[-1]["optim/updates"] == 0
    assert rows[-1]["eval/greedy_accuracy"] == 0
    assert "No completion was correct, on any step" in run.report_path.read_text()
    rollout = run.read_rollouts(1)[0]
    number = re.search(r"What is (\d+) \+", rollout["prompt"])
    assert number is not None
    assert rollout["answer"] == str(2 * int(number[1]))


def test_problems_that_are_too_long_are_left_out_where_the_recipe_says_so(
    configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts], tmp_path: Path
) -> None:
    rows = [{"problem": f"{n}? {'word ' * (1000 if n in (2, 5) else 1)}", "answer": "1"} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    of = f"kind: dataset, files: {tmp_path / 'rows.jsonl'}, heldout_fraction: 0"
    common = ("warm_start=null", "evaluation=null", *BYTES)
    with pytest.raises(MantissaError, match=r"problem .* positions; .* of a dataset set task\.on_long_prompt=skip"):
        parts_of(configure(f"task={{{of}}}", *common))
    task = parts_of(configure(f"task={{{of}, on_long_prompt: skip}}", *common)).task
    assert len(task.split("train")) == 7
    assert task.notes[-1].endswith("too long: 2 of 9 training problems, 0 of 0 held out")
    with pytest.raises(MantissaError, match="all 9 training prompts are too long"):
        parts_of(configure(f"task={{{of}, on_long_prompt: skip}}", *common, "rollout.max_tokens=4096"))


def test_the_dapo_schema_needs_a_chat_template_and_then_runs(
    train: Train, configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts], tmp_path: Path
) -> None:
    path = tmp_path / "dapo.parquet"
    rows = [
        {
            "data_source": "made_up",
            "prompt": [{"role": "user", "content": f"What is {n} squared? End with Answer: and the number."}],
            "reward_model": {"ground_truth": str(n * n), "style": "rule"},
        }
        for n in range(30)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    task = f"task={{kind: dataset, files: {path}, verifier: dapo, heldout_fraction: 0.2}}"
    with pytest.raises(MantissaError, match=r"problem made_up-\w+: tokenizer: .* no chat template"):
        train(task, *TWO_STEPS, *BYTES)
    assert not list(tmp_path.glob("run-*"))
    tokenizer = byte_tokenizer()
    tokenizer.backend.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    model = parts_of(configure(*BYTES)).model
    save_model(model, tokenizer, tmp_path / "model")
    run = train(task, *TWO_STEPS, f"model={{path: {tmp_path / 'model'}}}")
    assert run.read_rollouts(2)[0]["reward"] == -1  # DAPO's rule: 1 or -1
    assert [row["reward/mean"] for row in run.metrics.read()] == [-1, -1]


@pytest.mark.shared_data
def test_two_steps_on_math500(train: Train, shared_data: Path) -> None:
    task = f"task={{kind: dataset, files: {shared_data / 'math500.parquet'}, verifier: math_verify, limit: 12}}"
    rows = train(task, *TWO_STEPS, *BYTES).metrics.read()
    assert [row["reward/accuracy"] for row in rows] == [0, 0]
    assert [row["reward/verifier_errors"] for row in rows] == [0, 0]


# A recipe's reward functions, from the file to the metrics; and the code task

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
    for metrics in run.metrics.read():
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


CODE = {"kind": "code", "variables": 1, "train_size": 60, "heldout_size": 8, "warm_start_size": 20, "product": False}


def test_the_code_task_runs_and_the_run_records_its_isolation(small: dict[str, Any], tmp_path: Path) -> None:
    start(make_config(small | {"task": CODE, "steps": 1, "run_dir": str(tmp_path / "run")}, "test"))
    run = RunDirectory.open(tmp_path / "run")
    (metrics,) = run.metrics.read()
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
