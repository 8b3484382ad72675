"""Run folders that someone spoilt, by structure: any file, any field, any kind of thing in a file's place.

``spoil`` knows no case by name: it picks a path of the folder and what is done to it, or a field somewhere inside one
of its records and what stands there instead. The same seed spoils the same folder in the same way.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from mantissa.training.checkpoint import _digest

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 0.0, -0.0, 1e-320, 1e308, -1e308, 1e39, "NaN",
    "Infinity", "-Infinity", "", "x", "../../x", "\0", "\ud800", "\u202e\x1b[2J", "9" * 5000, "x" * 100_000, [], {},
    [[]], [None], {"": {}}, [1, "a", None], {"a": [1, {"b": None}]},
]  # fmt: skip


def spoil(folder: Path, outside: Path, seed: int) -> list[str]:
    """Spoil the run in ``folder`` in one to three ways, and say which. ``outside``: a folder that links lead to."""
    rng, said = random.Random(seed), []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        paths = sorted(path for path in folder.rglob("*") if not path.is_symlink())
        records = [path for path in paths if path.is_file() and path.suffix in (".json", ".jsonl", ".yaml", ".parquet")]
        if records and rng.random() < 0.65:
            path = rng.choice(records)
            what = _record(path, rng)
        elif paths:
            path = rng.choice(paths)
            what = _thing(path, outside, rng)
        else:
            break
        said.append(f"{path.relative_to(folder)}: {what}")
    return said


def _thing(path: Path, outside: Path, rng: random.Random) -> str:
    """Something else in the place of a file or folder, or its bytes changed."""
    content = path.read_bytes() if path.is_file() else b""
    kinds = ["gone", "link", "dangling", "loop", "pipe", "folder", "file"]
    kinds += ["cut", "flipped", "noise", "doubled", "unreadable"] if content else []
    kind = rng.choice(kinds)
    if kind in ("cut", "flipped", "noise", "doubled"):
        at = rng.randrange(len(content))
        path.write_bytes({
            "cut": content[:at], "flipped": content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))])
            + content[at + 1 :], "noise": rng.randbytes(200), "doubled": content * 2,
        }[kind])  # fmt: skip
        return kind
    if kind == "unreadable":
        path.chmod(0)
        return kind
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    makes: dict[str, Callable[[], object]] = {
        "gone": lambda: None, "link": lambda: path.symlink_to(rng.choice(sorted(outside.iterdir()))),
        "dangling": lambda: path.symlink_to(outside / "absent"), "loop": lambda: path.symlink_to(path),
        "pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "file": lambda: path.write_bytes(b"file"),
    }  # fmt: skip
    makes[kind]()
    return kind


def _record(path: Path, rng: random.Random) -> str:
    """Another value, key or row somewhere in a record, which is written in its own format again."""
    if path.suffix == ".parquet":
        return _parquet(path, rng)
    text = path.read_text(errors="replace")
    try:
        if path.suffix == ".jsonl":
            lines = text.splitlines() or ["{}"]
            at = rng.randrange(len(lines))
            if rng.random() < 0.15:
                lines.insert(at, rng.choice([lines[rng.randrange(len(lines))], "", "[" * 10**5, "{", "null"]))
                what = "a line more"
            else:
                row = json.loads(lines[at])
                what = _change(row, rng)
                lines[at] = json.dumps(row)
            path.write_text("\n".join(lines) + "\n")
            return what
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        what = _change(values, rng)
        if path.name == "state.json" and isinstance(values, dict) and rng.random() < 0.8:
            values["digest"] = _digest(values)  # as who means it would
        path.write_text(json.dumps(values) if path.suffix == ".json" else yaml.safe_dump(values, allow_unicode=True))
        return what
    except (ValueError, yaml.YAMLError, AttributeError, RecursionError):  # spoilt already
        path.write_bytes(text.encode(errors="replace")[: len(text) // 2])
        return "halved"


def _change(root: Any, rng: random.Random) -> str:
    """Change one place inside ``root``: as likely near its top as deep down."""
    node, trail = root, ""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        if not keys:
            return f"{trail}: nothing to change"
        key = rng.choice(keys)
        trail = f"{trail}.{key}"
        if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.3:
            break
        node = node[key]
    kind = rng.choice(("other", "other", "other", "gone", "deep", "renamed"))
    if kind == "gone":
        del node[key]
    elif kind == "renamed" and isinstance(node, dict):
        node[str(rng.choice(["", "x/y", "\x1b", str(key).upper()]))] = node.pop(key)
    elif kind == "deep":
        for _ in range(rng.choice((3, 40, 400))):
            node[key] = [node[key]] if rng.random() < 0.5 else {"a": node[key]}
    else:
        node[key] = rng.choice(VALUES)
    return f"{trail}: {kind}"


def _parquet(path: Path, rng: random.Random) -> str:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
        name = rng.choice(table.schema.names)
        kind = rng.choice(("dropped", "other type", "other value", "twice", "empty"))
        at = table.schema.names.index(name)
        if kind == "dropped":
            table = table.drop_columns([name])
        elif kind == "twice":
            table = table.append_column(name, table[name])
        elif kind == "empty":
            table = table.slice(0, 0)
        else:
            values = table[name].to_pylist()
            odd = rng.choice(
                [None, -1, 2**62, 1e308, float("nan"), "", "x" * 10**5, True, [], [None], [1e38], [-(2**40)]]
            )
            values = [odd] * len(values) if kind == "other type" else [odd, *values[1:]]
            made = pyarrow.array(values, None if kind == "other type" else table.schema.field(name).type)
            table = table.set_column(at, name, made)
        pyarrow.parquet.write_table(table, path)
        return f"{name}: {kind}"
    except (OSError, KeyError, ValueError, TypeError, OverflowError, pyarrow.ArrowException):
        path.write_bytes(path.read_bytes()[:-20])
        return "cut"
