"""What a reader in a process of its own sends back is the dump; and a reader that fails in any way is one error."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import dumps
from hostile import attempt
from mantissa.base.errors import MantissaError
from mantissa.base.jail import filter_program
from mantissa.doctor.dump import Dump, Scored
from mantissa.doctor.isolated import ARRAYS, LIMITS, Reading, packed, unpacked
from mantissa.doctor.readers import read_dump

SEQUENCES = dumps.healthy(prompts=3, samples=2, length=5)


def same(one: Dump, other: Dump) -> None:
    assert len(one.sequences) == len(other.sequences)
    assert replace(one, sequences=()) == replace(other, sequences=())
    for x, y in zip(one.sequences, other.sequences, strict=True):
        for field in fields(Scored):
            mine, theirs = getattr(x, field.name), getattr(y, field.name)
            if field.name == "kept" and mine is not None:
                assert [None if ids is None else ids.tolist() for ids in mine] == [
                    None if ids is None else ids.tolist() for ids in theirs
                ]
            elif isinstance(mine, np.ndarray):
                assert mine.dtype == theirs.dtype, field.name
                np.testing.assert_array_equal(mine, theirs)
            else:
                assert mine == theirs, field.name


def rows(path: Path) -> Path:
    """Rows in which every field is there in one and absent in another."""
    whole = {"tokens": [1, 2, 3, 4], "prompt_length": 2, "rollout_logp": [-1.0, None], "learner_logp": [-1.5, -0.25]}
    more = {"mask": [1, 0], "group": 2**53, "rollout_version": 0, "learner_version": 7, "kept": [[3, 5], None],
            "rollout_experts": [[1], [2]], "learner_experts": [[1], [3]]}  # fmt: skip
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in (whole, whole | more, whole | {"group": 0}, whole | more))
    )
    return path


def test_every_field_comes_through_the_pipe_to_the_last_bit(tmp_path: Path) -> None:
    path = rows(tmp_path / "x.jsonl")
    same(Reading(path).dump(), read_dump(path))


@pytest.mark.parametrize("framework", ["plain", "nemo-rl", "prime-rl", "slime", "skyrl", "parquet"])
def test_each_framework_is_read_apart_as_it_is_here(framework: str, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    plain = dumps.write_plain(tmp_path / "x.jsonl", SEQUENCES, temperature=0.7, rollout_format="bf16")
    if framework == "parquet":
        table = [json.loads(line) for line in plain.read_text().splitlines()]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "x.parquet")
    path = {
        "plain": lambda: plain,
        "parquet": lambda: tmp_path / "x.parquet",
        "nemo-rl": lambda: dumps.write_nemo(tmp_path / "train_data_step3.jsonl", SEQUENCES),
        "prime-rl": lambda: dumps.write_prime(tmp_path / "prime", SEQUENCES),
        "slime": lambda: dumps.write_slime(tmp_path / "slime", SEQUENCES),
        "skyrl": lambda: dumps.write_skyrl(tmp_path / "global_step_3.pkl", SEQUENCES),
    }[framework]()
    same(Reading(path).dump(), read_dump(path))


def test_a_reader_s_own_error_is_the_command_s(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"tokens": [1')
    error, here = attempt(Reading(tmp_path / "x.jsonl").dump), attempt(read_dump, tmp_path / "x.jsonl")
    assert str(error) == str(here)
    assert "not JSON" in str(error)


FAULTS = {
    "segfault": "its reader crashed (SIGSEGV)",
    "eat": "its reader used more than 512 MiB",
    "eat_and_wrap": "its reader used more than 512 MiB",
    "spin": "its reader used more than 1 s of processor time",
    "sleep": "its reader took longer than 3 s",
    "dribble": "its reader took longer than 3 s",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_reader_is_one_error(fault: str, tmp_path: Path) -> None:
    wall = 3.0 if fault in ("sleep", "dribble") else 60.0
    limits = replace(LIMITS, memory_bytes=512 << 20, cpu_s=60 if fault != "spin" else 1, wall_s=wall)
    reading = Reading(tmp_path / "x.jsonl", reader=f"bad_readers:{fault}", limits=limits)
    error = attempt(reading.dump)
    assert FAULTS[fault] in str(error)
    assert str(error).startswith(f"{tmp_path / 'x.jsonl'}: ")
    with pytest.raises(ProcessLookupError):
        os.kill(reading._child.process.pid, 0)


HEADER = {
    "framework": "plain", "run": False, "notes": [], "mapped": [],
    "settings": {"renormalised": False} | dict.fromkeys(
        ("temperature", "top_k", "top_p", "logprobs_mode", "rollout_format", "learner_format", "experts",
         "healthy_size", "soft_cap")
    ),
}  # fmt: skip
ONE = [bytes(each) for each in packed(Dump("plain", Path("x"), SEQUENCES[:1]))]


def frames(*parts: object, end: bytes = b".") -> bytes:
    """An answer of these parts: bytes are arrays, anything else JSON."""
    kinds = [(b"a", each) if isinstance(each, bytes) else (b"j", json.dumps(each).encode()) for each in parts]
    return b"".join(struct.pack("<cQ", kind, len(data)) + data for kind, data in kinds) + (
        struct.pack("<cQ", end, 0) if len(end) == 1 else end
    )


GARBAGE = {
    "nothing": (b"", "no whole answer"),
    "no frame": (b"\xff" * 70_000, "an answer that is none"),
    "no JSON": (struct.pack("<cQ", b"j", 5) + b"hello", "no JSON"),
    "too deep": (struct.pack("<cQ", b"j", 60_000) + b"[" * 60_000, "no JSON"),
    "not UTF-8": (struct.pack("<cQ", b"j", 3) + b'"\xff"', "no JSON"),
    "an end alone": (frames(), "without fields"),
    "a list": (frames([]), "without fields"),
    "another object": (frames({"a": 1}), "other fields"),
    "an odd setting": (
        frames(HEADER | {"settings": HEADER["settings"] | {"temperature": "hot"}}, *ONE), "no sampling has"),  # type: ignore[operator]
    "no arrays": (frames(HEADER), "other arrays"),
    "halves of numbers": (frames(HEADER, *(each + b"x" for each in ONE)), "other arrays"),
    "values where arrays go": (frames(HEADER, *[1] * 13), "without fields"),
    "enormous": (struct.pack("<cQ", b"a", 1 << 62), "gave more than"),
    "a large error": (struct.pack("<cQ", b"e", 1 << 20), "an answer that is none"),
    "half": (frames(HEADER, end=b"a"[:1] + b"\7"), "no whole answer"),
    "wrong": (frames(HEADER, *[b"\x7f" * 8] * 13), "do not fit"),
    "an error that is no text": (struct.pack("<cQ", b"e", 1) + b"1", "an error without words"),
    "a terminal's words": (struct.pack("<cQ", b"e", 13) + b'"\\u001b[2Jgo"', "\\x1b[2Jgo"),
}  # fmt: skip


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_in_the_pipe_is_one_error(kind: str, tmp_path: Path) -> None:
    data, said = GARBAGE[kind]
    (tmp_path / "x.jsonl").write_bytes(data)
    assert said in str(attempt(Reading(tmp_path / "x.jsonl", reader="bad_readers:answer").dump))


def test_what_a_reader_would_have_sent_is_a_dump(tmp_path: Path) -> None:
    """So the frames above are refused for what is wrong with them."""
    (tmp_path / "x.jsonl").write_bytes(frames(HEADER, *ONE))
    assert len(Reading(tmp_path / "x.jsonl", reader="bad_readers:answer").dump().sequences) == 1


def test_arrays_that_do_not_fit_are_refused() -> None:
    """Each array in turn a number shorter, and with a number that none can hold."""
    kept = [np.array([4, 5]), None]
    one = Scored(np.array([1, 2, 4, 5]), 2, np.zeros(2), np.zeros(2), np.ones(2, bool), 1, 2, 3, np.ones(2, bool), kept)
    good = dict(zip(ARRAYS, packed(Dump("plain", Path("x"), [one, one])), strict=True))
    assert unpacked(good) is not None
    for name, values in good.items():
        assert unpacked(good | {name: values[:-1]}) is None, name
        if name != "numbers":  # of which any is one
            for bad in (-9, 2**62) if values.dtype.kind == "i" else (2,) if values.dtype.kind == "u" else (np.inf,):
                changed = values.copy()
                changed[0] = bad
                assert unpacked(good | {name: changed}) is None, (name, bad)


@pytest.mark.skipif(filter_program(os.uname().machine) is None, reason="no system-call filter for this processor")
def test_a_reader_reads_and_does_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}")
    found = Reading(tmp_path / "x.jsonl", reader="bad_readers:stray").dump()
    assert found.notes == ("read", "thread")
    assert not (tmp_path / "written").exists() or (tmp_path / "written").stat().st_size == 0


def test_what_cannot_be_sent_is_an_error_of_the_file(tmp_path: Path) -> None:
    row = {"tokens": [1, 2], "rollout_logp": [-1.0], "learner_logp": [-1.0], "prompt": 1 << 80}
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(MantissaError, match="at most 63 bits"):
        Reading(tmp_path / "x.jsonl").dump()
