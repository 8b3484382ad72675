"""Datasets from real and from hostile files: counts, duplicates, splits, and one clear line for everything wrong."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mantissa.errors import MantissaError
from mantissa.tasks import DatasetTask, Message, read_problems, verifier_named
from mantissa.tasks.datasets import DEFAULT_TEMPLATE


def dapo_row(index: int, answer: Any = None) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"What is {index} + {index}?\nEnd with Answer: ..."}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(2 * index) if answer is None else answer, "style": "rule"},
        "extra_info": {"index": f"row-{index}"},
    }


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


def plain(count: int) -> list[dict[str, Any]]:
    return [{"problem": f"What is {i} squared?", "answer": str(i * i)} for i in range(count)]


def task(files: list[Path], seed: int = 0, **options: Any) -> DatasetTask:
    return DatasetTask(files, seed, verifier_named("exact"), **options)


def test_dapo_file_repeated_a_hundred_times(tmp_path: Path) -> None:
    table = pa.concat_tables([pa.Table.from_pylist([dapo_row(i) for i in range(40)])] * 100)
    path = tmp_path / "dapo.parquet"
    pq.write_table(table, path, row_group_size=1000)
    problems, summary = read_problems([path])
    assert (summary.rows, summary.problems, summary.duplicates, summary.conflicting) == (4000, 40, 3960, 0)
    assert "4000 rows, 40 problems, 3960 duplicates dropped (0 with another answer), 0 unreadable" in summary.describe()
    assert [p.answer for p in problems] == [str(2 * i) for i in range(40)]
    assert problems[3].prompt == (Message("user", "What is 3 + 3?\nEnd with Answer: ..."),)
    assert {p.source for p in problems} == {"math_dapo"}
    assert len({p.id for p in problems}) == 40


def test_duplicates_with_another_answer_are_counted_and_the_first_kept(tmp_path: Path) -> None:
    rows = [dapo_row(1), dapo_row(1, "2.0"), dapo_row(1, "3"), dapo_row(2), dapo_row(1, " 3 ")]
    rows.append({**dapo_row(2), "prompt": [{"role": "user", "content": " What is 2  + 2?\n\nEnd with Answer: ..."}]})
    problems, summary = read_problems([jsonl(tmp_path / "d.jsonl", rows)])
    assert [p.answer for p in problems] == ["2", "4"]
    assert (summary.rows, summary.duplicates, summary.conflicting) == (6, 4, 2)  # 2.0 agrees with 2; 3 does not


def test_jsonl_and_parquet_give_the_same_problems(tmp_path: Path) -> None:
    for name, rows in (("plain", plain(20)), ("dapo", [dapo_row(i) for i in range(20)])):
        text = jsonl(tmp_path / f"{name}.jsonl", rows)
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
        assert read_problems([text])[0] == read_problems([tmp_path / f"{name}.parquet"])[0]


def test_several_files_are_one_dataset(tmp_path: Path) -> None:
    files = [jsonl(tmp_path / "a.jsonl", plain(10)), jsonl(tmp_path / "b.jsonl", plain(15))]
    problems, summary = read_problems(files)
    assert (summary.rows, summary.problems, summary.duplicates) == (25, 15, 10)
    assert [p.source for p in problems] == ["a"] * 10 + ["b"] * 5


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        (142.0, "142"),
        ("142.0", "142.0"),
        (-3, "-3"),
        (0.25, "0.25"),
        (1e20, "1" + "0" * 20),
        ("a #### b\n#### 72", "72"),
    ],
)
def test_answers_of_any_type_become_text(tmp_path: Path, raw: Any, answer: str) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"question": "q", "answer": raw, "extra": 1}])
    assert read_problems([path])[0][0].answer == answer


def test_templates(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"problem": " Is \\boxed{x} {problem}? ", "answer": "1"}])

    def prompt(**options: Any) -> Any:
        return read_problems([path], **options)[0][0].prompt

    assert prompt() == DEFAULT_TEMPLATE.replace("{problem}", "Is \\boxed{x} {problem}?")
    assert prompt(template="Q: {problem}\nA: {") == "Q: Is \\boxed{x} {problem}?\nA: {"
    assert prompt(template="{problem}", chat=True) == (Message("user", "Is \\boxed{x} {problem}?"),)
    with pytest.raises(MantissaError, match=r"template 'Solve' lacks \{problem\}"):
        prompt(template="Solve")
    dapo = jsonl(tmp_path / "dapo.jsonl", [dapo_row(1)])
    for options in ({"template": "{problem}"}, {"chat": True}):
        with pytest.raises(MantissaError, match="where template and chat do nothing"):
            read_problems([dapo], **options)  # type: ignore[arg-type]


BAD_ROWS: list[tuple[Any, str]] = [
    ("{not json", "not JSON"),
    ("[1, 2]", "expected a JSON object, found list"),
    ("[" * 100_000, "not JSON"),
    ({"problem": "q"}, "'answer' is missing or null"),
    ({"answer": "1"}, "'problem' is missing or null"),
    ({"problem": "q", "answer": None}, "'answer' is missing or null"),
    ({"problem": "q", "answer": "  "}, "'answer' is '': expected text or a finite number"),
    ({"problem": "q", "answer": True}, "'answer' is True"),
    ({"problem": "q", "answer": ["1"]}, "'answer' is ['1']"),
    ('{"problem": "q", "answer": NaN}', "'answer' is nan"),
    ({"problem": "", "answer": "1"}, "'problem' is ''"),
    ({"problem": 5, "answer": "1"}, "'problem' is 5"),
]
BAD_DAPO_ROWS: list[tuple[Any, str]] = [
    ({**dapo_row(9), "prompt": []}, "'prompt' is []: expected a list of messages"),
    ({**dapo_row(9), "prompt": "hi"}, "'prompt' is 'hi'"),
    ({**dapo_row(9), "prompt": ["hi"]}, "a message of 'prompt' is 'hi'"),
    ({**dapo_row(9), "prompt": [{"role": "robot", "content": "hi"}]}, "a message's role is 'robot'"),
    ({**dapo_row(9), "prompt": [{"role": "user", "content": None}]}, "'content' is missing or null"),
    ({**dapo_row(9), "reward_model": None}, "'reward_model' is missing or null"),
    ({**dapo_row(9), "reward_model": {"style": "rule"}}, "'reward_model.ground_truth' is missing or null"),
]


@pytest.mark.parametrize(("bad", "why"), BAD_ROWS + BAD_DAPO_ROWS)
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, bad: Any, why: str) -> None:
    good = [dapo_row(1), dapo_row(2)] if (bad, why) in BAD_DAPO_ROWS else plain(2)
    path = jsonl(tmp_path / "d.jsonl", [good[0], "", bad, good[1], bad])  # the blank line is line 2
    with pytest.raises(MantissaError) as caught:
        read_problems([path])
    assert str(caught.value).startswith(f"dataset {path}, row 3: {why}")
    assert "(and 1 more such rows); mend the file, or set on_bad_row: skip" in str(caught.value)
    assert "\n" not in str(caught.value)
    problems, summary = read_problems([path], on_bad_row="skip")
    assert len(problems) == 2
    assert [(b.row, b.why.startswith(why)) for b in summary.bad_rows] == [(3, True), (5, True)]
    assert (summary.rows, summary.problems, summary.duplicates) == (4, 2, 0)
    assert f"2 unreadable (the first: {path}, row 3: " in summary.describe()


def test_bytes_that_are_no_utf8_and_null_in_parquet(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"problem": "q", "answer": "1"}\n{"problem": "\xff", "answer": "1"}\n')
    assert [b.row for b in read_problems([path], on_bad_row="skip")[1].bad_rows] == [2]
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"problem": ["a", None, "c"], "answer": [1.0, 2.0, float("inf")]}), path)
    problems, summary = read_problems([path], on_bad_row="skip")
    assert [p.answer for p in problems] == ["1"]
    assert [(b.row, b.why) for b in summary.bad_rows] == [
        (2, "'problem' is missing or null: expected text"),
        (3, "'answer' is inf: expected text or a finite number"),
    ]


def test_files_that_are_no_dataset(tmp_path: Path) -> None:
    def message(name: str, **options: Any) -> str:
        with pytest.raises(MantissaError) as caught:
            read_problems([tmp_path / name], **options)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "is not there: expected a .jsonl or .parquet file" in message("absent.jsonl")
    assert "is a folder" in message(".")
    (tmp_path / "d.csv").write_text("problem,answer\n")
    assert "unknown extension '.csv': expected .jsonl" in message("d.csv")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert "the dataset holds no problem: empty.jsonl: 0 rows" in message("empty.jsonl")
    jsonl(tmp_path / "bad.jsonl", ["{", "{"])
    assert "holds no problem: bad.jsonl: 2 rows" in message("bad.jsonl", on_bad_row="skip")
    jsonl(tmp_path / "other.jsonl", [{"text": "a", "label": 1}])
    assert "columns text, label fit no schema: expected 'problem' (or 'question') and 'answer'" in message(
        "other.jsonl"
    )
    jsonl(tmp_path / "plain.jsonl", plain(2))
    assert "schema dapo needs columns" not in message(
        "plain.jsonl", schema="dapo"
    )  # jsonl has no columns: rows are bad
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
    assert built.overlap == 5  # 45..49 are held out, so they are no training problems
    assert [p.answer for p in built.split("heldout")] == [str(i * i) for i in range(45, 60)]
    assert [p.answer for p in built.split("train")] == [str(i * i) for i in range(7)]
    assert built.heldout_summary is not None
    assert built.heldout_summary.problems == 15
    assert len(task([train], heldout_files=[heldout]).split("train")) == 45
    with pytest.raises(MantissaError, match="both set"):
        task([train], heldout_files=[heldout], heldout_fraction=0.1)
    with pytest.raises(MantissaError, match="no training problem is left: all 15 are held out"):
        task([heldout], heldout_files=[heldout])


def test_a_dataset_has_no_warm_start_and_uses_its_verifier(tmp_path: Path) -> None:
    built = task([jsonl(tmp_path / "d.jsonl", plain(5))], heldout_fraction=0.0)
    with pytest.raises(MantissaError, match="no warm_start split: its files hold answers, not solutions"):
        built.split("warm_start")
    problem = built.split("train", 3)[-1]
    assert (problem.answer, problem.solution, built.alphabet, built.isolated) == ("4", None, None, False)
    assert built.verify(problem, "4.0").correct
    assert not built.verify(problem, "5").correct


@pytest.mark.shared_data
def test_the_real_sets_as_one_task(shared_data: Path) -> None:
    built = task(
        [shared_data / "math_sanity_1460.parquet", shared_data / "math500.parquet"],
        heldout_files=[shared_data / "aime24.parquet", shared_data / "amc23.parquet"],
    )
    texts = collections.Counter(
        " ".join(row["problem"].split())
        for name in ("math_sanity_1460", "math500")
        for row in pq.read_table(shared_data / f"{name}.parquet").to_pylist()
    )
    assert (built.summary.rows, built.summary.problems) == (1960, len(texts))
    assert built.summary.duplicates == 1960 - len(texts)
    assert len(built.split("heldout")) == 113
    assert len(built.split("train")) == len(texts) - built.overlap
    assert [p.answer for p in built.split("heldout") if p.source == "amc23"][:3] == [
        "142",
        "144",
        "81",
    ]  # doubles in the file
