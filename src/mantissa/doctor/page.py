"""The doctor's page: the answer, the tests, four pictures; and the same as one row of JSON.

Of a log: at most twelve lines on a screen, and the same as a page and as JSON.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mantissa.base.files import atomic_file, disk_errors, write_atomically
from mantissa.doctor import words
from mantissa.doctor.curves import CurveDiagnosis, title
from mantissa.doctor.diagnosis import Basis, Diagnosis, Verdict
from mantissa.doctor.dump import Dump
from mantissa.doctor.evidence import Evidence
from mantissa.doctor.examine import remedies_for
from mantissa.doctor.facts import facts, usual_of
from mantissa.doctor.logs import Log, table
from mantissa.doctor.sample import Tokens
from mantissa.mismatch.usual import USUAL
from mantissa.runs import page
from mantissa.runs.directory import default_path
from mantissa.runs.health import Health
from mantissa.runs.page import Banner, Block, Heading, KeyNumbers, Plots, Sentence, Table
from mantissa.runs.plots import BLUE, GREEN, MUTED, ORANGE, PINK, Plot, agreement, figure, to_svg

if TYPE_CHECKING:
    from mantissa.runs.page import Block
    from mantissa.runs.plots import Plot

PAGE, ROW = "doctor.html", "doctor.json"
LEVELS: dict[Verdict, Health] = {
    Verdict.HEALTHY: "healthy",
    Verdict.LARGE: "watch",
    Verdict.FAULT: "unhealthy",
    Verdict.UNKNOWN: "watch",
}
_FORMATS = dict(zip(("fp32", "fp16", "bf16", "fp8"), (ORANGE, GREEN, BLUE, PINK), strict=True))


def write_page(dump: Dump, diagnosis: Diagnosis, folder: Path | None = None, with_model: Sequence[Block] = ()) -> Path:
    """Write ``doctor.html`` and ``doctor.json`` into ``folder`` (a fresh one under runs/ unless given).

    ``with_model``: what scoring with the model has to show, after the pictures.
    """
    folder = folder or default_path("doctor")
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    tokens = Evidence.of(dump, usual_of(dump.settings).bound).clean
    write_atomically(folder / ROW, json.dumps(as_row(diagnosis), indent=1) + "\n")
    with atomic_file(folder / PAGE) as temporary:
        text = page.render(f"Doctor: {dump.path.name}", _blocks(dump, diagnosis, tokens, with_model))
        temporary.write_text(text, encoding="utf-8")
    return folder / PAGE


def as_row(diagnosis: Diagnosis) -> dict[str, Any]:
    """A diagnosis as plain JSON: numbers that are not finite as None."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    row = asdict(diagnosis)
    row["fault"] = None if diagnosis.fault is None else diagnosis.fault.name
    row["candidates"] = [each.name for each in diagnosis.candidates]
    row["verdict"] = diagnosis.verdict.value
    row["decided"], row["routers"] = words.decided(diagnosis), diagnosis.basis is Basis.ROUTERS
    row["unknown"] = [each.said for each in diagnosis.unknown]
    return plain(row)


def _blocks(dump: Dump, diagnosis: Diagnosis, tokens: Tokens, with_model: Sequence[Block]) -> list[Block]:
    f, table_of = diagnosis.figures, facts()
    rows: list[tuple[Any, ...]]
    unnamed = diagnosis.basis in (Basis.CAUSE, Basis.SIDE, Basis.LIKELY)
    lines = [] if diagnosis.fault is None or unnamed else [table_of.faults[diagnosis.fault.name].means]
    blocks = [
        Heading(f"Doctor: {dump.path.name}", 1),
        Sentence(f"{f['tokens']:,} tokens of {f['sequences']:,} sequences ({dump.whose}). d = log-prob "
                 "of the learner - log-prob of the rollout; u = d / (1 - p), of the size of the logits' error.", "sub"),
        Banner(diagnosis.headline, lines, LEVELS[diagnosis.verdict]),
        KeyNumbers([
            ("root mean square of d", f"{f['d_rms']:.2g}", "nats"),
            ("size of u", f"{f['u_rms']:.2g}", f"up to {usual_of(dump.settings).bound:.2g} is usual here"),
            ("equal to the last bit", f"{f['equal']:.1%}", "of tokens"),
            ("k3", f"{f['k3']:.2g}", "nats a token"),
        ]),
    ]  # fmt: skip
    if diagnosis.causes:
        rows = [(c.name, f"{c.share:.1%}", f"{c.low:.1%} to {c.high:.1%}", c.note) for c in diagnosis.causes]
        blocks += [
            Heading("Causes, by share of the squared gap"),
            Table(("cause", "share", "interval", "note"), rows),
        ]
    settings = remedies_for(diagnosis)
    if settings:
        rows = [(do, page.code("\n".join(keys)) if keys else "") for do, keys in settings]
        blocks += [Heading("What to set"), Table(("what", f"in {dump.framework}'s keys"), rows, ("", ""))]
    blocks += [Heading("Pictures"), Plots(_pictures(dump, tokens)), *with_model]
    rows = [
        (page.noted(table_of.faults[each.name].title, each.name), _mark(each), each.said,
         f"{each.p:.1g}" if each.tested else "",
         "" if each.detectable is None else f"{each.detectable:.3g} {each.unit}")
        for each in diagnosis.findings
    ]  # fmt: skip
    blocks += [
        Heading("What was tested"),
        Sentence("Units are whole sequences, or whole prompts where there are twelve. A false alarm in a healthy "
              "dump is held at 5% over all tests together (Bonferroni); what is found is named by what is below 5% by "
              "itself. Detectable: the effect that this sample shows with "
              "probability 0.95."),
        Table(("signature", "result", "what it says", "p", "detectable"), rows, ("", "n", "", "n", "n")),
    ]  # fmt: skip
    if diagnosis.unknown:
        blocks += [Heading("What this cannot know"), Table(("",), [(each.said,) for each in diagnosis.unknown], ("",))]
    return blocks


def _mark(finding: Any) -> Any:
    if not finding.tested:
        return page.pill("watch", "not tested")
    return page.pill("unhealthy", "found") if finding.found else page.pill("healthy", "not found")


def _pictures(dump: Dump, tokens: Tokens) -> list[Plot]:
    if not len(tokens.d):
        return [Plot("Log-probs", "No token was scored by both sides.")]
    return [
        _agreement(tokens),
        _by_position(tokens),
        _histogram(tokens),
        _by_sequence(tokens, usual_of(dump.settings).bound),
    ]


def _agreement(t: Tokens) -> Plot:
    title = "Token probabilities: learner against rollout"
    low = float(max(min(t.x.min(), t.y.min(), np.log(0.1)), -60.0)) / np.log(10)
    keep = (t.x > -60) & (t.y > -60) & (t.x <= 0) & (t.y <= 0)
    with figure(5.6, 2.9) as drawing:
        axes = drawing.subplots()
        if keep.any():
            agreement(axes, t.x[keep], t.y[keep], low, BLUE, (6, 6))
        axes.set(xlabel="p under the rollout", ylabel="p under the learner")
    return Plot(title, f"{len(t.d):,} tokens; on the diagonal both agree.", to_svg(drawing, title))


def _by_position(t: Tokens) -> Plot:
    title = "Size of the gap by position"
    told = t.telling
    if not len(told.u):
        return Plot(title, "Every token is nearly certain on both sides.")
    bins = np.unique(np.linspace(0, told.position.max() + 1, min(33, int(told.position.max()) + 2)).astype(int))
    place = np.digitize(told.position, bins) - 1
    middles, sizes = [], []
    for number in range(len(bins) - 1):
        u = told.u[place == number]
        if len(u) >= 3:
            middles.append((bins[number] + bins[number + 1] - 1) / 2)
            sizes.append(float(np.sqrt(np.square(u).mean())))
    with figure() as drawing:
        axes = drawing.subplots()
        keep = np.linspace(0, len(told.u) - 1, min(len(told.u), 3000)).astype(int)
        axes.plot(
            told.position[keep], np.maximum(np.abs(told.u[keep]), 1e-9), ".", color=BLUE, alpha=0.25, markersize=2
        )
        axes.plot(middles, np.maximum(sizes, 1e-9), color=ORANGE, marker="o", markersize=3)
        axes.set_yscale("log")
        axes.set_ylim(bottom=max(min([s for s in sizes if s > 0], default=1e-6) / 100, 1e-9))
        axes.set(xlabel="position in the response", ylabel="|u|, nats")
    legend = (("token", BLUE), ("root mean square", ORANGE))
    return Plot(title, f"{len(told.u):,} tokens with 1 - p above 0.01.", to_svg(drawing, title), legend)


def _histogram(t: Tokens) -> Plot:
    """log10 |u| of the tokens, with the healthy sizes of the formats as normal curves."""
    title = "How large the differences are, beside the formats"
    u = np.abs(t.telling.u)
    u = u[u > 0]
    if not len(u):
        return Plot(title, "No uncertain token's log-probs differ.")
    edges = np.linspace(min(np.log10(u.min()), -5.5), max(np.log10(u.max()), 0.5), 60)
    with figure() as drawing:
        axes = drawing.subplots()
        axes.hist(np.log10(u), bins=edges.tolist(), density=True, color=MUTED, alpha=0.4)
        grid = np.linspace(edges[0], edges[-1], 300)
        for name, colour in _FORMATS.items():
            z = 10**grid / USUAL[name].size
            axes.plot(grid, np.log(10) * z * np.sqrt(2 / np.pi) * np.exp(-(z**2) / 2), color=colour)
        axes.set(xlabel="log10 |u|", ylabel="density")
    legend = (
        ("this dump", MUTED),
        *((f"a normal of {name}'s usual size", colour) for name, colour in _FORMATS.items()),
    )
    return Plot(title, f"{len(u):,} tokens that differ, 1 - p above 0.01.", to_svg(drawing, title), tuple(legend))


def _by_sequence(t: Tokens, bound: float) -> Plot:
    title = "Size of the gap by sequence"
    told = t.telling
    count = np.bincount(told.sequence)
    sizes = np.sqrt(np.bincount(told.sequence, weights=told.u**2) / np.maximum(count, 1))[count > 0]
    if not sizes.any():
        return Plot(title, "No uncertain token's log-probs differ.")
    with figure() as drawing:
        axes = drawing.subplots()
        axes.plot(np.sort(np.maximum(sizes, 1e-9)), color=BLUE)
        axes.axhline(bound, color=MUTED, linewidth=0.8, linestyle="--")
        axes.set_yscale("log")
        axes.set_ylim(max(min(float(np.min(sizes[sizes > 0])), bound) / 2, 1e-9), 2 * max(float(sizes.max()), bound))
        axes.set(xlabel="sequences, in order", ylabel="root mean square of u")
    note = f"{len(sizes):,} sequences; dashed: the largest that is usual here."
    return Plot(title, note, to_svg(drawing, title))


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
        temporary.write_text(page.render(f"Doctor: {log.path.name}", _curve_blocks(log, found)), encoding="utf-8")
    return folder / PAGE


def _curve_blocks(log: Log, found: CurveDiagnosis) -> list[Block]:
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
