"""``compare.html``: several runs on one page, with how sure each difference is.

It is computed from the runs' folders alone, holds no time of its own making, and so is the same to the byte whenever
the runs are. Runs stand in the order in which they were given: nothing here is a ranking.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mantissa.errors import MantissaError
from mantissa.files import write_atomically
from mantissa.mismatch import GAP_METRICS, Metric
from mantissa.runs import page
from mantissa.runs.compare import plots
from mantissa.runs.compare.data import Difference, Group, Run, read_runs
from mantissa.runs.compare.stats import ENDS, Ends, ends_of, logged, rate, seconds_by_phase, total, wall_clock
from mantissa.runs.compare.text import (
    Comparison,
    Final,
    compare,
    grouping,
    progress,
    resumed_elsewhere,
    times_said,
    trained,
    trained_title,
    two_kinds,
    unequal_lengths,
)
from mantissa.runs.health import in_range, sentence
from mantissa.runs.live import count, duration, small
from mantissa.runs.page import scale_text, text

_MISSING = '<span class="note">not logged</span>'
_ON_ONE_LINE = 4  # groups up to which both ends of a metric stand beside each other
_PILLS = {"healthy": "good", "watch": "watch", "unhealthy": "bad"}


def build_comparison(paths: Sequence[Path], out: Path) -> Comparison:
    """Write the page of these runs to ``out``, atomically. Raises ``MantissaError`` for what cannot be compared."""
    if out.suffix != ".html":
        raise MantissaError(f"-o {out}: expected the name of a page, ending in .html")
    if out.is_dir() or not out.parent.is_dir():
        raise MantissaError(f"-o {out}: {'is a folder' if out.is_dir() else f'no folder {out.parent}'}; name a file")
    comparison = compare(read_runs(paths))
    write_atomically(out, document(comparison))
    return comparison


def document(comparison: Comparison) -> str:
    """The whole page."""
    groups = comparison.groups
    drawn, missing = plots.curves(groups)
    runs = len(comparison.runs)
    title = f"{runs} runs compared"
    body = [
        f"<h1>{title}</h1>",
        f'<p class="sub">{text(" · ".join(group.title for group in groups))}</p>',
        _said(comparison),
        "<h2>Runs</h2>",
        _runs(groups),
        "<h2>Final accuracy</h2>",
        _finals(comparison),
        "<h2>Curves</h2>",
        f'<div class="plots">{"".join(page.plot(p) for p in drawn)}</div>',
        f'<p class="note below">Logged by none of these runs: {text(", ".join(missing))}.</p>' if missing else "",
        "<h2>Gap between rollout and learner</h2>",
        _gap(groups),
        "<h2>Time</h2>",
        f'<p class="sub">{text(times_said(comparison))}</p>',
        f'<div class="one">{page.plot(plots.phases(groups))}</div>',
        _times(groups),
        "<h2>What differs</h2>",
        _differences("recipe", comparison.recipes, groups, [run.config is not None for run in comparison.runs]),
        _differences("environment", comparison.environments, groups, [bool(run.facts) for run in comparison.runs]),
        _differences("precision", comparison.precisions, groups, [bool(run.precision) for run in comparison.runs]),
    ]
    return page.page(f"{title} - Mantissa", body)


def _said(comparison: Comparison) -> str:
    """The card at the top: what can be said, and what must be known first."""
    lines = [
        unequal_lengths(comparison),
        two_kinds(comparison.runs),
        grouping(comparison.groups),
        times_said(comparison),
    ]
    unwell = [run.name for run in comparison.runs if run.judgement.kind == "unhealthy"]
    if unwell:
        lines.append(f"Unhealthy: {', '.join(unwell)}; the reasons are below.")
    finals = [f"<b>{text(final.title)}.</b> {text(final.said)}" for final in comparison.finals]
    items = "".join(f"<li>{line}</li>" for line in (*finals, *(text(line) for line in lines if line)))
    return f'<div class="card verdict"><h2>What can be said</h2><ul>{items}</ul></div>'


def _head(group: Group, title: str | None = None) -> str:
    sample = page.key(plots.colour_of(group), plots.dash_of(group))
    return f"{sample}{text(group.title if title is None else title)}"


def _runs(groups: Sequence[Group]) -> str:
    header = ("run", "folder", "seed", "steps", "overflows", "retries", "given up", "last scale", "health")
    lines = [_run(group, run) for group in groups for run in group.runs]
    note = (
        "Overflows: backward passes whose gradient overflowed; retries: those redone at a lower scale; given up: "
        "optimiser steps not taken. In all steps of the run."
    )
    kinds = ("n", "v", "n", "n", "n", "n", "n", "n", "")
    return page.table(header, lines, kinds) + f'<p class="note below">{note}</p>'


def _run(group: Group, run: Run) -> list[str]:
    counts = [total(run, f"precision/{name}") for name in ("overflows", "retries", "skipped")]
    scale = logged(run, "precision/loss_scale")
    judged = run.judgement
    reasons = [*judged.remarks, *(sentence(excursion) for excursion in run.excursions[:2])]
    if len(run.excursions) > 2:
        reasons.append(f"And {len(run.excursions) - 2} more: see its report.")
    changed = resumed_elsewhere(run)
    if changed:
        reasons.append(f"Resumed where this had changed: {', '.join(changed)}.")
    said = f'<div class="note">{text(" ".join(reasons))}</div>' if reasons else ""
    return [
        _head(group, group.label),
        text(run.name),
        "-" if run.seed is None else text(run.seed),
        text(progress(run)),
        *(_MISSING if number is None else f"{number:,}" for number in counts),
        ("none" if scale[-1] == 1 else text(scale_text(scale[-1]))) if scale else _MISSING,
        f'<span class="pill {_PILLS[judged.kind]}">{judged.kind}</span>{said}',
    ]


def _finals(comparison: Comparison) -> str:
    figures = [
        plots.intervals(final.title, [(group, e) for group, e, _ in final.estimates if e is not None])
        for final in comparison.finals
    ]
    plots = "".join(page.plot(figure) for figure in figures if figure.svg)
    header = ["run", *(final.title.lower() for final in comparison.finals), trained_title()]
    lines = []
    for i, group in enumerate(comparison.groups):
        cells = [_estimate(final, i) for final in comparison.finals]
        lines.append([_head(group), *cells, text(trained(group))])
    note = (
        "95% intervals. Wilson: of one run, how well so many held-out problems measure it; for the mean of k samples "
        "it errs on the wide side. t: Student's, over seeds. Results are called different only where their intervals "
        "do not overlap. Training accuracy is of those steps' own problems, sampled, while the policy still changed."
    )
    table = page.table(header, lines, ("v", *("v" for _ in comparison.finals), "v"))
    gallery = f'<div class="plots">{plots}</div>' if plots else ""
    return f'{gallery}<div class="gap">{table}</div><p class="note below">{note}</p>'


def _estimate(final: Final, index: int) -> str:
    _, estimate, steps = final.estimates[index]
    if estimate is None:
        return _MISSING
    at = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return (
        f"<b>{estimate.value:.3f}</b> &nbsp;{text(estimate.interval)}"
        f'<div class="note">{text(estimate.how)}; {text(at)}</div>'
    )


def _gap(groups: Sequence[Group]) -> str:
    lines = []
    missing = []
    fold = " " if len(groups) <= _ON_ONE_LINE else "<br>"
    for metric in GAP_METRICS:
        ends = [ends_of(group, metric.name) for group in groups]
        if not any(ends):
            missing.append(metric.name)
            continue
        cells = [_ends(metric, group, both, fold) for group, both in zip(groups, ends, strict=True)]
        wanted = f"; healthy: {metric.healthy_text}" if metric.gated else ""
        about = f'<div class="note">{text(metric.unit + wanted)}</div>'
        lines.append([f"<code>{text(metric.name)}</code>{about}", *cells])
    if not lines:
        return '<p class="note">No run logged a gap metric.</p>'
    note = f"Each cell: mean over the first {ENDS} steps → mean over the last {ENDS}; over seeds, the mean of theirs."
    if min(run.last_step for group in groups for run in group.runs) < 2 * ENDS:
        note += f" Runs of fewer than {2 * ENDS} steps count some steps in both."
    note += " Marked (!): not in the healthy range of the gates."
    if missing:
        note += f" Logged by none: {', '.join(missing)}."
    table = page.table(["metric", *map(_head, groups)], lines, "n" * (1 + len(groups)))
    return table + f'<p class="note below">{text(note)}</p>'


def _ends(metric: Metric, group: Group, both: Ends | None, fold: str) -> str:
    if both is None:
        return _MISSING
    first, last = (_marked(metric, value) for value in (both.first, both.last))
    of = f'<div class="note">{both.runs} of {len(group.runs)} runs</div>' if both.runs < len(group.runs) else ""
    return f"{first}{fold}→ {last}{of}"


def _marked(metric: Metric, value: float) -> str:
    shown = small(value) if abs(value) < 0.01 else f"{value:.4g}"
    return shown if in_range(metric, value) else f'<span class="pill bad">{shown} (!)</span>'


def _times(groups: Sequence[Group]) -> str:
    phases = [seconds_by_phase(group) or {} for group in groups]
    names = list(dict.fromkeys(name for seconds in phases for name in seconds if name != "step"))
    rows: list[tuple[str, list[str | None]]] = [("all steps", [_duration(wall_clock(group)) for group in groups])]
    for name, title in (("step", "one step"), *((name, f"of it {name.replace('_', ' ')}") for name in names)):
        rows.append((title, [_seconds(seconds.get(name)) for seconds in phases]))
    for title, metric in (("sampled", "rate/rollout_tokens_per_s"), ("trained on", "rate/learner_tokens_per_s")):
        rates = [rate(group, metric) for group in groups]
        rows.append((f"{title}, tokens/s", [None if value is None else count(value) for value in rates]))
    rows += [(name, [_fact(group, name) for group in groups]) for name in ("device", "cpu", "threads")]
    lines = [
        [text(name), *(_MISSING if cell is None else text(cell) for cell in cells)]
        for name, cells in rows
        if any(cell is not None for cell in cells)
    ]
    note = "Means over steps, and over seeds; rates are medians over steps. The warm start is not timed."
    table = page.table(["", *map(_head, groups)], lines, ("n", *("v" for _ in groups)))
    return f'<div class="gap">{table}</div><p class="note below">{note}</p>'


def _fact(group: Group, name: str) -> str | None:
    found = list(dict.fromkeys(run.facts[name] for run in group.runs if name in run.facts))
    return ", ".join(found) or None


def _seconds(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:.3g} s" if value >= 1 or value == 0 else f"{1000 * value:.3g} ms"


def _duration(value: float | None) -> str | None:
    return None if value is None else f"{value:.2g} s" if value < 10 else duration(value)


def _differences(kind: str, found: Sequence[Difference], groups: Sequence[Group], recorded: Sequence[bool]) -> str:
    """A table of what differs, or a sentence. ``recorded``: which runs have such a thing at all."""
    plural = {"recipe": "recipes", "environment": "environments", "precision": "precision tables"}[kind]
    if not any(recorded):
        return f'<p class="note below">No run recorded its {kind}.</p>'
    if not found:
        which = "" if all(recorded) else f" of the {sum(recorded)} runs that recorded one"
        return f'<p class="note below">The {plural}{which} are equal.</p>'
    missing = '<span class="note">not recorded</span>'
    lines = [
        [f"<code>{text(d.name)}</code>", *(missing if value is None else text(value) for value in d.values)]
        for d in found
    ]
    table = page.table([kind, *map(_head, groups)], lines, ("n", *("v" for _ in groups)))
    return f'<div class="gap">{table}</div>'
