"""Small files that ask for much: refused for what reading them would make, soon, and before it is made."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from hostile import attempt
from mantissa.base.errors import MantissaError
from mantissa.base.readers import parquet, readers

_LONG = "x" * 6_000_000


def _repeated(text: str, count: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count), pa.array([text]))


def _written(**columns: pa.Array) -> Callable[[Path], None]:
    return lambda path: pyarrow.parquet.write_table(pa.table(columns), path, compression="zstd")


def _database(script: str, rows: int, after: str = "") -> Callable[[Path], None]:
    def write(path: Path) -> None:
        connection = sqlite3.connect(path)
        connection.executescript(script)
        connection.executemany("INSERT INTO t (a) VALUES (?)", [(row,) for row in range(rows)])
        connection.executescript(after)
        connection.commit()
        connection.close()

    return write


BOMBS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "texts in columns": (
        "parquet", _written(**{f"c{n}": _repeated(_LONG, 256) for n in range(4)}), "used more than 1.5 GiB"),
    "a list of texts": (
        "parquet", _written(c=pa.ListArray.from_arrays(pa.array([0, 500], pa.int32()), _repeated(_LONG, 500))),
        "used more than 1.5 GiB",
    ),
    "many rows": ("parquet", _written(c=_repeated("y" * 100_000, 8_000)), "bytes in memory"),
    "a computed column": (
        "sqlite", _database("CREATE TABLE t (a, b AS (printf('%.*c', 100000000, 'x')))", 1), "computed columns"),
    "a column's default": (
        "sqlite", _database("CREATE TABLE t (a)", 1200, f"ALTER TABLE t ADD COLUMN b DEFAULT '{'x' * 1_000_000}'"),
        "bytes in memory",
    ),
    "empty objects": ("json", lambda path: path.write_bytes(b"[" + b"{}," * 5_000_000 + b"1]") and None, "values"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_what_a_file_makes_is_bounded(name: str, tmp_path: Path) -> None:
    kind, write, said = BOMBS[name]
    write(path := tmp_path / "file")
    began, before = time.process_time(), _peak(reset=True)
    error = attempt(readers()[kind], path)
    assert error is not None
    assert said in str(error)
    assert _peak() - before < (1 << 30) + (256 << 20)
    assert time.process_time() - began < 20


def test_the_bound_holds_in_another_thread_and_takes_nothing_of_this_process(tmp_path: Path) -> None:
    kind, write, said = BOMBS["texts in columns"]
    write(path := tmp_path / "file")
    before, told = _peak(reset=True), list[str]()

    def read() -> None:
        try:
            readers()[kind](path)
        except MantissaError as error:
            told.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert said in told[0]
    assert _peak() - before < 64 << 20


def _peak(reset: bool = False) -> int:
    """Bytes of memory that this process has held at most; since now, with ``reset``."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def test_a_text_of_marks_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "file"
    text = '{},[\\"' * 3_000_000
    path.write_text(f'["{text}"]')
    assert readers()["json"](path) == [text.replace("\\", "")]


def test_dictionaries_and_views_are_rows_as_ever(tmp_path: Path) -> None:
    words = pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), pa.array(["a", "b"]))
    offsets = pa.array([0, 2, 2, 3], pa.int32())
    deep = pa.StructArray.from_arrays([pa.ListArray.from_arrays(offsets, words)], ["l"])
    path = tmp_path / "file"
    _written(words=words, deep=deep)(path)
    kept = [(row["words"], row["deep"]["l"]) for row in parquet.read_rows(path)]
    assert kept == [("a", ["a", "b"]), ("b", []), (None, [None])]
