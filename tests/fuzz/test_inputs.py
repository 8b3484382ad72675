"""``make test-inputs``, a few of them: each is measured, and what fails is told."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from inputs import MOST_BYTES, OTHERS, all_inputs, over

from mantissa.base.readers import readers


@pytest.mark.parametrize(("name", "count"), [("scripts", 1), ("gguf", 1), ("chat templates", 3), ("toml", 20)])
@pytest.mark.filterwarnings("ignore")  # of libraries, about what they read
def test_a_few_hostile_inputs(name: str, count: int, tmp_path: Path) -> None:
    found = over(name, count, 7, tmp_path)
    assert found["failed"] == []
    assert found["refused"] <= found["inputs"] == count
    assert name != "toml" or found["refused"] > 0
    assert found["largest_mib"] < MOST_BYTES >> 20


def test_whatever_is_read_has_inputs() -> None:
    assert all_inputs().keys() == readers().keys() | OTHERS.keys()


def test_a_traceback_and_too_much_memory_are_failures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write(random: Random, path: Path) -> None:
        path.write_text("x" * random.randrange(2))

    def read(path: Path) -> None:
        if path.read_text():
            raise ZeroDivisionError(path.name)

    monkeypatch.setitem(OTHERS, "odd", (write, read))
    failed = over("odd", 20, 0, tmp_path)["failed"]
    assert 0 < len(failed) < 20
    assert all("ZeroDivisionError" in each for each in failed)
    monkeypatch.setitem(OTHERS, "large", (write, lambda path: bytearray(50 << 20)))
    monkeypatch.setattr("inputs.MOST_BYTES", 20 << 20)
    assert len(over("large", 2, 0, tmp_path)["failed"]) == 2
