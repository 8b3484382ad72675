"""Rows that a process of their own reads, against pyarrow's; damage of what is sealed; what ends pyarrow."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import os
import re
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from mantissa.base.errors import MantissaError
from mantissa.base.readers import child
from mantissa.base.readers.parquet import _packed, _unpacked, open_parquet, read_rows, write_sealed

ODD: dict[str, list[Any]] = {
    "blob": [b"\0\xff", None, b""],
    "when": [datetime.datetime(2026, 1, 2, 3, 4, 5, 678), None, datetime.datetime(1, 1, 1)],
    "zoned": [datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), None, None],
    "day": [datetime.date(2026, 1, 2), None, datetime.date(1, 1, 1)],
    "hour": [datetime.time(1, 2, 3, 4), None, datetime.time()],
    "long": [datetime.timedelta(-1, 5, 7), None, datetime.timedelta()],
    "price": [decimal.Decimal("1.50"), None, decimal.Decimal("-0.01")],
    "inner": [{"a": [b"x"], "b": {"c": datetime.date(2026, 1, 2)}}, None, {"a": [], "b": None}],
}


@pytest.mark.parametrize("columns", [["id", "text", "tokens", "deep", "real", "half"], [*ODD], ["\0kind", "real"]])
def test_rows_of_the_process_that_reads_are_pyarrow_s(
    columns: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, whatever a column may hold; read there and here."""
    plain = {"id": [2**63 - 1, -(2**63), 0], "text": ["é\u2028\0", "", None], "tokens": [[1, 2], [], None],
             "deep": [{"a": [[1.5], [None]]}, None, {"a": None}], "real": [1e-45, -0.0, 0.1 + 0.2],
             "\0kind": [["dict", "x"], [], ["bytes", "00"]],
             "half": pyarrow.array(np.array([0.5, 1.25, -2.0], np.float16))}  # fmt: skip
    table = pyarrow.table({name: (plain | ODD)[name] for name in columns})
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table, path)
    expected = pyarrow.parquet.read_table(path).to_pylist()
    apart = list(read_rows(path))
    assert apart == expected
    assert [repr(row.get("real")) for row in apart] == [repr(row.get("real")) for row in expected]
    monkeypatch.setattr(child, "inside", True)
    assert list(read_rows(path)) == expected


TYPES = [pyarrow.int8(), pyarrow.uint64(), pyarrow.float32(), pyarrow.bool_(), pyarrow.string(), pyarrow.large_string(),
         pyarrow.binary(), pyarrow.null(), pyarrow.date32()]  # fmt: skip


def _any_type(random: Random, levels: int = 2) -> Any:
    kind = random.choice(["plain", "list", "large", "struct"]) if levels else "plain"
    if kind == "plain":
        return random.choice(TYPES)
    inner = [_any_type(random, levels - 1) for _ in range(random.randrange(1, 3))]
    if kind == "struct":
        return pyarrow.struct([(f"f{number}", each) for number, each in enumerate(inner)])
    return pyarrow.list_(inner[0]) if kind == "list" else pyarrow.large_list(inner[0])


def _any_value(random: Random, kind: Any) -> Any:
    if random.random() < 0.2:
        return None
    if pyarrow.types.is_struct(kind):
        return {field.name: _any_value(random, field.type) for field in kind}
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return [_any_value(random, kind.value_type) for _ in range(random.randrange(4))]
    return {"int8": -3, "uint64": 2**64 - 1, "float": 0.1, "bool": random.random() < 0.5, "string": "é" * 2,
            "large_string": "abc", "binary": b"\xff", "date32[day]": datetime.date(2026, 1, 2)
            }.get(str(kind))  # fmt: skip


def test_columns_of_any_make_are_pyarrow_s_rows() -> None:
    """Nested, with values missing anywhere, whole and as a part of a batch."""
    random = Random(0)
    for _ in range(150):
        kinds = [_any_type(random) for _ in range(3)]
        columns = [pyarrow.array([_any_value(random, kind) for _ in range(9)], kind) for kind in kinds]
        batch = pyarrow.RecordBatch.from_arrays(columns, names=["a", "b", "c"])
        start = random.randrange(9)
        for part in (batch, batch.slice(start, random.randrange(10 - start))):
            assert repr(_unpacked(*_packed(part))) == repr(part.to_pylist())


def test_a_text_that_begins_within_a_character_is_refused() -> None:
    """Two halves, each no text, would be one as they lie beside one another."""
    halves = pyarrow.array([b"a\xc3", b"\xa9"], pyarrow.binary()).view(pyarrow.string())
    with pytest.raises(ValueError, match="no UTF-8"):
        _packed(pyarrow.RecordBatch.from_arrays([halves], names=["a"]))


def test_columns_that_say_what_they_have_not_are_refused() -> None:
    """Each byte and each number of what a reader says may be a lie: an error, or other values of the same kinds."""
    kinds = [pyarrow.list_(pyarrow.string()), pyarrow.struct([("f", pyarrow.int8())]), pyarrow.bool_()]
    columns = [pyarrow.array(values, kind) for values, kind in zip(
        ([["ab", None], []], [{"f": 1}, None], [True, None]), kinds, strict=True)]  # fmt: skip
    rows, names, about, data = _packed(pyarrow.RecordBatch.from_arrays(columns, names=["a", "b", "c"]))
    assert _unpacked(rows, names, about, data)[0] == {"a": ["ab", None], "b": {"f": 1}, "c": True}
    refused = 0
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 0xFF
        with contextlib.suppress(ValueError):
            assert len(_unpacked(rows, names, about, changed)) == rows
            continue
        refused += 1
    assert refused > len(data) // 2
    text = json.dumps(about)
    for number in set(re.findall(r"\d+", text)):
        for other in ("-1", "1", str(2**62)):
            lie = re.sub(rf"\b{number}\b", other, text)
            if lie != text:
                with pytest.raises(ValueError, match=r"colum|lengths|values at a time"):
                    _unpacked(rows, names, json.loads(lie), data)
    for part in (data[:-1], data + b"x"):
        with pytest.raises(ValueError, match="columns that"):
            _unpacked(rows, names, about, part)


def test_a_file_may_say_what_the_process_says_of_values(tmp_path: Path) -> None:
    """An object of the file's, with the key that marks what JSON has no value for."""
    rows = [{"a": {"\0kind": ["decimal", "1"], "b": 1}, "c": b"x"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert list(read_rows(tmp_path / "x.parquet")) == rows


def test_several_files_at_once_are_read_by_as_many_processes(tmp_path: Path) -> None:
    for name in "ab":
        pyarrow.parquet.write_table(pyarrow.table({name: list(range(1000))}), tmp_path / name)
    both = list(zip(read_rows(tmp_path / "a"), read_rows(tmp_path / "b"), strict=True))
    assert both == [({"a": n}, {"b": n}) for n in range(1000)]


def test_files_of_one_source_are_read_by_one_process_and_a_stranger_s_by_another(tmp_path: Path) -> None:
    def reader(name: str, source: Path | None) -> int:
        with open_parquet(tmp_path / name, name, source=source) as table:
            assert len(list(table.rows())) == 3
        (one,) = (each for each in child._idle[os.getpid()] if each.kind[0] == str(source or tmp_path / name))
        one._listen(0.0)
        return one.pid

    for name in "abc":
        pyarrow.parquet.write_table(pyarrow.table({name: [1, 2, 3]}), tmp_path / name)
    first = reader("a", tmp_path)
    assert reader("b", tmp_path) == first
    assert reader("c", None) not in (first, 0)
    assert reader("a", tmp_path) != first, "nothing is left of the process that read it before another's file"


def test_what_comes_in_small_parts_is_held_against_the_machine_s_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(child, "require_memory", lambda *given: asked.append(given[0]))
    monkeypatch.setattr(child, "_LOOK", 1 << 20)
    pyarrow.parquet.write_table(pyarrow.table({"a": list(range(500_000))}), tmp_path / "a")
    assert sum(1 for _ in read_rows(tmp_path / "a")) == 500_000
    assert 2 <= len(asked) <= 4, "4 MB in some 1,000 parts"


def test_a_file_that_is_left_half_read_costs_the_next_nothing(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"a": list(range(5000))}), tmp_path / "a")
    for _ in range(2):
        rows = read_rows(tmp_path / "a")
        assert next(rows) == {"a": 0}
        rows.close()  # type: ignore[attr-defined]
    assert sum(1 for _ in read_rows(tmp_path / "a")) == 5000


def test_a_column_without_its_metadata_is_an_error_where_pyarrow_ends_the_process(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"a": i} for i in range(20)]), path)
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    refused = 0
    for place in range(start, len(content) - 8):  # a chunk's field 3, its metadata, becomes another field
        if content[place] == 0x1C:
            path.write_bytes(content[:place] + b"\x2c" + content[place + 1 :])
            with contextlib.suppress(MantissaError):
                assert len(list(read_rows(path))) == 20  # another byte than a chunk's
                continue
            refused += 1
    assert refused


def test_no_flipped_bit_of_a_sealed_file_gives_other_rows(tmp_path: Path) -> None:
    rows = [{"id": i, "text": f"p{i}", "logp": [-0.5 * i] * (i % 3), "none": None} for i in range(12)]
    path = tmp_path / "rows.parquet"
    write_sealed(pyarrow.Table.from_pylist(rows), path)
    assert pyarrow.parquet.read_table(path).to_pylist() == rows  # whoever else reads it
    content = path.read_bytes()
    kept = 0
    for place in range(0, 8 * len(content), 61):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        with contextlib.suppress(MantissaError):
            assert list(read_rows(path)) == rows
            kept += 1
    assert kept <= 8 * len(b"mantissa.sha256")  # a file without a seal is one of somebody else's
