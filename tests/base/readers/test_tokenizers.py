"""Tokenizers that make long texts of short ones, or take minutes to load, are refused before they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hostile import attempt
from mantissa.model import byte_tokenizer, load_tokenizer

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}


def load(folder: Path, **parts: Any) -> Any:
    byte_tokenizer().save(folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(document | parts))
    return attempt(lambda: load_tokenizer(folder).encode("aaaa"))


def steps(*each: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(each)}


@pytest.mark.parametrize(
    "normalizer",
    [
        steps(*[DOUBLE] * 30), steps(steps(*[DOUBLE] * 4), steps(*[DOUBLE] * 4)), steps(*[{"type": "ByteLevel"}] * 30),
        {"type": "Prepend", "prepend": "a" * 1000}, steps({"type": "Prepend", "prepend": "aaaa"}, *[DOUBLE] * 6),
        {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 100},
    ],
)  # fmt: skip
def test_steps_that_multiply_a_text(normalizer: dict[str, Any], tmp_path: Path) -> None:
    assert "times as long; expected at most 64" in str(load(tmp_path, normalizer=normalizer))


def test_a_decoder_that_multiplies_a_text(tmp_path: Path) -> None:
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, *[DOUBLE] * 30]}
    assert "its decoder may make a text" in str(load(tmp_path, decoder=decoder))


def test_what_real_tokenizers_do_is_allowed(tmp_path: Path) -> None:
    assert load(tmp_path, normalizer=steps({"type": "Prepend", "prepend": "\u2581"}, SPACE, {"type": "NFKC"})) is None


def test_a_hundred_thousand_added_tokens(tmp_path: Path) -> None:
    added = [{"id": 258 + n, "content": f"<{n}>"} | ADDED for n in range(100_000)]
    assert "100,000 added tokens; expected at most 30,000" in str(load(tmp_path, added_tokens=added))
