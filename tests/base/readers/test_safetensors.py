"""A header that claims more than there is is refused before anything of that size is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mantissa.base.errors import MantissaError
from mantissa.base.readers import safetensors as reader
from mantissa.base.readers.safetensors import load_tensors, read_tensors


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def claim(file: Path, length: int) -> None:
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])


@pytest.mark.parametrize("beyond", [1, 1 << 20, 1 << 62])
def test_a_header_longer_than_the_file_is_refused_by_its_length(file: Path, beyond: int) -> None:
    size = file.stat().st_size
    claim(file, length := size - 8 + beyond)
    with pytest.raises(ValueError, match=re.escape(f"a header of {length:,} bytes in a file of {size:,}")):
        load_tensors(file)
    with pytest.raises(MantissaError, match="truncated or damaged"):
        read_tensors(file)


def test_a_header_of_the_most_bytes_is_read_and_one_more_is_not(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    length, limits = int.from_bytes(file.read_bytes()[:8], "little"), reader._HEADER
    monkeypatch.setattr(reader, "_HEADER", limits._replace(bytes=length))
    assert torch.equal(load_tensors(file)["w"], torch.arange(6.0).reshape(2, 3))
    monkeypatch.setattr(reader, "_HEADER", limits._replace(bytes=length - 1))
    with pytest.raises(ValueError, match=f"a header of {length:,} bytes"):
        load_tensors(file)
