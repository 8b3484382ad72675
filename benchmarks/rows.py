"""Benchmark rows: one JSON object a line, with everything needed to read the number later."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

from mantissa.base.provenance import stamp
from mantissa.runs.rows import lines

ROOT = Path(__file__).resolve().parents[1]


def append(file: str, rows: list[dict[str, Any]], device: str) -> Path:
    """Append ``rows`` to ``results/file`` (under ``$OUT`` instead where that is set), stamped; returns the path.

    A row that has a commit is of another process, which stamped it.

    A row whose precision did not engage (``active`` is another format than ``requested``) is refused, and all with it.
    """
    for row in rows:
        if row.get("requested") != row.get("active"):
            raise SystemExit(f"refused: {row['requested']} was requested and {row['active']} was active: {row}")
    folder = Path(os.environ.get("OUT") or ROOT / "results")
    folder.mkdir(parents=True, exist_ok=True)
    common = stamp(device) | {"time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    path = folder / file
    with path.open("a") as out:
        out.write(lines(row if "commit" in row else common | row for row in rows))
    return path
