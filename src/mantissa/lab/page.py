"""A lab's page: what was asked and expected, the answer in words, figures with intervals, curves, what was not run.

Everything on it is computed from the lab's rows, so it can be made anew where the runs are gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from mantissa.base.files import disk_errors, write_atomically
from mantissa.lab.plan import Lab, Measure, exploratory, told
from mantissa.lab.rows import FAILED, Row, Rows
from mantissa.mismatch.intervals import LEVEL, Estimate
from mantissa.mismatch.tables import GAP_FIGURES
from mantissa.runs import page
from mantissa.runs.catalogue import BY_NAME
from mantissa.runs.groups import MOST, Difference, listed
from mantissa.runs.live import duration
from mantissa.runs.metrics import SERIES, Series
from mantissa.runs.page import Banner, Block, Heading, Plots, Sentence, Table, Verbatim
from mantissa.runs.plots import DASHES, INK, RUNS, Line, Plot, chart, figure, to_svg


def answers(rows: Rows) -> list[str]:
    """For each figure a sentence on which cells differ from their controls, or one on why nothing can be said."""
    lab = rows.lab
    said = exploratory(rows.all_finished)
    if not lab.file.control:
        return [*said, "No control is named, so no cell is compared with another."]
    return said + [f"{_title(measure)}: {_answer(rows, measure)}" for measure in lab.final]


def _answer(rows: Rows, measure: Measure) -> str:
    differing, alike, unknown = [], [], []
    compared, mixed = 0, 0
    for name in rows.reported:
        control = rows.lab.control_of(name)
        if control is None:
            continue
        mixed += len(rows.of_two_codes(name, control))
        found = rows.difference(measure, name, control)
        if found is None or found.apart is None:
            unknown.append(name)
            continue
        compared += 1
        if not found.apart:
            alike.append(name)
            continue
        above = found.estimate.value > (1 if found.ratio else 0)
        differing.append(f"{name} is {'above' if above else 'below'} {control} by {_of(found)}")
    said = []
    if differing:
        said.append("; ".join(differing) + ".")
    if alike:
        said.append(f"{listed(alike)} cannot be told apart from {_controls(rows.lab, alike)}.")
    if unknown:
        said.append(f"Nothing can be said of {listed(unknown)}: fewer than two seeds of both, or not finite.")
    if mixed:
        said.append(f"{mixed} pairs of a seed were left out: two codes ran them.")
    if compared >= 10:
        said.append(f"Of {compared} comparisons {compared * (1 - LEVEL):.1f} would seem to differ by chance alone.")
    return " ".join(said)


def _controls(lab: Lab, names: Sequence[str]) -> str:
    controls = list(dict.fromkeys(control for name in names if (control := lab.control_of(name))))
    return controls[0] if len(controls) == 1 else "their controls"


def _of(found: Difference) -> str:
    estimate = found.estimate
    assert estimate.low is not None
    assert estimate.high is not None
    values = [estimate.value, *sorted((estimate.low, estimate.high))]
    if found.ratio:
        values = [1 / value if estimate.value < 1 else value for value in values]
    value, low, high = abs(values[0]), *sorted(map(abs, values[1:]))
    what = "a factor of " if found.ratio else ""
    if low == high:
        return f"{what}{value:.3g}, equal in all {found.seeds} seeds"
    return f"{what}{value:.3g} ({low:.3g} to {high:.3g}, {found.seeds} seeds)"


def write_page(rows: Rows) -> Path:
    """Write the page beside the runs; returns its path."""
    path = rows.lab.page_path
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page.render(f"lab {rows.lab.name}", _blocks(rows)))
    return path


def _blocks(rows: Rows) -> list[Block]:
    lab, finished = rows.lab, rows.all_finished
    blocks = [Heading(f"Lab: {lab.name}", 1), Sentence(_where(rows, finished), "sub")]
    blocks += [Heading("Asked and expected"), *_registration(rows), Heading("What came out")]
    if not finished:
        return [*blocks, Sentence("No cell is finished yet."), *_missing(rows)]
    blocks += [Banner("In words", lines=answers(rows)), Sentence(_how(lab))]
    blocks += [Heading("Figures"), _figures(rows)]
    if lab.file.control:
        blocks += [Heading("Differences"), _differences(rows)]
    drawn = [_against(rows, x, y) for x, y in lab.against]
    drawn += [plot for metric in lab.curves for plot in _curves(rows, metric)]
    if drawn:
        blocks += [Heading("Curves"), Plots(drawn)]
    return [*blocks, Heading("Cells"), _cells(rows), *_missing(rows)]


def _registration(rows: Rows) -> list[Block]:
    was, now = rows.registered, rows.lab.file
    if not was:
        return [
            Verbatim(f"Question: {now.question}\nExpected: {now.expect}"),
            Sentence("Nothing was run yet."),
        ]
    said = f"Question: {was['question'].strip()}\nExpected: {was['expect'].strip()}"
    times = [row["time"] for row in rows.all_finished if row.get("time")]
    earlier = sum(datetime.fromisoformat(time) < datetime.fromisoformat(was["time"]) for time in times)
    when = f"after {earlier} of these runs were begun elsewhere" if earlier else "before the first run"
    note = " ".join((f"Written {when}, {was['time']}, commit {was['commit']}.", *told(rows.all_finished)))
    if (was["question"], was["expect"]) != (now.question, now.expect):
        note += f" The lab file says otherwise now. Question: {now.question.strip()} Expected: {now.expect.strip()}"
    return [Verbatim(said), Sentence(note)]


def _how(lab: Lab) -> str:
    control = (
        f"Paired by seed with {', '.join(f'{k}={v}' for k, v in lab.file.control.items())}; "
        if lab.file.control
        else ""
    )
    return (
        f"{control}intervals are Student's at {LEVEL:.0%} over seeds, each comparison by itself; of what spans "
        "decades the difference is a factor (x). A figure with no word "
        "before it is the mean of the last ten steps that logged it, of an evaluation the last."
    )


def _where(rows: Rows, finished: Sequence[Row]) -> str:
    total = len(rows.lab.cells)
    said = [f"{len(finished)} of {total} cells finished, {len(rows.lab.file.seeds)} seeds"]
    for key, what in (("device", ""), ("threads", "threads "), ("commit", "commit "), ("source", "source ")):
        found = [str(value) for value, _ in Counter(row.get(key) for row in finished).most_common()]
        said += [f"{what}{' and '.join(found)}"] if found else []
    torch = sorted({str((row.get("versions") or {}).get("torch")) for row in finished} - {"None"})
    said += [f"torch {' and '.join(torch)}"] if torch else []
    return " · ".join([*said, f"{duration(sum(row['seconds'] for row in finished))} of steps"])


def _figures(rows: Rows) -> Block:
    lines, tables = [], [rows.table(measure) for measure in rows.lab.final]
    for name in rows.reported:
        found = (table.estimate(name) for table in tables)
        lines.append([name, *(_estimate(estimate) if estimate else page.NOT_LOGGED for estimate in found)])
    return Table(["cell", *map(_title, rows.lab.final)], lines, ["n"] * (1 + len(rows.lab.final)))


def _differences(rows: Rows) -> Block:
    lines = []
    for name in rows.reported:
        control = rows.lab.control_of(name)
        if control is not None:
            found = [rows.difference(measure, name, control) for measure in rows.lab.final]
            shown = (_estimate(d.estimate, "x " if d.ratio else "") if d else page.NOT_LOGGED for d in found)
            lines.append([f"{name} against {control}", *shown])
    return Table(["difference", *map(_title, rows.lab.final)], lines, ["n"] * (1 + len(rows.lab.final)))


def _estimate(estimate: Estimate, before: str = "") -> Any:
    if estimate.low is None or estimate.high is None or estimate.low == estimate.high:
        return page.noted(f"{before}{estimate.value:.4g}", estimate.how)
    rounding = abs(estimate.value) < 1e-9 * (estimate.high - estimate.low)  # of the subtraction: 3.7e-17 says nothing
    value = 0.0 if rounding else estimate.value
    return page.noted(f"{before}{value:.4g}", f"{estimate.low:.3g} to {estimate.high:.3g}")


def _cells(rows: Rows) -> Block:
    """What sets the cells apart, in the recipe's own keys."""
    first = {cell.name: cell for cell in reversed(rows.lab.cells)}
    shown = [[name, ", ".join(f"{k}={v}" for k, v in first[name].settings.items())] for name in rows.lab.names]
    return Table(["cell", "keys that it changes"], shown, ["n", ""])


def _missing(rows: Rows) -> list[Block]:
    failed, unrun = [], []
    for cell in rows.lab.cells:
        row = rows.of(cell)
        if row is None:
            unrun.append(cell.folder)
        elif row["status"] == FAILED:
            failed.append([cell.folder, row["error"]])
    blocks = []
    if failed:
        blocks += [Heading("Failed"), Table(["cell", "error"], failed, ["n", ""])]
    if unrun:
        blocks += [Heading("Not run"), Sentence(f"{len(unrun)} cells: {', '.join(unrun)}.")]
    return blocks


def _series(metric: str) -> Series:
    if metric in SERIES:
        return SERIES[metric]
    found = BY_NAME.get(metric) or next((figure for figure in GAP_FIGURES if figure.name == metric), None)
    return Series(metric, metric, found.unit if found else "")


def _title(measure: Measure) -> str:
    return measure.text.removeprefix("last ")


def _curves(rows: Rows, metric: str) -> list[Plot]:
    """A metric over steps, at most ``MOST`` cells in a figure, a control in each."""
    of, names = _series(metric), rows.lab.names
    controls = [name for name in names if rows.lab.file.control and rows.lab.control_of(name) is None]
    kept = controls[:1] if len(names) > MOST else []
    others = [name for name in names if name not in kept]
    size = MOST - len(kept)
    plots = []
    for start in range(0, len(others), size):
        lines = []
        for place, name in enumerate([*kept, *others[start : start + size]]):
            found = rows.curve(name, metric)
            if found is not None:
                steps, values = found
                band = (values.min(0), values.max(0)) if len(values) > 1 else ()
                lines.append(Line(name, RUNS[place], steps, values.mean(0), DASHES[place], *band))
        if lines:
            title = of.heading if start == 0 else f"{of.heading} ({start // size + 1})"
            plots.append(chart(title, "Line: mean over seeds; band: smallest to largest.", lines, of.unit, of.axis))
    return plots


def _against(rows: Rows, x: Measure, y: Measure) -> Plot:
    """A figure of each run against another: a point a seed, the cells' names at their means."""
    title = f"{_title(y)} against {_title(x)}"
    points = {}
    for name in rows.lab.names:
        across, up = rows.figure(name, x), rows.figure(name, y)
        both = np.array([(across[seed], up[seed]) for seed in across if seed in up], dtype=float).reshape(-1, 2)
        both = both[np.isfinite(both).all(1)]
        if len(both):
            points[name] = both
    if not points:
        return Plot(title, f"No finished run has both {_title(x)} and {_title(y)}.")
    every = np.concatenate(list(points.values()))
    with figure(5.6, 3.4) as drawing:
        axes = drawing.subplots()
        for name, both in points.items():
            axes.plot(both[:, 0], both[:, 1], "o", color=RUNS[0], markersize=3.5, alpha=0.7)
            axes.annotate(name, both.mean(0), color=INK, fontsize=7, xytext=(4, 3), textcoords="offset points")
        for values, scale in ((every[:, 0], axes.set_xscale), (every[:, 1], axes.set_yscale)):
            positive = values[values > 0]
            if len(positive) == len(values) and positive.max() > 30 * positive.min():
                scale("log")
            elif len(positive) and (values >= 0).all() and positive.max() > 30 * positive.min():
                scale("symlog", linthresh=float(positive.min()))
        axes.set_xlabel(f"{_title(x)} ({_series(x.metric).unit})")
        axes.set_ylabel(f"{_title(y)} ({_series(y.metric).unit})")
    return Plot(title, "A point is one run; a name stands at its cell's mean.", to_svg(drawing, title))
