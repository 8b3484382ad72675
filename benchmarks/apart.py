"""What it costs to read parquet in a process of its own: the same rows read there, here, and by pyarrow alone.

Two files: a data set (a problem, its answer, a source), and a dump (tokens, two lists of log-probs). Each reading is a
fresh process that counts the rows; the ways take turns. A row a file: median seconds, and processor seconds of all
processes, of each way, and the median ratio of the first to pyarrow's own in the same turn.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from runner import Rows, case

READ = """
import resource, sys, time
began = time.perf_counter()
from mantissa.base.readers import child, parquet
way, path = sys.argv[1:]
child.inside = way == "here"
if way == "pyarrow":
    import pyarrow.parquet
    batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256, use_threads=False)
    rows = (row for batch in batches for row in batch.to_pylist())
else:
    rows = parquet.read_rows(parquet.Path(path))
count = sum(1 for _ in rows)
child.close_idle()
took = time.perf_counter() - began
used = [resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print([count, took, sum(each.ru_utime + each.ru_stime for each in used)])
"""
WAYS = ("apart", "here", "pyarrow")


def write(folder: Path, rows: int) -> dict[str, Path]:
    """The two files."""
    import pyarrow
    import pyarrow.parquet

    draw = random.Random(0)
    texts = [" ".join(draw.choices(["sum", "of", "è", "the", "42"], k=40)) for _ in range(1000)]
    tables: dict[str, dict[str, list[Any]]] = {
        "data set": {"problem": [f"{n}: {draw.choice(texts)}" for n in range(rows)],
                     "answer": [str(n % 977) for n in range(rows)], "source": ["made"] * rows},
        "dump": {"prompt_length": [4] * rows, "tokens": [[n % 32_000 + k for k in range(20)] for n in range(rows)],
                 "rollout_logp": [[-draw.random()] * 16 for _ in range(rows)],
                 "learner_logp": [[-draw.random()] * 16 for _ in range(rows)]},
    }  # fmt: skip
    paths = {name: folder / f"{name}.parquet" for name in tables}
    for name, columns in tables.items():
        pyarrow.parquet.write_table(pyarrow.table(columns), paths[name], row_group_size=10_000)
    return paths


def read(path: Path, way: str) -> tuple[int, float, float]:
    """Rows, seconds, and processor seconds."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", READ, way, str(path)], capture_output=True, text=True, check=True
    )
    count, took, used = json.loads(done.stdout)
    return count, took, used


def measure(path: Path, pairs: int) -> dict[str, Any]:
    """Of one file."""
    turns = [{way: read(path, way) for way in WAYS} for _ in range(pairs)]
    row: dict[str, Any] = {"file": path.stem, "rows": turns[0]["apart"][0], "mib": path.stat().st_size >> 20}
    for place, name in ((1, "s"), (2, "processor_s")):
        row[name] = {way: round(statistics.median(turn[way][place] for turn in turns), 2) for way in WAYS}
        row[f"ratio_{name}"] = round(
            statistics.median(turn["apart"][place] / turn["pyarrow"][place] for turn in turns), 2
        )
    return row


@case(rows=2000, pairs=1)
def apart(rows: int = 200_000, pairs: int = 5) -> Rows:
    with tempfile.TemporaryDirectory() as folder:
        for path in write(Path(folder), rows).values():
            yield {"benchmark": "apart", "pairs": pairs} | measure(path, pairs)
