"""The footer's count of values, against pyarrow's own on files that are whole."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from mantissa.base.errors import MantissaError
from mantissa.base.readers.parquet import read_rows, values_in, write_sealed


@pytest.mark.parametrize("rows", [0, 1, 20, 3000])
@pytest.mark.parametrize("version", ["1.0", "2.6"])
def test_as_many_values_as_pyarrow_says(rows: int, version: str, tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(
        [{"id": i, "text": f"p{i}", "tokens": list(range(i % 7)), "deep": {"a": [[1.5], [i]]}} for i in range(rows)],
        schema=pyarrow.schema(
            {"id": pyarrow.int64(), "text": pyarrow.string(), "tokens": pyarrow.list_(pyarrow.int64()),
             "deep": pyarrow.struct({"a": pyarrow.list_(pyarrow.list_(pyarrow.float64()))})}
        ),
    )  # fmt: skip
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table, path, version=version, row_group_size=1000, compression="zstd")
    about = pyarrow.parquet.read_metadata(path)
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    assert values_in(path) == sum(group.column(c).num_values for group in groups for c in range(about.num_columns))


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
