"""One budget for whatever a command reads: many small files are no way around what one may not do."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from hostile import attempt
from mantissa.base.bounds import Budget, budget, call, require_size, spending
from mantissa.base.errors import MantissaError
from mantissa.base.readers import readers
from mantissa.cli import app


def test_a_file_is_drawn_once_and_what_is_added_to_it(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"x" * 600)
    other.write_bytes(b"x" * 300)
    spent = Budget(files=2, bytes=1000)
    for _ in range(10):
        require_size(path, 1000, spent)
    require_size(other, 1000, spent)
    path.write_bytes(b"x" * 700)
    require_size(path, 1000, spent)
    path.write_bytes(b"x" * 701)
    with pytest.raises(MantissaError, match="a: more than 1,000 bytes of files for what one command reads in all"):
        require_size(path, 1000, spent)
    (tmp_path / "c").touch()
    with pytest.raises(MantissaError, match="more than 2 files"):
        require_size(tmp_path / "c", 1000, spent)


def test_what_is_made_may_grow_with_what_is_read(tmp_path: Path) -> None:
    spent = Budget(made=100, times=10)
    spent.draw("made", 100)
    (tmp_path / "a").write_bytes(b"x" * 30)
    require_size(tmp_path / "a", 100, spent)
    spent.draw("made", 300)
    with pytest.raises(MantissaError, match="more than 400 bytes in memory"):
        spent.draw("made", 1)


def test_a_large_file_brings_no_more_than_its_ceiling_and_weights_draw_nothing(tmp_path: Path) -> None:
    path, spent = tmp_path / "a", Budget(made=0, bytes=1 << 41)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # nothing lies on the disk
    require_size(path, 1 << 44, spent, weights=True)
    with pytest.raises(MantissaError, match="more than 0 bytes in memory"):
        spent.draw("made", 1)
    spent = Budget(made=0, bytes=1 << 41)
    require_size(path, 1 << 44, spent)
    with pytest.raises(MantissaError, match="more than 3,758,096,384 bytes in memory"):
        spent.draw("made", 4 << 30)


def test_a_machine_without_memory_left_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").touch()
    monkeypatch.setattr("mantissa.base.bounds.available_memory", lambda: 1000)
    with pytest.raises(MantissaError, match="only 1,000 bytes of memory are left"):
        require_size(tmp_path / "a", 10)
    spent = Budget(made=1 << 40)
    spent.draw("made", 10)
    with pytest.raises(MantissaError, match="only 1,000 bytes"):
        spent.draw("made", 100 << 20)


def test_a_command_has_one_and_each_reading_elsewhere_its_own() -> None:
    assert budget() is not budget()
    with spending() as outer:
        assert budget() is outer
        with spending() as inner:
            assert inner is outer
        with spending(Budget(files=1)) as other:
            assert budget() is other
        assert budget() is outer
    assert budget() is not outer


def _repeated(path: Path) -> None:
    """A text of 4 kB in a thousand rows, in some 3 KB."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1000), pa.array(["x" * 4_000]))
    pyarrow.parquet.write_table(pa.table({"c": column}), path, compression="zstd")


def _defaulted(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (a)")
        connection.executemany("INSERT INTO t VALUES (?)", [(row,) for row in range(400)])
        connection.execute(f"ALTER TABLE t ADD COLUMN b DEFAULT '{'x' * 10_000}'")
    connection.close()


@pytest.mark.parametrize(("kind", "write"), [("parquet", _repeated), ("sqlite", _defaulted)])
def test_files_each_below_the_limit_are_too_many(kind: str, write: Callable[[Path], None], tmp_path: Path) -> None:
    """Each is read where it is a command's only one."""
    for name in ("a", "b", "c"):
        write(tmp_path / name)
    read = readers()[kind]
    for name in ("a", "b", "c"):
        with spending(Budget(made=10 << 20, times=0)):
            assert attempt(read, tmp_path / name) is None
    with spending(Budget(made=10 << 20, times=0)):
        said = [attempt(read, tmp_path / name) for name in ("a", "b", "c")]
    assert said[0] is None
    assert "bytes in memory for what one command reads in all" in str(said[2])


def test_a_command_of_the_command_line_has_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``mantissa check`` of more files than a command may read, each a command's for the asking."""
    (tmp_path / "a.yaml").write_text("trainer:\n  a: 1\n")
    (tmp_path / "b.yaml").write_text("trainer:\n  b: 1\n")
    monkeypatch.setattr("mantissa.base.bounds.Budget", lambda **more: Budget(**{"files": 1} | more))
    one, both = (CliRunner().invoke(app, ["check", *map(str, paths)]) for paths in (
        [tmp_path / "a.yaml"], [tmp_path / "a.yaml", tmp_path / "b.yaml"]))  # fmt: skip
    assert "more than 1 files" not in str(one.exception)
    assert "more than 1 files for what one command reads in all" in str(both.exception)


def test_a_call_gives_what_it_is_called_for() -> None:
    assert call(lambda: 5, 1.0) == 5
    with pytest.raises(ZeroDivisionError):
        call(lambda: 1 // 0, 1.0)


def test_what_cannot_be_ended_is_left_behind() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        call(lambda: time.sleep(1.5), 0.1)
    assert time.monotonic() - began < 1.2
