"""Configurations: defaults, refusals, and the task each one builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mantissa.base.errors import MantissaError
from mantissa.tasks.code import CodeConfig
from mantissa.tasks.datasets import DatasetConfig
from mantissa.tasks.generated import AdditionConfig, ChainConfig, CountdownConfig, RunningSumConfig
from mantissa.tasks.types import Message
from problems import SECTION, SPLITS, made

CONFIGS = (RunningSumConfig, AdditionConfig, ChainConfig, CountdownConfig, CodeConfig, DatasetConfig)


def parse(**fields: Any) -> Any:
    return SECTION.validate_python(fields)


@pytest.mark.parametrize("kind", ["running_sum", "addition", "chain", "countdown", "code"])
def test_the_sizes_of_splits_reach_the_task(kind: str) -> None:
    config = parse(kind=kind)
    assert list(config.sizes.values()) == ([2048, 256, 4096] if kind == "code" else [4096, 256, 8192])
    task = made(kind, sizes=(3, 1, 2))
    assert task.name == kind
    assert [len(task.split(n)) for n in SPLITS] == [3, 1, 2]


def test_the_kind_of_reward_reaches_the_task() -> None:
    for kind in ("running_sum", "addition", "chain"):
        task, exact = made(kind, reward="prefix", sizes=(20, 0, 0)), made(kind, sizes=(20, 0, 0))
        problem = task.split("train")[0]
        assert 0 < task.verifier(problem, f"{problem.answer}0").value < 1
        assert exact.verifier(problem, f"{problem.answer}0").value == 0


def test_a_template_asks_the_same_problems_in_other_words() -> None:
    fields = {"kind": "addition", "digits": 2, "sizes": (20, 5, 0)}
    plain = made(**fields)
    text = made(**fields, template="Add: {problem} {x}")
    turns = [("system", "Sums."), ("user", "1+2=?"), ("assistant", "1+2=3"), ("user", "{problem}?")]
    chat = made(**fields, template=[{"role": role, "content": said} for role, said in turns])
    assert (plain.alphabet, text.alphabet, chat.alphabet) == ("0123456789+=", None, None)
    for split in ("train", "heldout"):
        for a, b, c in zip(*(task.split(split) for task in (plain, text, chat)), strict=True):
            assert (b.prompt, b.answer, b.id) == (f"Add: {a.prompt} {{x}}", a.answer, a.id)
            asked = (*(Message(*turn) for turn in turns[:3]), Message("user", f"{a.prompt}?"))
            assert (c.prompt, c.answer, c.id) == (asked, a.answer, a.id)


def test_a_dataset_with_every_option(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(f'{{"problem": "q{i}", "answer": "{i}"}}\n' for i in range(10)) + "{\n")
    fields = {"heldout_fraction": 0.0, "verifier": "dapo", "row_schema": "plain", "template": "<{problem}>", "limit": 4}
    task = made("dataset", files=str(path), chat=True, on_bad_row="skip", **fields)  # one file needs no list
    assert [p.prompt for p in task.split("train")] == [(Message("user", f"<q{i}>"),) for i in range(4)]
    assert "10 problems, 0 duplicates dropped (0 with another answer), 1 unreadable (the first: " in task.notes[0]
    assert [task.verifier(task.split("train")[3], f"Answer: {n}").value for n in (3, 4)] == [1.0, -1.0]
    assert made("dataset", files=[str(path)], on_bad_row="skip").verifier.isolated  # math_verify is the default
    with pytest.raises(MantissaError, match="'prompt' is missing"):
        made("dataset", files=str(path), row_schema="dapo")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"kind": "sums"}, "running_sum"),
        ({"kind": "addition", "digit": 3}, "Extra inputs are not permitted"),
        ({"kind": "running_sum", "min_digits": 9, "max_digits": 8}, "min_digits=9 is above max_digits=8"),
        ({"kind": "running_sum", "min_digits": 8, "max_digits": 8, "aligned": True}, "aligned does nothing where"),
        ({"kind": "countdown", "operations": "+%"}, "should match pattern"),
        ({"kind": "chain", "reward": "soft"}, "'exact', 'prefix' or 'result'"),
        ({"kind": "addition", "template": "Add"}, "template lacks {problem}"),
        ({"kind": "addition", "template": [{"role": "user", "content": "Add"}]}, "template lacks {problem}"),
        ({"kind": "addition", "template": [{"role": "user", "content": "{problem}\0"}]}, "text without a NUL"),
        (
            {"kind": "addition", "template": [{"role": "user", "content": "{problem}", "name": "x"}]},
            "Unexpected keyword",
        ),
        ({"kind": "addition", "template": [{"role": "tool", "content": "{problem}"}]}, "'system', 'user' or"),
        ({"kind": "dataset", "files": []}, "at least 1 item"),
        ({"kind": "dataset", "files": "a.jsonl", "verifier": "llm"}, "'math_verify'"),
        ({"kind": "dataset", "files": "a.jsonl", "heldout_files": "b.jsonl", "heldout_fraction": 0.1}, "both set"),
        ({"kind": "dataset", "files": "a.jsonl", "template": "Solve"}, "template lacks {problem}"),
        ({"kind": "code", "variables": 1, "product": True}, "product needs variables of 2 or more"),
        ({"kind": "code", "isolation": "none"}, "'required' or 'limits'"),
        ({"kind": "chain", "reward": [{"weight": 1}]}, "exactly one of function and verifier"),
        ({"kind": "chain", "reward": [{"verifier": "task", "function": "a:b"}]}, "exactly one of function and"),
        ({"kind": "chain", "reward": [{"verifier": "task", "correct_at": 1}]}, "correct_at does nothing for a"),
        ({"kind": "chain", "reward": [{"verifier": "task", "batch_size": 8}]}, "batch_size does nothing for a"),
        ({"kind": "chain", "reward": [{"verifier": "task", "weight": float("nan")}]}, "finite number"),
        ({"kind": "chain", "reward": [{"function": "rewards.score"}]}, "expected package.module:function"),
        ({"kind": "chain", "reward": [{"function": "a:b"}, {"function": "c:b"}]}, "two terms of the reward are called"),
        ({"kind": "chain", "reward": []}, "at least 1 item"),
        (
            {"kind": "dataset", "files": "a", "verifier": "dapo", "reward": [{"verifier": "exact"}]},
            "verifier does nothing",
        ),
    ],
)
def test_refusals(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        parse(**fields)
    assert expected in str(caught.value)


@pytest.mark.parametrize("model", CONFIGS)
def test_configs_are_frozen_described_and_survive_yaml_types(model: Any) -> None:
    required = {"files": ["a.jsonl"]} if model is DatasetConfig else {}
    config = model(kind=model.model_fields["kind"].annotation.__args__[0], **required)
    with pytest.raises(ValidationError, match="frozen"):
        config.kind = "other"
    for name, field in model.model_fields.items():
        assert name == "kind" or field.description, f"{model.__name__}.{name} lacks a description"
    assert SECTION.validate_json(config.model_dump_json()) == config


def test_a_list_of_terms_survives_a_round_trip_and_one_term_needs_no_list() -> None:
    one = parse(kind="countdown", reward={"function": "a.b:c", "weight": 2, "correct_at": 0.5})
    assert [term.label for term in one.reward] == ["c"]
    several = parse(
        kind="dataset", files="a.jsonl", verifier="dapo", reward=[{"verifier": "task"}, {"function": "a:b"}]
    )
    plain = parse(kind="dataset", files="a.jsonl", reward=[{"verifier": "exact", "name": "right"}])
    for config in (one, several, plain):
        assert SECTION.validate_python(config.model_dump(mode="json")) == config


def test_a_list_replaces_the_verifier_and_keeps_the_task() -> None:
    terms = [{"verifier": "task", "weight": 0.5, "name": "sum"}, {"verifier": "exact", "weight": -2}]
    task = made("chain", terms=3, reward=terms)
    assert task.verifier.isolated
    problem = task.split("train")[0]
    assert problem == made("chain", terms=3).split("train")[0]
    right = task.verifier(problem, problem.answer)
    assert (right.value, right.correct, right.parts) == (0.5 - 2, True, {"sum": 1.0, "exact": 1.0})
    assert task.verifier(problem, "x").value == 0.0
