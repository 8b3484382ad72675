"""What the rows come to, in sentences and tables for a screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mantissa.bench.rows import Row
from mantissa.bench.timing import Spread, crossover
from mantissa.bench.workload import short

if TYPE_CHECKING:
    from rich.table import Table

SIMULATION = (
    "Simulated precision costs time, here and on every CPU: values are rounded in software and multiplied in fp32, so "
    "it is never faster than fp32 by its format. It is for finding out before a GPU is paid for what the format does "
    "to a model: overflow, skipped steps, loss scales and the final loss are the format's own. Its speed and memory "
    "say nothing of a GPU's."
)


def speed_ups(rows: Sequence[Row], precision: str) -> dict[int, Spread]:
    """Parameters -> speed-up over fp32 of the sweep's rows in ``precision``."""
    return {
        row["parameters"]: Spread(row["speed_up"], row["speed_up_low"], row["speed_up_high"])
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


def crossover_sentence(precision: str, backend: str, table: dict[int, Spread]) -> str:
    """One precision's crossover. ``table``: parameters -> speed-up."""
    found, sizes = crossover(table), sorted(table)
    name = f"{precision} ({backend})"
    if len(sizes) == 1:
        return f"{name} takes {_times(1 / table[sizes[0]].median)} fp32's time a step, at {short(sizes[0])} parameters."
    others = ", ".join(short(size) for size in found.isolated)
    if found.first is None:
        best = max(sizes, key=lambda size: table[size].median)
        text = f"{name} has no size from which on it is faster than fp32, of {short(sizes[0])} to {short(sizes[-1])} "
        text += f"parameters; at best it is {_times(table[best].median)} as fast (at {short(best)})"
        return text + (f"; faster at {others} only." if others else ".")
    if found.before is None:
        text = f"{name} is faster than fp32 at every size measured, from {short(found.first)} parameters on"
    else:
        before = f"{_times(table[found.before].median)} as fast at {short(found.before)}"
        text = f"{name} is faster than fp32 from {short(found.first)} parameters on ({before}"
        text += f", {_times(table[found.first].median)} at {short(found.first)}"
        text += f"; also at {others})" if others else ")"
    return text + f"; at {short(sizes[-1])} it is {_times(table[sizes[-1]].median)} as fast."


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def scenario_table(rows: Sequence[Row]) -> Table:
    """The scenarios' rows: time, memory, loss."""
    table = _table("scenario", "precision", "duration", "samples/s", "x fp32's speed", "memory", "loss", "best",
                   "skipped", "retried")  # fmt: skip
    for row in rows:
        if row["scenario"] != "size":
            table.add_row(
                row["scenario"],
                _precision(row),
                _seconds(row["duration_s"]),
                f"{row['samples_per_s']:,.0f}",
                _speed(row),
                _bytes(row["peak_memory_bytes"]),
                f"{row['final_loss']:.4f}",
                "not known" if row["best_loss"] is None else f"{row['best_loss']:.4f}",
                f"{row['overflow_rate']:.1%}",
                str(row["retried"]),
            )
    return table


def size_table(rows: Sequence[Row]) -> Table:
    """The sweep's rows: one step's time and memory by parameters."""
    table = _table("parameters", "batch", "precision", "one step", "samples/s", "x fp32's speed", "peak memory")
    for row in rows:
        if row["scenario"] == "size":
            table.add_row(
                short(row["parameters"]),
                str(row["batch_size"]),
                _precision(row),
                _seconds(row["duration_s"]),
                f"{row['samples_per_s']:,.0f}",
                _speed(row),
                _bytes(row["peak_memory_bytes"]),
            )
    return table


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        text = column in ("scenario", "precision")
        table.add_column(column, justify="left" if text else "right", no_wrap=True)
    return table


def _precision(row: Row) -> str:
    return f"{row['active']} {row['backend']}"


def _speed(row: Row) -> str:
    if row["speed_up"] is None:
        return "-"
    return f"{row['speed_up']:.2f} ({row['speed_up_low']:.2f}..{row['speed_up_high']:.2f})"


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _bytes(count: int | None) -> str:
    if count is None:
        return "-"
    power = min(3, int(math.log(count, 1000))) if count >= 1000 else 0
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"
