"""Preparing DAPO data: the account against a plain dictionary's, the output as the dataset task reads it, memory."""

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

from mantissa.errors import MantissaError
from mantissa.tasks import Grader, Message, dapo_data, prepare_dapo, read_problems, verifier_named
from mantissa.tasks.dapo_data import CONFLICTING, EMPTY, REPEATED, UNREACHABLE, UNREADABLE


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
    assert [r["extra_info"]["index"] for r in pq.read_table(tmp_path / "out.parquet").to_pylist()] == [
        f"id-{index}" for index in agreed
    ]
    problems, summary = read_problems([tmp_path / "out.parquet"])
    assert (summary.duplicates, summary.conflicting, summary.bad_rows) == (0, 0, ())
    assert len(problems) == account.kept == len(agreed)


@pytest.mark.parametrize("verifier", ["dapo", "dapo_strict", "math_verify", "exact"])
def test_plain_rows_become_prompts_that_ask_for_what_the_verifier_reads(tmp_path: Path, verifier: str) -> None:
    rows = [{"question": f" What is {{{i}}} squared? ", "answer": f"so #### {i * i}"} for i in range(5)]
    out = tmp_path / "out.parquet"
    prepare_dapo([jsonl(tmp_path / "plain.jsonl", rows)], out, verifier=verifier)
    problems, _ = read_problems([out])
    assert [p.answer for p in problems] == [str(i * i) for i in range(5)]
    (message,) = problems[2].prompt
    assert isinstance(message, Message)
    assert message.content.endswith("\n\nWhat is {2} squared?")
    assert ("Answer: " in message.content) == (verifier == "dapo")
    records = pq.read_table(out).to_pylist()
    assert [r["extra_info"]["index"] for r in records] == ["0", "1", "2", "3", "4"]
    assert {(r["data_source"], r["ability"], r["reward_model"]["style"]) for r in records} == {
        ("plain", "MATH", "rule")
    }
    prepare_dapo([tmp_path / "plain.jsonl"], out, template="<{problem}>", verifier=verifier)  # replaces it
    assert pq.read_table(out).to_pylist()[0]["prompt"][0]["content"] == "<What is {0} squared?>"


@pytest.mark.shared_data
def test_real_sets_keep_what_their_verifier_can_grade(shared_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    sets = [
        shared_data / name
        for name in ("math500.parquet", "aime24.parquet", "amc23.parquet", "math_sanity_1460.parquet")
    ]
    account = prepare_dapo(sets, out)
    assert account.rows == 500 + 30 + 83 + 1460
    assert account.kept > 1900
    assert set(account.dropped) <= {REPEATED, CONFLICTING, UNREACHABLE}
    problems, _ = read_problems([out])
    verifier = verifier_named("dapo")
    assert all(verifier(p, f"Therefore\nAnswer: {p.answer}").correct for p in problems)


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
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "fake.parquet",
        "foreign.jsonl",
        "good.jsonl",
        "hopeless.jsonl",
    ]
    assert fake.read_text() == "no parquet"


def test_an_interrupt_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.parquet"
    good = jsonl(tmp_path / "good.jsonl", [row(1), row(2)])
    prepare_dapo([good], out)
    before = out.read_bytes()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Grader, "grade", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare_dapo([jsonl(tmp_path / "more.jsonl", [row(3)])], out)
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good.jsonl", "more.jsonl", "out.parquet"]


def repeated(path: Path, rows: int, distinct: int) -> Path:
    """A file that repeats its prompts, as the public one does, written a group at a time."""
    block = pa.Table.from_pylist(
        [row(i, prompt=[{"role": "user", "content": f"{i} " + "word " * 60}]) for i in range(distinct)]
    )
    with pq.ParquetWriter(path, block.schema) as writer:
        for _ in range(rows // distinct):
            writer.write_table(block)
    return path


PEAK = """
import resource, sys
sys.path[:] = {path!r}
from mantissa.tasks import prepare_dapo
account = prepare_dapo([sys.argv[1]], sys.argv[2])
print(account.rows, account.kept, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_two_hundred_thousand_rows_take_little_more_memory_than_twenty_thousand(tmp_path: Path) -> None:
    peaks = []
    for rows in (20_000, 200_000):
        file = repeated(tmp_path / f"{rows}.parquet", rows, 2000)
        command = [sys.executable, "-c", PEAK.format(path=sys.path), str(file), str(tmp_path / "out.parquet")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        read, kept, peak_mib = map(int, done.stdout.split())
        assert (read, kept) == (rows, 2000)
        peaks.append(peak_mib)
    assert peaks[1] < peaks[0] + 40, peaks  # 180,000 rows of 300 characters are 54 MB of text alone
