"""``mantissa tokens``, as a user calls it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Mantissa = Callable[..., Any]


def test_a_run_s_own_tokenizer(mantissa: Mantissa, finished: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"tokens": [2, 3, 4]}, {"turns": [[2], [5, 1]]}, {"tokens": [2, 0, 1, 3]}]
    file = tmp_path / "dialogues.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = mantissa("tokens", finished, file)
    assert (said.code, said.out.strip()) == (0, "All 3 dialogues have the same tokens when they are encoded again")
    assert mantissa("tokens", finished, file, "--json").out == ""
    file.write_text("{}\n")
    assert "dialogue 1: expected a dialogue" in mantissa("tokens", finished, file).error()
    file.write_text("")
    assert "no dialogue in it" in mantissa("tokens", finished, file).error()
    assert "nowhere" in mantissa("tokens", finished, "nowhere.jsonl").error()


def test_places_are_lines_and_the_exit_code_is_1(mantissa: Mantissa, byte_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "dialogues.jsonl"
    file.write_text(json.dumps({"tokens": [65, 195, 66]}) + "\n")
    said = mantissa("tokens", byte_folder, file)
    assert said.code == 1, said
    assert said.out.splitlines()[0] == 'dialogue 1, turn 1 (ids), token 1, lost: 195 "�" -> 239 191 189 "�"'
    assert said.out.splitlines()[-1] == "1 of 1 dialogues have other tokens when they are encoded again"
    row = json.loads(mantissa("tokens", byte_folder, file, "--json").out)
    assert (row["dialogue"], row["border"], row["was"], row["now"]) == (1, "lost", [195], [239, 191, 189])


@pytest.fixture
def byte_folder(tmp_path: Path) -> Path:
    """A tokenizer of bytes, and no model beside it."""
    from mantissa.model import byte_tokenizer

    byte_tokenizer().save(tmp_path / "bytes")
    return tmp_path / "bytes"
