"""The picture of a bench: a step's time and its ratio to fp32 by parameters, and the scenarios' losses."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mantissa.base.files import atomic_file
from mantissa.bench.rows import Row
from mantissa.bench.workload import short
from mantissa.runs.plots import figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"fp32": "#555555", "bf16": "#0072b2", "fp16": "#d55e00"}  # told apart in every colour vision
MARKERS = {"fp32": "o", "bf16": "s", "fp16": "^"}


def draw(path: Path, rows: Sequence[Row]) -> bool:
    """Draw what the rows hold into ``path`` (PNG); False, and no file, where there are none."""
    sizes = [row for row in rows if row["scenario"] == "size"]
    scenarios = [row for row in rows if row["scenario"] != "size"]
    panels: list[Any] = []
    if len({row["parameters"] for row in sizes}) > 1:
        panels.append(lambda axes: _step_time(axes, sizes))
        if any(row["speed_up"] is not None and row["precision"] != "fp32" for row in sizes):
            panels.append(lambda axes: _speed_up(axes, sizes))
    if scenarios:
        panels += [lambda axes: _durations(axes, scenarios)] if len(panels) == 0 else []
        panels.append(lambda axes: _losses(axes, scenarios))
    if not panels:
        return False
    with figure(4.3 * len(panels) + 0.4, 4.3, printed=True) as drawing:
        for panel, axes in zip(panels, drawing.subplots(1, len(panels), squeeze=False)[0], strict=True):
            panel(axes)
        drawing.suptitle(_title(rows, 52 * len(panels)), x=0.01, ha="left", fontsize=10)
        with atomic_file(path) as temporary:
            drawing.savefig(temporary, format="png", dpi=150, facecolor="white")
    return True


def _title(rows: Sequence[Row], width: int) -> str:
    row = rows[0]
    threads = "" if row["memory_measure"] == "torch's allocator" else f", {row['threads']} threads"
    models = ", ".join(dict.fromkeys(_family(row) for row in rows))
    where = f"{models} on {row['device']}{threads}, torch {row['torch']}; medians and quartiles of {row['repeats']}"
    where += " repeats"
    return "\n".join(textwrap.wrap(where, width))


def _family(row: Row) -> str:
    return str(row["model"]).partition(" of ")[0]


def _precisions(rows: Sequence[Row]) -> dict[str, str]:
    """Precision -> its label, with the kernels that computed it."""
    return {row["precision"]: f"{row['precision']}, {row['backend']}" for row in rows}


def _step_time(axes: Axes, rows: Sequence[Row]) -> None:
    for precision, label in _precisions(rows).items():
        mine = sorted((r for r in rows if r["precision"] == precision), key=lambda r: r["parameters"])
        _points(axes, precision, label, [r["parameters"] for r in mine], mine, "duration", "_s", 1e3, linestyle="-")
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds")
    axes.set_title(f"One training step of {rows[0]['batch_size']} samples")
    _parameter_axis(axes)


def _speed_up(axes: Axes, rows: Sequence[Row]) -> None:
    values = [1.0]
    for precision, label in _precisions(rows).items():
        mine = sorted((r for r in rows if r["precision"] == precision and r["speed_up"]), key=lambda r: r["parameters"])
        if precision != "fp32" and mine:
            _points(axes, precision, label, [r["parameters"] for r in mine], mine, "speed_up", linestyle="-")
            values += [r[f"speed_up_{q}"] for r in mine for q in ("low", "high")]
    axes.axhline(1, color=COLOURS["fp32"], linewidth=1.2)
    axes.annotate("fp32", (1, 1), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=COLOURS["fp32"])
    axes.set_yscale("log")
    axes.set_ylim(min(0.5, min(values) / 1.1), max(2.0, max(values) * 1.1))
    axes.set_ylabel("times fp32's speed (above the line: faster)")
    axes.set_title("Speed-up over fp32")
    _parameter_axis(axes)


def _points(axes: Axes, precision: str, label: str, x: Sequence[float], rows: Sequence[Row], column: str,
            unit: str = "", scale: float = 1.0, **style: Any) -> None:  # fmt: skip
    """A column's medians at ``x``, its quartiles as bars."""
    middle, low, high = ([scale * row[f"{column}{q}{unit}"] for row in rows] for q in ("", "_low", "_high"))
    errors = [np.subtract(middle, low), np.subtract(high, middle)]
    style = {"linestyle": ""} | style  # scenarios are no series: only sizes are joined
    axes.errorbar(x, middle, errors, label=label, color=COLOURS[precision], marker=MARKERS[precision], markersize=4.5,
                  elinewidth=1, capsize=2, **style)  # fmt: skip


def _parameter_axis(axes: Axes) -> None:
    """Parameters across, and plain numbers up, both on log axes."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.set_xlabel("parameters")
    axes.legend(loc="best")
    low, high = axes.yaxis.get_view_interval()
    if high / low < 300:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    for axis, say in ((axes.xaxis, short), (axes.yaxis, "{:g}".format)):
        axis.set_major_formatter(FuncFormatter(lambda value, _, say=say: say(value)))
        axis.set_minor_formatter(NullFormatter())


def _durations(axes: Axes, rows: Sequence[Row]) -> None:
    _by_scenario(axes, rows, "duration", "_s")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("seconds")
    axes.set_title("Duration of the training")


def _losses(axes: Axes, rows: Sequence[Row]) -> None:
    _by_scenario(axes, rows, "final_loss", "")
    best = rows[0]["best_loss"]
    if best is not None:
        axes.axhline(best, color="#222222", linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(f"best possible, {best:g}", (1, best), xycoords=("axes fraction", "data"), ha="right",
                      va="bottom", xytext=(0, 2), textcoords="offset points", color="#222222")  # fmt: skip
        axes.set_ylim(bottom=0)
    axes.set_ylabel("mean loss on held-out samples")
    axes.set_title(f"Loss after each scenario, {short(rows[0]['parameters'])} parameters")


def _by_scenario(axes: Axes, rows: Sequence[Row], column: str, unit: str) -> None:
    """A point with quartiles for each scenario and precision, side by side."""
    names = list(dict.fromkeys(row["scenario"] for row in rows))
    labels = _precisions(rows)
    for i, (precision, label) in enumerate(labels.items()):
        mine = [row for row in rows if row["precision"] == precision]
        x = [names.index(row["scenario"]) + 0.18 * (i - (len(labels) - 1) / 2) for row in mine]
        _points(axes, precision, label, x, mine, column, unit)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.grid(axis="x", visible=False)
    axes.legend(loc="best")
