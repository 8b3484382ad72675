"""Splits of generated tasks: deterministic, disjoint, stable when another one grows, honest when exhausted."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantissa.errors import MantissaError
from mantissa.tasks.generated import Addition, Countdown, RunningSum
from mantissa.tasks.types import Message, prompt_text, stable_id


def sized(train: int = 30, heldout: int = 20, warm_start: int = 25, seed: int = 0) -> RunningSum:
    return RunningSum({"train": train, "heldout": heldout, "warm_start": warm_start}, seed, 3, 4)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**40),
    train=st.integers(1, 60),
    heldout=st.integers(0, 60),
    warm_start=st.integers(0, 60),
    numbers=st.integers(2, 3),
)
def test_splits_are_disjoint_and_distinct(seed: int, train: int, heldout: int, warm_start: int, numbers: int) -> None:
    sizes = {"train": train, "heldout": heldout, "warm_start": warm_start}
    # small spaces, where collisions are the rule
    for task in (Addition(sizes, seed, 2), Countdown(sizes, seed, numbers=numbers, max_number=20)):
        problems = [p for name in ("train", "heldout", "warm_start") for p in task.split(name)]
        assert len(problems) == train + heldout + warm_start
        assert len({p.prompt for p in problems}) == len({p.id for p in problems}) == len(problems)


def test_every_problem_of_a_tiny_space_is_found() -> None:
    task = Addition({"train": 70, "heldout": 10, "warm_start": 20}, 3, digits=1)
    found = {p.prompt for name in ("train", "heldout", "warm_start") for p in task.split(name)}
    assert found == {f"{a}+{b}=" for a in range(10) for b in range(10)}


def test_a_space_that_is_too_small_is_a_clear_error() -> None:
    task = Addition({"train": 71, "heldout": 10, "warm_start": 20}, 3, digits=1)
    assert len(task.split("heldout")) == 10
    with pytest.raises(MantissaError, match="addition: 100 distinct prompts were found, but its splits ask for 101"):
        task.split("train")


def test_same_seed_same_problems_whatever_the_order_of_asking() -> None:
    one, other = sized(), sized()
    asked = {name: one.split(name) for name in ("train", "warm_start", "heldout")}
    assert asked == {name: other.split(name) for name in ("heldout", "train", "warm_start")}
    assert one.split("train") == one.split("train")
    assert sized(seed=1).split("train") != one.split("train")


def test_sizes_of_other_splits_move_little() -> None:
    base = sized()
    assert sized(train=90, warm_start=80).split("heldout") == base.split("heldout")
    assert sized(train=90).split("train", 30) == base.split("train")
    assert sized(train=90).split("warm_start") == base.split("warm_start")


def test_problems_do_not_depend_on_the_process() -> None:
    # hash randomisation is what usually breaks this
    code = (
        "from mantissa.tasks.generated import RunningSum\n"
        "task = RunningSum({'train': 5, 'heldout': 2, 'warm_start': 2}, 7, 3, 9)\n"
        "print([(p.id, p.prompt) for p in task.split('train')])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    task = RunningSum({"train": 5, "heldout": 2, "warm_start": 2}, 7, 3, 9)
    assert runs == {f"{[(p.id, p.prompt) for p in task.split('train')]}\n"}


def test_count_takes_a_prefix_and_refuses_more_than_there_is() -> None:
    task = sized()
    assert list(task.split("train", 7)) == list(task.split("train"))[:7]
    assert list(task.split("train", 0)) == []
    for count in (31, -1):
        with pytest.raises(MantissaError, match=f"asked for {count} problems of the train split, which holds 30"):
            task.split("train", count)
    with pytest.raises(ValueError, match="unknown split 'test'"):
        task.split("test")  # type: ignore[arg-type]


def test_prompt_text_ignores_white_space_only() -> None:
    assert prompt_text(" a\n\tb ") == "a b"
    chat = (Message("system", "be  brief"), Message("user", "a\nb"))
    assert prompt_text(chat) == "system: be brief\nuser: a b"
    assert prompt_text((Message("user", "a b"),)) != prompt_text((Message("assistant", "a b"),))


def test_stable_id_is_sha256() -> None:
    # printf '3141=' | sha256sum
    assert stable_id("t", "3141=") == "t-" + hashlib.new("sha256", b"3141=").hexdigest()[:16]
    assert stable_id("t", "\ud800").startswith("t-")  # a lone surrogate, as broken JSON brings them, is no crash
