"""Benchmark rows: one JSON object a line, with everything needed to read the number later."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from mantissa.base.processor import cpu_model

ROOT = Path(__file__).resolve().parents[1]


def device_name(device: str) -> str:
    """The processor's name as the system gives it."""
    cuda = device == "cuda"
    return torch.cuda.get_device_name() if cuda else f"{cpu_model()} ({torch.backends.cpu.get_cpu_capability()})"


def append(file: str, rows: list[dict[str, Any]], device: str) -> Path:
    """Append ``rows`` to ``results/file`` (under ``$OUT`` instead where that is set), stamped; returns the path.

    A row whose precision did not engage (``active`` is another format than ``requested``) is refused, and all with it.
    """
    for row in rows:
        if row.get("requested") != row.get("active"):
            raise SystemExit(f"refused: {row['requested']} was requested and {row['active']} was active: {row}")
    folder = Path(os.environ.get("OUT") or ROOT / "results")
    folder.mkdir(parents=True, exist_ok=True)
    stamp = {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": _commit(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    path = folder / file
    with path.open("a") as out:
        for row in rows:
            out.write(json.dumps(stamp | row) + "\n")
    return path


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    return (commit + ("-dirty" if git("status", "--porcelain", "src") else "")) or "unknown"
