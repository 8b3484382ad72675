"""``mantissa data dapo``: the summary, the file, and one line for everything that is no such file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from mantissa.tasks import read_problems

Mantissa = Callable[..., Any]


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_summary_and_the_file(mantissa: Mantissa, tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", {"problem": "1+1?", "answer": "2"}, {"problem": "1+1?", "answer": "2"})
    two = lines(tmp_path / "two.jsonl", {"problem": "2+2?", "answer": "4"}, {"problem": "3+3?", "answer": ""})
    out = tmp_path / "out.parquet"
    result = mantissa("data", "dapo", one, two, "-o", out, "--template", "{problem}", "--verifier", "exact")
    assert (result.code, result.err) == (0, "")
    first, *rest = result.out.splitlines()
    assert first == f"{out}: 4 rows, 2 kept"
    assert [line.strip() for line in rest] == [
        "1 dropped: repeats an earlier prompt",
        f"{one}, row 2: 1+1?",
        "1 dropped: cannot be read as a problem and its answer",
        f"{two}, row 2: 'answer' is '': expected text or a finite number",
    ]
    problems, _ = read_problems([out])
    assert [(p.prompt[0].content, p.answer) for p in problems] == [("1+1?", "2"), ("2+2?", "4")]  # type: ignore[union-attr]
    assert pq.read_schema(out).names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
