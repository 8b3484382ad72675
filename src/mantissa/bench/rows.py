"""The rows: one for each scenario or size and precision, the same in CSV and JSON."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mantissa.base.files import write_atomically
from mantissa.base.provenance import stamp
from mantissa.bench.workload import short
from mantissa.mismatch.intervals import Estimate
from mantissa.runs.live import seconds_text
from mantissa.runs.rows import Row

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS: dict[str, str] = {
    "scenario": "warmup, standard or stress; `size` for a row of the sweep over sizes",
    "precision": "requested",
    "active": "the format that computed, proved by the probe; always as requested, or the row is refused",
    "backend": "native: the device's own arithmetic; simulated: rounded in fp32",
    "device": "the processor's name, a CPU's with family, model and stepping",
    "model": "the factory, or the built-in family",
    "parameters": "trained parameters",
    "batch_size": "samples a step",
    "samples": "samples in the training set (scenarios)",
    "epochs": "passes over it (scenarios)",
    "steps": "optimiser steps in one repeat (scenarios)",
    "duration_s": "seconds of all steps, data ready on the device (scenarios), or of one step (sizes): median",
    "duration_low_s": "its lower quartile over the repeats",
    "duration_high_s": "its upper quartile",
    "samples_per_s": "samples trained on / duration",
    "speed_up": "fp32's duration / this one's, taken within each repeat: median",
    "speed_up_low": "its lower quartile",
    "speed_up_high": "its upper quartile",
    "peak_memory_bytes": "what making the model and 3 steps need at most, on top of what was there",
    "memory_measure": "how that was measured: torch's allocator (GPU), or a fresh process's resident memory (CPU)",
    "final_loss": "mean loss on held-out samples after training, in this precision; median over repeats (scenarios)",
    "final_loss_low": "its lower quartile over the repeats, each of which has its own seed",
    "final_loss_high": "its upper quartile",
    "best_loss": "the lowest expected loss any model can reach, where it is known",
    "excess_loss": "final_loss - best_loss",
    "overflow_rate": "skipped / attempted optimiser steps, over all repeats",
    "retried": "steps that overflowed and then stepped at a lower loss scale, over all repeats",
    "repeats": "interleaved repeats behind medians and quartiles",
    "threads": "torch's CPU threads",
    "torch": "version",
    "mantissa": "version",
    "commit": "of the checkout that Mantissa was imported from, as it was then; empty where it is installed",
    "dirty": "whether that code had uncommitted edits",
    "source": "a hash of the package's files as they were imported",
    "source_changed": "whether they were other files when the row was made",
    "cpu_flags": "which of the instructions that numbers depend on the processor has",
    "cpu_capability": "those that torch uses of them",
    "settings": "environment variables by which libraries choose instructions and threads, where they are set",
    "evidence": "what the probe saw",
    "time": "when the row was made, UTC",
}  # fmt: skip


def common(device: str) -> Row:
    """What every row of one call has in common."""
    cuda = torch.device(device).type == "cuda"
    return stamp(device) | {"memory_measure": "torch's allocator" if cuda else "resident memory of a fresh process"}


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All rows under a header of ``COLUMNS``; what does not apply is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


SIMULATION = (
    "Simulated precision costs time, here and on every CPU: values are rounded in software and multiplied in fp32, so "
    "it is never faster than fp32 by its format. It is for finding out before a GPU is paid for what the format does "
    "to a model: overflow, skipped steps, loss scales and the final loss are the format's own. Its speed and memory "
    "say nothing of a GPU's."
)


@dataclass(frozen=True)
class Crossover:
    """From which size on a precision is faster than fp32.

    A size counts as faster where three rounds in four were (the speed-up's lower quartile is above 1). ``first``: the
    smallest size from which on *every* larger one measured is faster; None where the largest is not. ``before``: the
    size just below it. ``isolated``: faster sizes below a slower one, which are no crossover.
    """

    first: int | None
    before: int | None
    isolated: tuple[int, ...]


def crossover(speed_ups: Mapping[int, Estimate]) -> Crossover:
    """Find it in a table of parameters -> speed-up over fp32."""
    sizes = sorted(speed_ups)
    faster = [_faster(speed_ups[size]) for size in sizes]
    start = len(sizes)
    while start > 0 and faster[start - 1]:
        start -= 1
    isolated = tuple(size for size, fast in zip(sizes[:start], faster, strict=False) if fast)
    if start == len(sizes):
        return Crossover(None, None, isolated)
    return Crossover(sizes[start], sizes[start - 1] if start else None, isolated)


def _faster(speed: Estimate) -> bool:
    return speed.low is not None and speed.low > 1


def speed_ups(rows: Sequence[Row], precision: str) -> dict[int, Estimate]:
    """Parameters -> speed-up over fp32 of the sweep's rows in ``precision``."""
    return {
        row["parameters"]: Estimate(row["speed_up"], row["speed_up_low"], row["speed_up_high"])
        for row in rows
        if row["scenario"] == "size" and row["precision"] == precision and row["speed_up"] is not None
    }


def crossover_sentences(rows: Sequence[Row]) -> list[str]:
    """For each precision beside fp32: from which size on it is faster, or that it is not, with the numbers."""
    sentences = []
    for precision in dict.fromkeys(row["precision"] for row in rows if row["precision"] != "fp32"):
        table = speed_ups(rows, precision)
        if table:
            backend = next(row["backend"] for row in rows if row["precision"] == precision)
            sentences.append(crossover_sentence(precision, backend, table))
    return sentences


def crossover_sentence(precision: str, backend: str, table: dict[int, Estimate]) -> str:
    """One precision's crossover. ``table``: parameters -> speed-up."""
    found, sizes = crossover(table), sorted(table)
    name = f"{precision} ({backend})"
    if len(sizes) == 1:
        return f"{name} takes {_times(1 / table[sizes[0]].value)} fp32's time a step, at {short(sizes[0])} parameters."
    others = ", ".join(short(size) for size in found.isolated)
    if found.first is None:
        best = max(sizes, key=lambda size: table[size].value)
        text = f"{name} has no size from which on it is faster than fp32, of {short(sizes[0])} to {short(sizes[-1])} "
        text += f"parameters; at best it is {_times(table[best].value)} as fast (at {short(best)})"
        return text + (f"; faster at {others} only." if others else ".")
    if found.before is None:
        text = f"{name} is faster than fp32 at every size measured, from {short(found.first)} parameters on"
    else:
        before = f"{_times(table[found.before].value)} as fast at {short(found.before)}"
        text = f"{name} is faster than fp32 from {short(found.first)} parameters on ({before}"
        text += f", {_times(table[found.first].value)} at {short(found.first)}"
        text += f"; also at {others})" if others else ")"
    return text + f"; at {short(sizes[-1])} it is {_times(table[sizes[-1]].value)} as fast."


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def scenario_table(rows: Sequence[Row]) -> Table:
    """The scenarios' rows: time, memory, loss. Two lines a row, so that 80 columns hold it."""
    table = _table("scenario", "precision", "duration", "samples/s", "x fp32's\nspeed", "memory", "loss,\nbest",
                   "skips,\nretries")  # fmt: skip
    for row in rows:
        if row["scenario"] != "size":
            best = "unknown" if row["best_loss"] is None else f"{row['best_loss']:.4f}"
            table.add_row(row["scenario"], *_measured(row), f"{row['final_loss']:.4f}\n{best}",
                          f"{row['overflow_rate']:.1%}\n{row['retried']}")  # fmt: skip
    return table


def size_table(rows: Sequence[Row]) -> Table:
    """The sweep's rows: one step's time and memory by parameters."""
    table = _table("parameters", "batch", "precision", "one step", "samples/s", "x fp32's\nspeed", "memory")
    for row in rows:
        if row["scenario"] == "size":
            table.add_row(short(row["parameters"]), str(row["batch_size"]), *_measured(row))
    return table


def _measured(row: Row) -> list[str]:
    """What both tables show: precision, time, samples a second, speed, memory."""
    speed = "-"
    if row["speed_up"] is not None:
        speed = f"{row['speed_up']:.2f}\n({row['speed_up_low']:.2f}..{row['speed_up_high']:.2f})"
    precision = f"{row['active']}\n{row['backend']}"
    rate, memory = f"{row['samples_per_s']:,.0f}", _bytes(row["peak_memory_bytes"])
    return [precision, seconds_text(row["duration_s"]), rate, speed, memory]


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        text = column in ("scenario", "precision")
        table.add_column(column, justify="left" if text else "right", no_wrap=True)
    return table


def _bytes(count: int | None) -> str:
    if count is None:
        return "-"
    power = min(3, int(math.log(count, 1000))) if count >= 1000 else 0
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"
