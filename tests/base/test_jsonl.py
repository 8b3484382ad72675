from __future__ import annotations

import hashlib
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mantissa.base.errors import MantissaError
from mantissa.base.files import JsonLines, decode, encode

numbers = st.one_of(st.floats(), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.none())


@given(st.dictionaries(st.text(min_size=1), numbers))
def test_rows_come_back_bit_for_bit_and_are_strict_json(row: dict) -> None:
    row = {**row, "step": 3}
    line = encode(row)
    assert "\n" not in line
    json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    back = decode(line.encode())
    assert back.keys() == row.keys()
    for key, value in row.items():
        same_nan = isinstance(value, float) and math.isnan(value) and math.isnan(back[key])
        assert same_nan or (back[key] == value and type(back[key]) is type(value)), key


@pytest.mark.parametrize("value", [[1.0], {"a": 1}, object(), "NaN"])
def test_values_that_are_not_plain_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="loss: expected a plain number"):
        encode({"step": 1, "loss": value})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(cut=st.integers(0, 400))
def test_a_file_cut_anywhere_reads_as_a_prefix_and_can_be_continued(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"step": i, "loss": 0.1 * i} for i in range(12)]
    data = "".join(encode(row) + "\n" for row in rows).encode()
    cut = min(cut, len(data))
    path.write_bytes(data[:cut])
    whole = data[:cut].count(b"\n")
    assert JsonLines(path).read() == rows[:whole]
    JsonLines(path).append({"step": 99})
    assert JsonLines(path).read() == [*rows[:whole], {"step": 99}]


def test_killed_while_appending(tmp_path: Path) -> None:
    script = """
import itertools, sys
from pathlib import Path
from mantissa.base.files import JsonLines
lines = JsonLines(Path(sys.argv[1]))
for step in itertools.count(len(lines.read())):
    lines.append({"step": step, "pad": "x" * 5000})
    print("begun", flush=True)
"""
    path = tmp_path / "rows.jsonl"
    seen = 0
    for round_ in range(6):
        with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(0.004 * round_)
            child.send_signal(signal.SIGKILL)
        rows = JsonLines(path).read()
        assert [row["step"] for row in rows] == list(range(len(rows)))
        assert len(rows) > seen, "a row that append returned from was lost"
        seen = len(rows)


def test_steps_must_rise(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "rows.jsonl")
    lines.append({"step": 5})
    with pytest.raises(ValueError, match="step 5 after step 5; truncate"):
        lines.append({"step": 5})
    with pytest.raises(ValueError, match="step 4 after step 5"):
        JsonLines(tmp_path / "rows.jsonl").append({"step": 4})
    lines.truncate(4)
    lines.append({"step": 5})
    assert lines.read() == [{"step": 5}]
    with pytest.raises(ValueError, match="integer 'step'"):
        lines.append({"step": True})


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(MantissaError, match=r"rows\.jsonl, line 2: expected a row of JSON.*delete the line"):
        JsonLines(path).read()


def test_truncate_keeps_the_other_rows_exactly(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "rows.jsonl")
    for step in range(10):
        lines.append({"step": step, "loss": 1 / (step + 3), "bad": math.inf})
    before = lines.path.read_bytes()
    lines.truncate(6)
    assert before.startswith(lines.path.read_bytes())
    assert [row["step"] for row in lines.read()] == list(range(7))


def test_a_line_the_disk_cut_short_is_taken_back(tmp_path: Path) -> None:
    """The file may not grow beyond 1000 bytes: the kernel takes a part of the row, then refuses."""
    script = """
import resource, signal, sys
from pathlib import Path
from mantissa.base.errors import MantissaError
from mantissa.base.files import JsonLines
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
lines = JsonLines(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for step in (1, 2, 3, 4):
    try:
        lines.append({"step": step, "pad": "x" * 300})
    except MantissaError as error:
        print(step, error)
        assert [row["step"] for row in lines.read()] == [1, 2, 3]
        assert lines.path.read_bytes().endswith(b"\\n"), "nothing of the row is left"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
lines.append({"step": 5})
"""
    path = tmp_path / "rows.jsonl"
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"4 cannot write {path}: File too large; raise the file size limit")
    assert [row["step"] for row in JsonLines(path).read()] == [1, 2, 3, 5]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 1, "loss": 1%s}' % ("0" * 40), "loss: expected a number of at most 64 bits, got a number of"),
        ('{"step": 1, "time/step": "soon"}', "time/step: expected a number, got 'soon'"),
        ('{"step": 1, "loss": [1]}', "loss: expected a number, got a list"),
        ('{"step": 1, "note": "\\ud800"}', "expected a row of JSON with a step"),
        ('{"step": -1}', "step: expected a whole number from 0"), ('{"step": true}', "step: expected a whole number"),
        ('{"step": 3000000000}', "step: expected a whole number from 0"),
        ('{"step": 0}', "expected a step after 0, got 0"),
    ],
)  # fmt: skip
def test_values_that_no_row_has_are_refused_where_they_are_read(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"step": 0}\n' + line + "\n")
    with pytest.raises(MantissaError, match=f"rows.jsonl, line 2: {message}"):
        JsonLines(tmp_path / "rows.jsonl").read()
    with pytest.raises(TypeError, match="at most 64 bits"):
        encode({"step": 1, "loss": 10**400})


def test_a_digest_of_the_past_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of all rows up to the step, whatever was asked before; and each row is read for it once."""
    rows = JsonLines(tmp_path / "rows.jsonl")
    read, real = [], JsonLines._row
    monkeypatch.setattr(JsonLines, "_row", lambda self, line, *more: read.append(1) or real(self, line, *more))
    lasting = lambda row: {key: value for key, value in row.items() if key != "time/s"}  # noqa: E731
    assert rows.digest(5, lasting) is None
    rows.append({"step": 1, "x": 0.1, "time/s": 1.0})
    first = rows.digest(1, lasting)
    for step in range(2, 50):
        rows.append({"step": step, "x": math.nan if step % 2 else -0.0, "time/s": 1.0 * step})
        rows.digest(step, lasting)
    assert len(read) == 49
    texts = [encode(lasting(row)) for row in rows.read()]
    assert rows.digest(49, lasting) == hashlib.sha256("\n".join(texts).encode()).hexdigest()
    assert rows.digest(1, lasting) == first, "an earlier step, too"
    assert JsonLines(rows.path).digest(49, lasting) == rows.digest(49, lasting)
    rows.truncate(7)
    assert rows.digest(49, lasting) == hashlib.sha256("\n".join(texts[:7]).encode()).hexdigest()
    rows.path.write_bytes(rows.path.read_bytes()[:-3])
    assert rows.digest(49, lasting) == hashlib.sha256("\n".join(texts[:6]).encode()).hexdigest(), "a torn line is none"
    rows.path.unlink()
    assert rows.digest(49, lasting) is None
