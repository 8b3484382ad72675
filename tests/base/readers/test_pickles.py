"""What a pickle may hold: nothing that holds itself, wherever in it that is, and no more values than a count allows."""

from __future__ import annotations

import enum
import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hostile import attempt
from mantissa.base.errors import MantissaError
from mantissa.base.readers import child, pickles


def own(where: str) -> Any:
    """A list that holds itself, beside lists that do not: the first, the last, or two levels down."""
    inner: list[Any] = [1, "two"]
    inner += {"first": [inner, []], "last": [[], {}, inner], "below": [[], [[], (inner,)]], "in a value": [{1: inner}]}[
        where
    ]
    return {"state": [[0.5], inner]}


@pytest.mark.parametrize("where", ["first", "last", "below", "in a value"])
def test_what_holds_itself_is_refused(where: str) -> None:
    with pytest.raises(ValueError, match="a list or dictionary that holds itself"):
        pickles.walk(own(where))


def test_what_stands_in_two_places_is_no_circle_and_counts_twice() -> None:
    both = [1, 2, 3]
    twice = {"a": both, "b": [both, ()]}  # 2 values, 3 and 2 and again 3
    pickles.walk(twice, 10)
    with pytest.raises(ValueError, match="more than 9 values"):
        pickles.walk(twice, 9)


def test_few_bytes_that_name_one_list_very_often_are_refused_before_it_is_written_out(tmp_path: Path) -> None:
    """19 million values of 160 bytes, which took 17 s and were handed on."""
    shared: list[Any] = [1] * 9
    for _ in range(7):
        shared = [shared] * 8
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(shared))
    began = time.process_time()
    with pytest.raises(MantissaError, match=r"more than 1,000,[0-9]{3} values"):
        pickles.load(tmp_path / "a.pkl")
    assert time.process_time() - began < 2.0
    (tmp_path / "b.pkl").write_bytes(pickle.dumps(dict.fromkeys(range(9), shared[0][0][0])))
    assert len(pickles.load(tmp_path / "b.pkl")) == 9


class Kind(enum.Enum):
    HIGH = "high"


class Arguments:
    def __init__(self) -> None:
        self.kind, self.size, self.path = Kind.HIGH, 3, Path("/a/b")


Kind.__module__ = Arguments.__module__ = "trainer.config"


def test_what_comes_from_the_process_that_reads_is_what_is_read_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("trainer.config")
    module.Kind, module.Arguments = Kind, Arguments  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trainer.config", module)
    monkeypatch.setitem(sys.modules, "trainer", ModuleType("trainer"))
    path = tmp_path / "x"
    values = {"a": [1, (2.5, -0.0), {"n"}, b"\0\xff", None, True, 2**63], 7: {"x": float("inf"), (1, 2): "é"},
              "array": np.arange(6, dtype=">i2").reshape(2, 3), "scalar": np.float16(0.1), "empty": np.zeros((0, 3)),
              "own": Arguments(), "again": [Arguments(), Arguments], "odd": ["list", 1], "text": ["dict"]}  # fmt: skip
    path.write_bytes(pickle.dumps(values))
    there = pickles.load(path, records=True)
    monkeypatch.setattr(child, "inside", True)
    here = pickles.load(path, records=True)
    assert repr(_of(there)) == repr(_of(here))
    assert (there["array"].dtype, there["own"]["kind"]["arguments"]) == (np.dtype(">i2"), ["high"])
    assert isinstance(there["own"], pickles.Record)
    assert there["own"].of == "trainer.config.Arguments"
    assert there["again"][1].of == "trainer.config.Arguments"


def _of(value: Any) -> Any:
    """A value with the names of its records, whose classes are made anew in each reading."""
    if isinstance(value, dict):
        return [getattr(value, "of", ""), [(_of(key), _of(each)) for key, each in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_of, value)]
    value = getattr(value, "array", value)
    return value.of if isinstance(value, type) else value


def test_a_pickle_that_takes_too_much_takes_none_of_it_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty list is a byte of the file and sixty-four of memory."""
    monkeypatch.setattr(pickles, "_LIMITS", replace(pickles._LIMITS, memory_bytes=32 << 20))
    (tmp_path / "x").write_bytes(b"\x80\x04](" + b"]" * 600_000 + b"e.")
    assert "used more than 32 MiB" in str(attempt(pickles.load, tmp_path / "x"))
