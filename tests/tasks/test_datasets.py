"""Datasets from real and from hostile files: counts, duplicates, splits, one clear line for everything wrong.

And ``mantissa data dapo``: the account against a plain dictionary's, the output as the dataset task reads it, memory.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mantissa.base.errors import MantissaError
from mantissa.cli import data as dapo_data
from mantissa.cli.data import CONFLICTING, EMPTY, REPEATED, UNREACHABLE, UNREADABLE, prepare_dapo
from mantissa.tasks import Message
from mantissa.tasks.datasets import DEFAULT_TEMPLATE, Columns, DatasetTask
from problems import made, problems_in


def row(index: int, answer: Any = None, **changes: Any) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"What is {index} + {index}?"}],
        "ability": "ARITHMETIC",
        "reward_model": {"ground_truth": str(2 * index) if answer is None else answer, "style": "rule-x"},
        "extra_info": {"index": f"id-{index}"},
    } | changes


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


def plain(count: int) -> list[dict[str, Any]]:
    return [{"problem": f"What is {i} squared?", "answer": str(i * i)} for i in range(count)]


def task(files: list[Path], seed: int = 0, **options: Any) -> DatasetTask:
    if "heldout_files" in options:
        options["heldout_files"] = list(map(str, options["heldout_files"]))
    return made("dataset", seed, files=list(map(str, files)), verifier="exact", **options)


def test_a_dapo_file_that_repeats_itself(tmp_path: Path) -> None:
    table = pa.concat_tables([pa.Table.from_pylist([row(i) for i in range(40)])] * 10)
    path = tmp_path / "dapo.parquet"
    pq.write_table(table, path, row_group_size=150)
    problems, summary = problems_in([path])
    assert "400 rows, 40 problems, 360 duplicates dropped (0 with another answer), 0 unreadable" in summary.describe()
    assert [p.answer for p in problems] == [str(2 * i) for i in range(40)]
    assert problems[3].prompt == (Message("user", "What is 3 + 3?"),)
    assert {p.source for p in problems} == {"math_dapo"}
    assert len({p.id for p in problems}) == 40
    text = jsonl(tmp_path / "dapo.jsonl", [row(i) for i in range(40)])
    assert problems_in([text])[0] == problems


def test_duplicates_with_another_answer_are_counted_and_the_first_kept(tmp_path: Path) -> None:
    rows = [row(1), row(1, "2.0"), row(1, "3"), row(2), row(1, " 3 ")]
    rows.append(row(2, prompt=[{"role": "user", "content": " What is 2  +\n2?"}]))
    problems, summary = problems_in([jsonl(tmp_path / "d.jsonl", rows)])
    assert [p.answer for p in problems] == ["2", "4"]
    assert (summary.rows, summary.duplicates, summary.conflicting) == (6, 4, 2)  # 2.0 agrees with 2; 3 does not


def test_several_files_of_either_kind_are_one_dataset(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(plain(15)), tmp_path / "b.parquet")
    problems, summary = problems_in([jsonl(tmp_path / "a.jsonl", plain(10)), tmp_path / "b.parquet"])
    assert (summary.rows, summary.problems, summary.duplicates) == (25, 15, 10)
    assert [p.source for p in problems] == ["a"] * 10 + ["b"] * 5


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        (142.0, "142"), ("142.0", "142.0"), (-3, "-3"), (0.25, "0.25"), (1e20, "1" + "0" * 20),
        ("a #### b\n#### 72", "72"),
    ],
)  # fmt: skip
def test_answers_of_any_type_become_text(tmp_path: Path, raw: Any, answer: str) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"question": "q", "answer": raw, "extra": 1}])
    assert problems_in([path])[0][0].answer == answer


ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
CHAT = (Message("system", "Be brief."), Message("user", "1 + 1?"))
SHAREGPT = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "It is \\boxed{2}."}]


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(
    ("columns", "prompt"),
    [
        ({"messages": ASKED, "answer": "2"}, CHAT),
        ({"messages": ASKED, "ground_truth": 2}, CHAT),
        ({"messages": [*ASKED, {"role": "assistant", "content": "so #### 2"}]}, CHAT),
        ({"prompt": "1 + 1?", "solution": "2"}, "1 + 1?"),
        ({"prompt": "1 + 1?", "answer": ["2"]}, "1 + 1?"),
        ({"prompt": ASKED, "solution": "One and one: \\boxed{2}."}, CHAT),
        (
            {"problem": "1 + 1?", "solution": f"{'So. ' * 99}\\boxed{{2}}"},
            DEFAULT_TEMPLATE.replace("{problem}", "1 + 1?"),
        ),
        ({"problem": "1 + 1?", "solution": "$2$"}, DEFAULT_TEMPLATE.replace("{problem}", "1 + 1?")),
        ({"conversations": SHAREGPT}, (Message("user", "1 + 1?"),)),
        ({"conversations": SHAREGPT, "answer": "2"}, (Message("user", "1 + 1?"),)),
    ],
)
def test_data_as_people_have_it(tmp_path: Path, ending: str, columns: dict[str, Any], prompt: Any) -> None:
    path = tmp_path / f"d.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist([columns]), path)
    else:
        path.write_text(json.dumps(columns if ending == "jsonl" else [columns]))
    (problem,) = problems_in([path])[0]
    assert (problem.prompt, problem.answer, problem.row) == (prompt, "2", {})


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_columns_have_the_names_that_the_recipe_gives(tmp_path: Path, ending: str) -> None:
    rows = [{"task": "1 + 1?", "gold": 2, "problem": "not this"}]
    path = tmp_path / f"d.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        jsonl(path, rows)
    (problem,) = problems_in([path], columns=Columns(problem="task", answer="gold"), template="{problem}")[0]
    assert (problem.prompt, problem.answer) == ("1 + 1?", "2")
    with pytest.raises(MantissaError, match=r"task\.columns names right; its columns are task, gold, problem"):
        problems_in([path], columns=Columns(problem="task", answer="right"))
    with pytest.raises(ValueError, match="columns does nothing for row_schema dapo"):
        task([path], columns={"problem": "task", "answer": "gold"}, row_schema="dapo")


def test_a_reward_function_gets_the_rows_other_columns(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"prompt": f"{i}?", "answer": i, "level": i} for i in range(9)])
    options: dict[str, Any] = {"files": [str(path)], "heldout_fraction": 0}
    of_function = made("dataset", 0, reward=[{"function": "a:f"}], **options).split("train")
    assert [problem.row["level"] for problem in of_function] == list(range(9))
    assert all(problem.row == {} for problem in made("dataset", 0, **options).split("train"))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"problem": "q", "solution": "so " * 50}, "'solution' has no \\boxed{} and no ####"),
        ({"messages": ASKED}, "'answer' is missing or null"),
        ({"messages": [], "answer": "2"}, "'messages' is []: expected a list of messages"),
        ({"messages": [{"role": "assistant", "content": "2"}], "answer": "2"}, "'messages' is an answer alone"),
        ({"conversations": [{"from": "tool", "value": "2"}]}, "a message's role is 'tool'"),
    ],
)
def test_a_chat_or_a_solution_that_cannot_be_read_is_named(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    with pytest.raises(MantissaError) as caught:
        problems_in([jsonl(tmp_path / "d.jsonl", [row])])
    assert f"row 1: {why}" in str(caught.value)


def test_a_json_file_is_a_list_of_objects(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    for text, said in (('{"a": 1}', "expected a list of objects, found dict"), ("{}\n{}", "objects one a line")):
        path.write_text(text)
        with pytest.raises(MantissaError, match=said):
            problems_in([path])
    path.write_text('[{"prompt": "1?", "answer": 1}, 3]')
    assert "row 2: expected a JSON object, found int" in problems_in([path], on_bad_row="skip")[1].describe()


@pytest.mark.parametrize("count", [2, 5, 12])
def test_of_a_small_file_at_least_one_problem_is_held_out_or_none(tmp_path: Path, count: int) -> None:
    path = jsonl(tmp_path / "d.jsonl", plain(count))
    for seed in range(5):
        assert len(task([path], seed).split("heldout")) >= 1
        assert not task([path], seed, heldout_fraction=0).split("heldout")
    assert len(task([path], 0).split("train")) >= 1


def test_templates(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"problem": " Is \\boxed{x} {problem}? ", "answer": "1"}])

    def prompt(**options: Any) -> Any:
        return problems_in([path], **options)[0][0].prompt

    assert prompt() == DEFAULT_TEMPLATE.replace("{problem}", "Is \\boxed{x} {problem}?")
    assert prompt(template="Q: {problem}\nA: {") == "Q: Is \\boxed{x} {problem}?\nA: {"
    assert prompt(template="{problem}", chat=True) == (Message("user", "Is \\boxed{x} {problem}?"),)
    with pytest.raises(MantissaError, match=r"template lacks \{problem\}.*: 'Solve'"):
        prompt(template="Solve")
    dapo = jsonl(tmp_path / "dapo.jsonl", [row(1)])
    for options in ({"template": "{problem}"}, {"chat": True}):
        with pytest.raises(MantissaError, match="where template and chat do nothing"):
            problems_in([dapo], **options)  # type: ignore[arg-type]


BAD_ROWS: list[tuple[Any, str]] = [
    ("{not json", "not JSON"),
    ("[1, 2]", "expected a JSON object, found list"),
    ("[" * 100_000, "not JSON"),
    ({"problem": "q"}, "'answer' is missing or null"),
    ({"answer": "1"}, "'problem' is missing or null"),
    ({"problem": "q", "answer": None}, "'answer' is missing or null"),
    ({"problem": "q", "answer": "  "}, "'answer' is '': expected text or a finite number"),
    ({"problem": "q", "answer": True}, "'answer' is True"),
    ({"problem": "q", "answer": ["1", "2"]}, "'answer' is a list of 2 answers"),
    ('{"problem": "q", "answer": NaN}', "'answer' is nan"),
    ({"problem": "", "answer": "1"}, "'problem' is ''"),
    ({"problem": 5, "answer": "1"}, "'problem' is 5"),
]
BAD_DAPO_ROWS: list[tuple[Any, str]] = [
    (row(9, prompt=[]), "'prompt' is []: expected a list of messages"),
    (row(9, prompt="hi"), "'prompt' is 'hi'"),
    (row(9, prompt=["hi"]), "a message of 'prompt' is 'hi'"),
    (row(9, prompt=[{"role": "robot", "content": "hi"}]), "a message's role is 'robot'"),
    (row(9, prompt=[{"role": "user", "content": None}]), "'content' is missing or null"),
    (row(9, reward_model=None), "'reward_model' is missing or null"),
    (row(9, reward_model={"style": "rule"}), "'reward_model.ground_truth' is missing or null"),
]


@pytest.mark.parametrize(("bad", "good"), [(BAD_ROWS, plain(2)), (BAD_DAPO_ROWS, [row(1), row(2)])])
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, bad: list[tuple[Any, str]], good: list[Any]) -> None:
    path = jsonl(tmp_path / "d.jsonl", [good[0], "", *(each for each, _ in bad), good[1]])  # the blank line is line 2
    with pytest.raises(MantissaError) as caught:
        problems_in([path])
    assert str(caught.value).startswith(f"dataset {path}, row 3: {bad[0][1]}")
    assert f"(and {len(bad) - 1} more such rows); mend the file, or set on_bad_row: skip" in str(caught.value)
    assert "\n" not in str(caught.value)
    problems, summary = problems_in([path], on_bad_row="skip")
    assert [found.row for found in summary.bad_rows] == list(range(3, 3 + len(bad)))
    for found, (_, why) in zip(summary.bad_rows, bad, strict=True):
        assert found.why.startswith(why)
    assert (len(problems), summary.rows, summary.problems, summary.duplicates) == (2, len(bad) + 2, 2, 0)
    assert f"{len(bad)} unreadable (the first: {path}, row 3: " in summary.describe()


def test_bytes_that_are_no_utf8_and_null_in_parquet(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"problem": "q", "answer": "1"}\n{"problem": "\xff", "answer": "1"}\n')
    assert [b.row for b in problems_in([path], on_bad_row="skip")[1].bad_rows] == [2]
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"problem": ["a", None, "c"], "answer": [1.0, 2.0, float("inf")]}), path)
    problems, summary = problems_in([path], on_bad_row="skip")
    assert [p.answer for p in problems] == ["1"]
    assert [(b.row, b.why) for b in summary.bad_rows] == [
        (2, "'problem' is missing or null: expected text"),
        (3, "'answer' is inf: expected text or a finite number"),
    ]


def test_files_that_are_no_dataset(tmp_path: Path) -> None:
    def message(name: str, **options: Any) -> str:
        with pytest.raises(MantissaError) as caught:
            problems_in([tmp_path / name], **options)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "is not there: expected a .jsonl, .json or .parquet file" in message("absent.jsonl")
    assert "is a folder" in message(".")
    (tmp_path / "d.csv").write_text("problem,answer\n")
    assert "unknown extension '.csv': expected .jsonl" in message("d.csv")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert "the dataset holds no problem: empty.jsonl: 0 rows" in message("empty.jsonl")
    jsonl(tmp_path / "bad.jsonl", ["{", "{"])
    assert "holds no problem: bad.jsonl: 2 rows" in message("bad.jsonl", on_bad_row="skip")
    jsonl(tmp_path / "other.jsonl", [{"text": "a", "label": 1}])
    said = message("other.jsonl")
    assert (
        "columns text, label fit no schema: expected 'problem' (or 'question', 'prompt', 'messages') and 'answer'"
        in said
    )
    jsonl(tmp_path / "plain.jsonl", plain(2))
    assert "needs columns" not in message("plain.jsonl", schema="dapo")  # jsonl has no columns: rows are bad
    pq.write_table(pa.Table.from_pylist(plain(2)), tmp_path / "plain.parquet")
    assert "schema dapo needs columns 'prompt' and 'reward_model', found problem, answer" in message(
        "plain.parquet", schema="dapo"
    )
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    assert "columns x fit no schema" in message("x.parquet")
    (tmp_path / "fake.parquet").write_text("not parquet")
    assert "not a readable parquet file" in message("fake.parquet")


def test_heldout_by_hash_is_disjoint_seeded_stable_and_of_the_right_size(tmp_path: Path) -> None:
    small, large = jsonl(tmp_path / "s.jsonl", plain(1000)), jsonl(tmp_path / "l.jsonl", plain(2000)[::-1])
    one = task([small], heldout_fraction=0.2)
    train, heldout = [{p.prompt for p in one.split(name)} for name in ("train", "heldout")]
    assert not train & heldout
    assert len(train) + len(heldout) == 1000
    assert abs(len(heldout) - 200) < 5 * (1000 * 0.2 * 0.8) ** 0.5  # five standard deviations
    assert list(task([small], heldout_fraction=0.2).split("heldout")) == list(one.split("heldout"))
    assert {p.prompt for p in task([small], 1, heldout_fraction=0.2).split("heldout")} != heldout
    # more rows in another order, another template: no prompt changes sides
    grown = {p.prompt for p in task([large], heldout_fraction=0.2).split("heldout")}
    assert heldout == grown & (train | heldout)
    bare = {str(p.prompt) for p in task([small], heldout_fraction=0.2, template="{problem}").split("heldout")}
    assert {DEFAULT_TEMPLATE.replace("{problem}", b) for b in bare} == heldout
    assert len(task([small], heldout_fraction=0.0).split("heldout")) == 0
    assert 20 < len(task([small]).split("heldout")) < 85  # 5 % by default


def test_heldout_files_and_limit(tmp_path: Path) -> None:
    train, heldout = jsonl(tmp_path / "t.jsonl", plain(50)), jsonl(tmp_path / "h.jsonl", plain(60)[45:])
    built = task([train], heldout_files=[heldout], limit=7)
    assert [p.answer for p in built.split("heldout")] == [str(i * i) for i in range(45, 60)]
    assert [p.answer for p in built.split("train")] == [str(i * i) for i in range(7)]
    assert built.heldout_summary is not None
    assert built.heldout_summary.problems == 15
    assert len(task([train], heldout_files=[heldout]).split("train")) == 45
    with pytest.raises(MantissaError, match="no training problem is left: all 15 are held out"):
        task([heldout], heldout_files=[heldout])


def test_a_dataset_has_no_warm_start_and_uses_its_verifier(tmp_path: Path) -> None:
    built = task([jsonl(tmp_path / "d.jsonl", plain(5))], heldout_fraction=0.0)
    with pytest.raises(MantissaError, match="no warm_start split: its files hold answers, not solutions"):
        built.split("warm_start")
    problem = built.split("train", 3)[-1]
    assert (problem.answer, problem.solution, built.alphabet, built.verifier.isolated) == ("4", None, None, False)
    assert built.verifier(problem, "4.0").correct
    assert not built.verifier(problem, "5").correct


# mantissa data dapo


def counts(account: dapo_data.Preparation) -> dict[str, int]:
    assert account.rows == account.kept + sum(d.count for d in account.dropped.values())
    return {reason: dropped.count for reason, dropped in account.dropped.items()}


def test_each_reason_with_its_rows(tmp_path: Path) -> None:
    spaced = row(1, prompt=[{"role": "user", "content": " What is 1\n+ 1?"}])
    rows = [
        row(1),  # 1: kept
        row(2),  # 2: conflicts with row 8
        spaced,  # 3: repeats row 1
        "",  # a blank line is no row, but counts as a line
        row(3, ""),  # 5: no answer
        row(4, "$$"),  # 6: nothing but decoration
        "{torn",  # 7
        row(2, "5"),  # 8: repeats row 2 with another answer
        row(1, "2.0"),  # 9: repeats row 1, the same answer
        row(5, "x" * 400),  # 10: longer than the verifier looks
        row(6, prompt="text"),  # 11
        row(7, prompt=[{"role": "robot", "content": "?"}]),  # 12
        row(8, 16),  # 13: a number will do
    ]
    path, out = jsonl(tmp_path / "d.jsonl", rows), tmp_path / "out.parquet"
    account = prepare_dapo([path], out)
    assert (account.rows, account.kept) == (12, 2)
    assert counts(account) == {UNREADABLE: 4, REPEATED: 3, EMPTY: 1, CONFLICTING: 1, UNREACHABLE: 1}
    assert account.dropped[CONFLICTING].examples == [f"{path}, row 2: What is 2 + 2?"]
    assert account.dropped[REPEATED].examples[1] == f"{path}, row 8: user: What is 2 + 2?"
    assert account.dropped[EMPTY].examples == [f"{path}, row 6: '$$'"]
    assert len(account.dropped[UNREADABLE].examples) == 3  # the first few
    assert account.dropped[UNREADABLE].examples[1].startswith(f"{path}, row 7: not JSON")
    text = account.describe()
    assert text.startswith("12 rows, 2 kept\n")
    assert "           4 dropped: cannot be read as a problem and its answer" in text
    assert pq.read_table(out).to_pylist() == [row(1), row(8, "16")]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_random_rows_against_a_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dapo_data, "_BATCH", 7)  # many row groups
    rng = random.Random(0)
    files, seen, order = [], {}, []
    for number in range(3):
        rows = []
        for _ in range(200):
            index = rng.randrange(80)
            answer = str(2 * index) if rng.random() < 0.99 else str(rng.randrange(9))
            rows.append(row(index, answer))
            if index not in seen:
                order.append(index)
            seen.setdefault(index, set()).add(answer)
        files.append(tmp_path / f"{number}.parquet")
        pq.write_table(pa.Table.from_pylist(rows), files[-1], row_group_size=50)
    account = prepare_dapo(files, tmp_path / "out.parquet")
    agreed = [index for index in order if len(seen[index]) == 1]
    assert 0 < len(agreed) < len(order)
    assert counts(account) == {REPEATED: 600 - len(order), CONFLICTING: len(order) - len(agreed)}
    written = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [r["extra_info"]["index"] for r in written] == [f"id-{index}" for index in agreed]
    problems, summary = problems_in([tmp_path / "out.parquet"])
    assert (summary.duplicates, summary.conflicting, summary.bad_rows) == (0, 0, ())
    assert len(problems) == account.kept == len(agreed)


@pytest.mark.parametrize(
    "verifier",
    ["dapo", "dapo_strict", *(pytest.param(name, marks=pytest.mark.variants) for name in ("math_verify", "exact"))],
)
def test_plain_rows_become_prompts_that_ask_for_what_the_verifier_reads(tmp_path: Path, verifier: str) -> None:
    rows = [{"question": f" What is {{{i}}} squared? ", "answer": f"so #### {i * i}"} for i in range(5)]
    out = tmp_path / "out.parquet"
    prepare_dapo([jsonl(tmp_path / "plain.jsonl", rows)], out, verifier=verifier)
    problems, _ = problems_in([out])
    assert [p.answer for p in problems] == [str(i * i) for i in range(5)]
    (message,) = problems[2].prompt
    assert isinstance(message, Message)
    assert message.content.endswith("\n\nWhat is {2} squared?")
    assert ("Answer: " in message.content) == (verifier == "dapo")
    records = pq.read_table(out).to_pylist()
    assert [r["extra_info"]["index"] for r in records] == ["0", "1", "2", "3", "4"]
    facts = {(r["data_source"], r["ability"], r["reward_model"]["style"]) for r in records}
    assert facts == {("plain", "MATH", "rule")}
    prepare_dapo([tmp_path / "plain.jsonl"], out, template="<{problem}>", verifier=verifier)  # replaces it
    assert pq.read_table(out).to_pylist()[0]["prompt"][0]["content"] == "<What is {0} squared?>"


def test_what_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    good = jsonl(tmp_path / "good.jsonl", [row(1)])
    foreign = jsonl(tmp_path / "foreign.jsonl", [{"text": "a", "label": 1}])
    hopeless = jsonl(tmp_path / "hopeless.jsonl", [row(1, ""), "{"])
    fake = tmp_path / "fake.parquet"
    fake.write_text("no parquet")
    out = tmp_path / "out.parquet"
    for files, output, options, message in (
        ([foreign], out, {}, "columns text, label fit no schema"),
        ([good, fake], out, {}, "not a readable parquet file"),
        ([good, tmp_path / "absent.jsonl"], out, {}, "is not there"),
        ([hopeless], out, {}, "no problem is left to write: 2 rows, 0 kept; .*2 dropped: cannot be read"),
        ([good], tmp_path / "out.jsonl", {}, "a name that ends in .parquet"),
        ([good], tmp_path / "no" / "out.parquet", {}, "there is no folder"),
        ([fake], fake, {}, "is one of the files to read"),
        ([good], out, {"verifier": "code"}, "expected one of dapo, dapo_strict, math_verify, exact"),
        ([good], out, {"template": "Solve"}, r"lacks \{problem\}"),
    ):
        with pytest.raises(MantissaError, match=message):
            prepare_dapo(files, output, **options)  # type: ignore[arg-type]
    left = ["fake.parquet", "foreign.jsonl", "good.jsonl", "hopeless.jsonl"]
    assert sorted(p.name for p in tmp_path.iterdir()) == left
    assert fake.read_text() == "no parquet"


def repeated(path: Path, rows: int, distinct: int) -> Path:
    """A file that repeats its prompts, as the public one does, written a group at a time."""
    block = pa.Table.from_pylist(
        [row(i, prompt=[{"role": "user", "content": f"{i} " + "word " * 600}]) for i in range(distinct)]
    )
    with pq.ParquetWriter(path, block.schema) as writer:
        for _ in range(rows // distinct):
            writer.write_table(block)
    return path


PEAK = """
import resource, sys
sys.path[:] = {path!r}
from mantissa.cli.data import prepare_dapo
account = prepare_dapo([sys.argv[1]], sys.argv[2])
print(account.rows, account.kept, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.variants
def test_ten_times_the_rows_take_little_more_memory(tmp_path: Path) -> None:
    peaks = []
    for rows in (2_000, 20_000):
        file = repeated(tmp_path / f"{rows}.parquet", rows, 500)
        command = [sys.executable, "-c", PEAK.format(path=sys.path), str(file), str(tmp_path / "out.parquet")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        read, kept, peak_mib = map(int, done.stdout.split())
        assert (read, kept) == (rows, 500)
        peaks.append(peak_mib)
    assert peaks[1] < peaks[0] + 25, peaks  # 18,000 rows of 3,000 characters are 54 MB of text alone


def test_a_list_of_one_answer_is_that_answer_and_a_list_of_more_is_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "lists.jsonl"
    rows = [{"problem": "1 + 1", "answer": ["2"]}, {"problem": "2 + 2", "answer": ["4", "four"]},
            {"problem": "0", "answer": []}, {"problem": "3", "answer": [3.0]}]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    problems, summary = problems_in([path], on_bad_row="skip")
    assert [problem.answer for problem in problems] == ["2", "3"]
    assert [bad.row for bad in summary.bad_rows] == [2, 3]
    with pytest.raises(MantissaError, match=r"a list of 2 answers: expected one .*set on_bad_row: skip"):
        problems_in([path])
