"""What is said of a log: at most twelve lines on a screen, and the same as a page and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mantissa.base.files import atomic_file, disk_errors, write_atomically
from mantissa.doctor.curves import CurveDiagnosis, title
from mantissa.doctor.diagnosis import Verdict
from mantissa.doctor.logs import Log, table

if TYPE_CHECKING:
    from mantissa.runs.page import Block
    from mantissa.runs.plots import Plot

WIDTH, LINES = 100, 12


def answer(found: CurveDiagnosis) -> str:
    """The first line."""
    if found.verdict is Verdict.HEALTHY:
        return "Healthy, as far as curves show."
    if found.verdict is Verdict.UNKNOWN:
        return f"I cannot tell: {found.why}."
    if found.verdict is Verdict.LARGE:
        return "Something is wrong, and curves do not say what: the gap is too large to be rounding."
    assert found.fault is not None
    first = title(found.fault)
    if found.second is None:
        return f"Something is wrong: {first}."
    return f"Two things are wrong: {first}; and {title(found.second)}."


def lines(log: Log, found: CurveDiagnosis) -> list[str]:
    """Everything for a screen of ``WIDTH`` columns, the answer first, ``LINES`` lines at most."""
    steps = f"{found.figures['steps']:,} step{'s' if found.figures['steps'] != 1 else ''}"
    whose = "" if log.program == "trainer" else f" of {log.program}"
    read = f"{steps}{whose}, by its names: {_some(found.names, 5)}"
    parts = [
        (answer(found), 2), (_measured(found), 2), (". ".join([read, *found.notes]), 2),
        *((f"likely: {each}", 2) for each in found.likely[:1]),
        *((f"by the way: {each}", 1) for each in found.remarks[:1]),
        *([(f"excluded: {', '.join(found.excluded)}", 2)] if found.excluded else []),
        *([(f"not known: {'; '.join(each.said for each in found.unknown)}", 3)] if found.unknown else []),
        (f"record next: {found.record}", 2),
    ]  # fmt: skip
    said = [_wrapped(text, most) for text, most in parts]
    for place in sorted(
        range(2, len(parts) - 1), key=lambda place: -len(said[place])
    ):  # the answer and the end stay whole
        if sum(map(len, said)) > LINES:
            said[place] = _wrapped(parts[place][0], 1)
    return [line for each in said for line in each]


def _measured(found: CurveDiagnosis) -> str:
    """The numbers behind the first line."""
    named = [each for each in (found.fault, found.second) if each is not None]
    return "; ".join(each.said for each in named) or found.headline


def _some(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _wrapped(text: str, most: int) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent="  ", max_lines=most, placeholder=" ...", break_on_hyphens=False
    )


def write_log_page(log: Log, found: CurveDiagnosis, folder: Path) -> Path:
    """Write ``doctor.html`` and ``doctor.json`` into ``folder``."""
    from mantissa.doctor.page import PAGE, ROW, as_row
    from mantissa.runs import page

    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    row = {name: each for name, each in as_row(found).items() if name != "curves"}
    write_atomically(folder / ROW, json.dumps(row, indent=1) + "\n")
    with atomic_file(folder / PAGE) as temporary:
        temporary.write_text(page.render(f"Doctor: {log.path.name}", _blocks(log, found)), encoding="utf-8")
    return folder / PAGE


def _blocks(log: Log, found: CurveDiagnosis) -> list[Block]:
    from mantissa.doctor.page import LEVELS
    from mantissa.runs.page import Banner, Heading, Plots, Sentence, Table

    source = table().programs[log.program].source
    marks, more = {True: "found", False: "no"}, [*found.likely, *found.remarks, *found.notes]
    tests = [
        (table().faults[each.name].title.format(step=each.effect, near="", what=""),
         marks[each.found] if each.tested else "not tested", each.said)
        for each in found.findings
    ]  # fmt: skip
    return [
        Heading(f"Doctor: {log.path.name}", 1),
        Sentence(f"{found.figures['steps']:,} steps of {log.program}; names from {source}.", "sub"),
        Banner(found.headline, more, LEVELS[found.verdict]),
        Heading("Curves"), Plots(_plots(log)),
        Heading("What was tested"), Table(("what", "result", "what it says"), tests, ("", "n", "")),
        Heading("What this cannot know"), Table(("",), [(each.said,) for each in found.unknown], ("",)),
        Heading("What to record next"), Sentence(found.record),
    ]  # fmt: skip


def _plots(log: Log) -> list[Plot]:
    import numpy as np

    from mantissa.runs.plots import BLUE, Plot, figure, to_svg

    plots = []
    for role, curve in log.curves.items():
        keep = np.linspace(0, len(curve.steps) - 1, min(len(curve.steps), 2000)).astype(int)
        with figure() as drawing:
            axes = drawing.subplots()
            axes.plot(curve.steps[keep], np.where(np.isfinite(curve.values), curve.values, np.nan)[keep], color=BLUE)
            axes.set(xlabel="step", ylabel=role.value.replace("_", " "))
        plots.append(Plot(curve.name, f"{len(curve.steps):,} steps.", to_svg(drawing, curve.name)))
    return plots
