"""The account of a load: what its folder says, in figures and rows.

Everything is read again from disk: what was committed from the database, what the workers say that they committed from
their logs, latencies, memory and faults from the events. Of a job that is done

- *lost* is a trajectory that a worker's log has and the database has not, and what a job has too few;
- *doubled* is a program whose trajectory the database has twice in a job, under whatever ids;
- *foreign* is one that the database has and no log.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from soak_job import BUFFER, PHASES, SIZES, Row

from mantissa.base.files import JsonLines
from mantissa.base.provenance import stamp
from mantissa.bench.rows import crossover
from mantissa.bench.runner import quartiles, speed_up
from mantissa.genesis.worldmodel import SQLiteBuffer
from mantissa.mismatch.intervals import Estimate, student_interval

EVENTS = "events.jsonl"
_WARM = 2  # jobs of a process before its memory counts
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_SUMMED = ("trajectories", "executions", "steps", "overflows", "retried", "skipped", "guard_events", "hung")


@dataclass(frozen=True)
class Account:
    """Trajectories; ``intact``: SQLite's own check of the file."""

    stored: int
    logged: int
    lost: int
    doubled: int
    foreign: int
    intact: bool

    @property
    def good(self) -> bool:
        return self.intact and not (self.lost or self.doubled or self.foreign)


def account(folder: Path, logs: Sequence[Row], sizes: Mapping[str, str]) -> Account:
    """Count in the database against the workers' logs. ``sizes``: of the jobs that are done, by name."""
    with SQLiteBuffer(folder / BUFFER, 10**8) as buffer:
        rows = buffer.database.read("SELECT id, agent, task FROM trajectories")
        intact = buffer.database.read("PRAGMA integrity_check") == [("ok",)]
    there, logged = {row[0] for row in rows}, {id: row["job"] for row in logs for id in row["ids"].split()}
    counts = Counter(logged.values())
    missing = sum(max(0, SIZES[size].trajectories - counts[job]) for job, size in sizes.items())
    programs = {(job, task, id.rpartition("-")[2]) for id, job, task in rows}
    foreign = sum(id not in logged for id, job, _ in rows if job in sizes)
    lost = len(logged.keys() - there) + missing
    return Account(len(rows), len(logged), lost, len(rows) - len(programs), foreign, intact)


@dataclass(frozen=True)
class Report:
    """What became of a load. ``commits``: seconds of each; ``leak``, ``own_leak``: memory's slope in bytes a job, of
    the workers and of the process that hands out the jobs."""

    config: dict[str, Any]
    events: list[Row]
    account: Account
    commits: list[float]
    leak: Estimate
    own_leak: Estimate

    def of(self, event: str) -> list[Row]:
        return [row for row in self.events if row["event"] == event]

    @property
    def failed(self) -> list[str]:
        """Jobs that were given up and not done since."""
        done = {row["job"] for row in self.of("done")}
        return sorted({row["job"] for row in self.of("failed")} - done)

    @property
    def good(self) -> bool:
        return self.account.good and not self.failed

    @property
    def speeds(self) -> dict[int, Estimate]:
        """Trained samples of a job -> fp32's processor time over that of the precision asked for."""
        found = {}
        for size in self.config["sizes"] if self.config["precision"] != "fp32" else ():
            mine = [row for row in self.of("done") if row["size"] == size]
            if mine:
                samples = SIZES[size].trajectories * SIZES[size].epochs
                found[samples] = speed_up([r["control_train_cpu_s"] for r in mine], [r["train_cpu_s"] for r in mine])
        return dict(sorted(found.items()))

    @property
    def figures(self) -> Row:
        """Of the whole load: throughput, latencies in seconds, events."""
        done, spans = self.of("done"), [row["s"] for row in self.of("iteration")]
        wall = sum(spans)
        latency = {name: _quantile([row["latency_s"] for row in done], q) for name, q in _QUANTILES.items()}
        totals = {name: sum(row[name] for row in done) for name in _SUMMED}
        return {
            "jobs_done": len(done), "jobs_failed": len(self.failed), "wall_s": wall,
            "jobs_per_minute": 60 * len(done) / wall if wall else math.nan,
            "trajectories_per_s": totals["trajectories"] / wall if wall else math.nan,
            **{f"latency_s_{name}": value for name, value in latency.items()},
            "iteration_s_median": _quantile(spans, 0.5), "iteration_s_max": _quantile(spans, 1),
            **{f"commit_s_{name}": _quantile(self.commits, q) for name, q in _QUANTILES.items()},
            "predict_s_median": _quantile([row["predict_median_s"] for row in done], 0.5),
            **totals, "attempts_failed": len(self.of("attempt failed")),
            **{f"fault_{kind}": n for kind, n in sorted(Counter(row["kind"] for row in self.of("fault")).items())},
        }  # fmt: skip

    @property
    def sentences(self) -> list[str]:
        """The account, and what else is worth a sentence."""
        a, f = self.account, self.figures
        said = [
            "nothing lost, nothing written twice" if a.good else "the account does not add up",
            f"{a.stored:,} trajectories in the database, {a.logged:,} in the workers' logs: {a.lost} lost, {a.doubled} "
            f"doubled, {a.foreign} of nobody; the file is {'whole' if a.intact else 'damaged'}",
            f"{f['jobs_done']} jobs done, {f['jobs_failed']} given up; {f['jobs_per_minute']:.1f} a minute, "
            f"{f['trajectories_per_s']:.1f} trajectories/s",
            f"a job took {f['latency_s_p50']:.1f} s (median), {f['latency_s_p90']:.1f} (90%), {f['latency_s_p99']:.1f} "
            f"(99%); an iteration at most {f['iteration_s_max']:.0f} s",
            f"memory of the workers: {_leak(self.leak)}; of the process above them: {_leak(self.own_leak)}",
            f"overflow in {f['overflows']} of {f['steps']} steps, {f['retried']} retried, {f['skipped']} skipped, "
            f"{f['guard_events']} events of the guard",
        ]  # fmt: skip
        faults = [f"{n.removeprefix('fault_')} {f[n]}" for n in f if n.startswith("fault_")]
        faults += [f"programs that never end {f['hung']}"] if f["hung"] else []
        again = f"{f['attempts_failed']} attempts failed and were made again"
        said += [f"faults: {', '.join(faults)}; {again}"] if faults else []
        said += [f"given up: {', '.join(self.failed)}"] if self.failed else []
        return said + ([self.crossover] if self.speeds else [])

    @property
    def crossover(self) -> str:
        """The size from which on the precision asked for trains faster than fp32, or that there is none."""
        table, backend = self.speeds, self.of("done")[0]["backend"]
        name, found = f"{self.config['precision']} ({backend})", crossover(table)
        if found.first is not None:
            return f"{name} trains faster than fp32 from {found.first} trained samples a job on"
        best = max(table, key=lambda size: table[size].value)
        return f"{name} trains faster than fp32 at no size; at best {table[best].value:.2f}x as fast ({best} samples)"

    @property
    def rows(self) -> list[Row]:
        """One of the whole load, and one a size."""
        whole = {"case": "load", **self.figures, **asdict(self.account)}
        whole |= self.leak.fields("leak", "_bytes_per_job") | self.own_leak.fields("own_leak", "_bytes_per_job")
        common = {"benchmark": "soak", "requested": self.config["precision"]}
        common |= {name: self.config[name] for name in ("jobs", "iterations", "hidden_dim", "seed")}
        common["memory_measure"] = "resident memory of each worker after a job"
        common |= {"faults": ",".join(self.config["faults"]), "active": (self.of("done") or [{}])[0].get("active")}
        rows = [whole]
        for size in self.config["sizes"]:
            mine = [row for row in self.of("done") if row["size"] == size]
            if not mine:
                continue
            row = {"case": size, "samples": SIZES[size].trajectories * SIZES[size].epochs, "jobs_done": len(mine)}
            for name in ("latency", *PHASES, "train_cpu"):
                row |= quartiles([each[f"{name}_s"] for each in mine]).fields(name, "_s")
            row |= self.speeds[row["samples"]].fields("speed_up") if self.speeds else {}
            row["loss_over_fp32_max"] = max(abs(r["loss"] / r.get("control_loss", r["loss"]) - 1) for r in mine)
            rows.append(row)
        return [stamp("cpu") | common | row for row in rows]


def report_of(config: dict[str, Any], folder: Path) -> Report:
    """Read what a load left in ``folder``."""
    events = JsonLines(folder / EVENTS).read()
    done = [row for row in events if row["event"] == "done"]
    memory: dict[int, list[float]] = {}
    for row in done:
        memory.setdefault(row["pid"], []).append(row["rss_bytes"])
    own = [[row["own_rss_bytes"] for row in done]]
    logs = [row for path in sorted((folder / "workers").glob("*.jsonl")) for row in JsonLines(path).read()]
    found = account(folder, logs, {row["job"]: row["size"] for row in done})
    return Report(config, events, found, [row["s"] for row in logs], leak(list(memory.values())), leak(own))


def leak(series: Sequence[Sequence[float]]) -> Estimate:
    """The slope of memory over a process's jobs, one for all processes, each with its own level; bytes a job.

    Least squares after each process's mean is taken off; Student's interval. A process's first two jobs do not count,
    and one of fewer than four jobs does not either. Memory comes in steps, so the interval is rather too narrow.
    """
    kept = [np.asarray(each[_WARM:], np.float64) for each in series if len(each) >= _WARM + 2]
    freedom = sum(map(len, kept)) - len(kept) - 1
    if freedom < 1:
        return Estimate(math.nan, None, None, "too few jobs a process")
    x = np.concatenate([np.arange(len(each)) - (len(each) - 1) / 2 for each in kept])
    y = np.concatenate([each - each.mean() for each in kept])
    slope = float(x @ y / (x @ x))
    error = math.sqrt(float(np.square(y - slope * x).sum()) / freedom / float(x @ x))
    return Estimate(slope, *student_interval(slope, error, freedom), f"{len(kept)} processes")


def _leak(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return "no slope (too few jobs a process)"
    values = [f"{value / 2**20:+.3f}" for value in (found.value, found.low, found.high)]
    said = f"{values[0]} MiB a job (95%: {values[1]} to {values[2]})"
    return f"it grows, {said}" if found.low > 0 else f"no growth is shown, {said}"


def _quantile(values: Sequence[float], q: float) -> float:
    return float(np.quantile(values, q)) if values else math.nan


SIZE_HEADER = ("size", "jobs", "latency", *PHASES, "speed against fp32", "loss against fp32")


def size_rows(report: Report) -> list[list[str]]:
    """A line under ``SIZE_HEADER`` for each size: medians in seconds."""
    lines = []
    for row in report.rows[1:]:
        times = [f"{row[f'{name}_s']:.2f} s" for name in ("latency", *PHASES)]
        speed = "-"
        if "speed_up" in row:
            speed = f"{row['speed_up']:.2f}x ({row['speed_up_low']:.2f}..{row['speed_up_high']:.2f})"
        lines.append([row["case"], str(row["jobs_done"]), *times, speed, f"within {row['loss_over_fp32_max']:.2%}"])
    return lines
