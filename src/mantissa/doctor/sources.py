"""What the doctor is given, a dump or a log: by what the file is, and by its name where that decides."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mantissa.base.bounds import boundary, regular_file
from mantissa.base.errors import MantissaError
from mantissa.base.readers.json import ROW, parse_json, read_lines
from mantissa.doctor.columns import EITHER, OBVIOUS, Part, has_sides, parse_mapping
from mantissa.doctor.dump import Dump
from mantissa.doctor.logs import Log, Role, is_log, newest, read_log, table
from mantissa.doctor.readers import FRAMEWORKS, read_dump, whose_row

STDIN = Path("-")
_LARGEST_INPUT = 1 << 30
_ENDINGS = {b"\x80": ".pkl", b"PK\x03\x04": ".pt", b"PAR1": ".parquet", b"\x93NUMPY": ".npy"}
_LOOKED_AT = 1 << 20  # bytes of a beginning
_COLUMN = re.compile(
    rb'"(?:' + "|".join((*OBVIOUS[Part.LEARNER], *OBVIOUS[Part.ROLLOUT], *EITHER)).encode() + rb')"\s{0,99}:'
)
_FLAT = frozenset({"step", "global_step", "_step"})


def read_source(path: Path, framework: str | None = None, mapping: str = "") -> Dump | Log:
    """A dump or a log. ``framework``: whose it is; None is found by looking. ``mapping``: SIDE=NAME, with commas.

    Raises ``MantissaError`` for what is neither, or is damaged.
    """
    known = (*FRAMEWORKS, *table().programs)
    if framework is not None and framework not in known:
        raise MantissaError(f"--from {framework}: expected one of {', '.join(dict.fromkeys(known))}")
    names = parse_mapping(mapping)
    with boundary(path, "expected a run's folder, a file of log-probs, or a training log"):
        if not path.exists():
            raise MantissaError(
                f"{path}: no such file or folder; expected a run, a dump of log-probs, or a training log"
            )
        log = path if path.is_file() and _log(path, framework, names) else None
        if path.is_dir() and not _dump_inside(path):
            log = path if next(newest(path), None) is not None else None
        regular_file(path)
    if log is not None:
        return read_log(log, framework, names)
    return read_dump(path, framework if framework in FRAMEWORKS else None, names)


def _log(path: Path, framework: str | None, names: dict[str, str]) -> bool:
    """Whether a file is read as a log: by its name, and where that may be either, by its first row."""
    if any(role in set(Role) for role in names):
        return True
    if path.suffix == ".csv":
        return not names and _csv_is_log(path)
    if path.suffix == ".json":
        return not names and not _COLUMN.search(_head(path))
    if is_log(path):
        return True
    return path.suffix in (".jsonl", ".ndjson") and not names and _first(path) is Log


def _csv_is_log(path: Path) -> bool:
    header = _head(path).split(b"\n", 1)[0].decode("utf-8", "replace")
    return not has_sides([name.strip().strip('"') for name in header.split(",")])


def _head(path: Path) -> bytes:
    if not regular_file(path):
        return b""
    with path.open("rb") as file:
        return file.read(_LOOKED_AT)


def _first(path: Path) -> type | None:
    """What the first line of a file of rows is of: a dump, a log, or nobody knows."""
    with boundary(path, "expected rows of JSON"):
        for number, line in read_lines(path, ROW._replace(bytes=min(ROW.bytes, 64 << 20))):
            try:
                row = parse_json(line, ROW)
            except ValueError:
                return None
            if not isinstance(row, dict):
                return None
            if whose_row(row) is not None or has_sides(row):
                return Dump
            figures = sum(isinstance(value, int | float) for value in row.values())
            nested = isinstance(row.get("data", row.get("metrics")), dict)
            flat = {"key", "value"} <= row.keys() or (bool(_FLAT & row.keys()) and figures * 2 > len(row))
            return Log if nested or flat or (number > 1 and figures > 3) else None
    return None


def _dump_inside(folder: Path) -> bool:
    """Whether a folder is a run's, or holds log-probs rather than logs: a dump is more than its curves."""
    if (folder / "config.yaml").is_file() and (folder / "rollouts").is_dir():
        return True
    if next(newest(folder), None) is None:
        return True  # its reader says what was expected
    rows = (each for each in folder.rglob("*.jsonl") if each.is_file() and each.name != "metrics.jsonl")
    return any(_first(each) is Dump for each, _ in zip(rows, range(50), strict=False))


@contextlib.contextmanager
def given(path: Path) -> Iterator[Path]:
    """The file that ``path`` is: itself, or for ``-`` what comes on standard input, as a file that is gone afterwards.

    Messages then name standard input and not that file. Nothing of it is looked at here but its first bytes.
    """
    if path != STDIN:
        yield path
        return
    if sys.stdin is None or sys.stdin.isatty():
        raise MantissaError("-: standard input is a terminal; pipe a log or a dump into it")
    with tempfile.TemporaryDirectory() as folder:
        file = _received(Path(folder) / "stdin")
        try:
            yield file
        except MantissaError as error:
            raise MantissaError(str(error).replace(str(file), "standard input")) from None


def _received(path: Path) -> Path:
    size, head = 0, b""
    try:
        with path.open("wb") as file:
            while part := os.read(sys.stdin.fileno(), 1 << 20):
                head = head or part
                size += len(part)
                if size > _LARGEST_INPUT:
                    raise MantissaError(f"-: more than {_LARGEST_INPUT:,} bytes on standard input; give a file")
                file.write(part)
    except OSError as error:
        raise MantissaError(f"-: standard input: {error}; give a file") from None
    if not head.strip():
        raise MantissaError("-: standard input is empty; pipe a log or a dump into it")
    ending = next((each for magic, each in _ENDINGS.items() if head.startswith(magic)), None)
    return path.rename(path.with_name("stdin" + (ending or _text_ending(head))))


def _text_ending(head: bytes) -> str:
    """Of a text: rows of JSON, one document, a table, an event file, or lines that a program printed."""
    first = head.lstrip()[:1]
    line = head.splitlines()[0]
    if len(head) >= 12 and head[4:8] == bytes(4) and head[:4] != bytes(4):
        return ".tfevents"
    if first == b"[":
        return ".json"
    if first == b"{":
        try:
            parse_json(line)
        except ValueError:
            return ".json" if not line.startswith(b"{'") else ".log"
        return ".jsonl" if head.strip().count(b"\n") else ".json"
    return ".csv" if line.count(b",") and b": " not in line and b" - " not in line.split(b",")[0] else ".log"
