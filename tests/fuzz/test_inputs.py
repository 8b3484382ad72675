"""``make test-inputs``, a few of them: each is measured, and what fails is told."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import flips
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


def test_what_a_flipped_bit_changed_in_silence_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that ends otherwise, though nothing was flipped that anybody looks at."""
    monkeypatch.setattr(flips, "_run", lambda: (tmp_path / "run", {"metrics": [1], "rollouts": {}}))
    monkeypatch.setattr(flips, "_gone_on", lambda path: "nothing to say")
    monkeypatch.setattr(flips, "left", lambda path: {"metrics": [2], "rollouts": {}})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.json").write_text("{}")
    (tmp_path / "in").mkdir()
    (failed,) = over("runs with a flipped bit", 1, 0, tmp_path / "in")["failed"]
    assert "SilentError: notes.json: metrics differ" in failed
    monkeypatch.setattr(flips, "_gone_on", lambda path: "notes.json has changed since")
    assert over("runs with a flipped bit", 1, 0, tmp_path / "in")["failed"] == []


def test_a_flipped_bit_that_writes_the_same_value_otherwise_is_harmless(tmp_path: Path) -> None:
    run, expected = flips._run()
    shutil.copytree(run, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    text = config.read_text()
    assert "loss_scaling: null" in text
    config.write_text(text.replace("loss_scaling: null", "loss_scaling: Null"))
    (tmp_path / "run.flipped").write_text("config.yaml")
    flips.go_on(tmp_path / "run")
    assert flips.left(tmp_path / "run") == expected


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
