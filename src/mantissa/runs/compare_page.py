"""What is said of several runs, on ``compare.html`` and, shorter, in a terminal.

The page is computed from the runs' folders alone, holds no time of its own making, and so is the same to the byte
whenever the runs are. Runs stand in the order in which they were given: nothing here is a ranking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from mantissa.base.errors import MantissaError
from mantissa.base.files import write_atomically
from mantissa.mismatch.intervals import Estimate
from mantissa.mismatch.tables import GAP_METRICS, Metric
from mantissa.runs import page
from mantissa.runs.compare import (
    ENDS,
    Curve,
    Ends,
    curve_of,
    distinguish,
    ends_of,
    final_accuracy,
    logged,
    over_runs,
    seconds_by_phase,
    spread_of,
    total,
    training_accuracy,
)
from mantissa.runs.groups import Differences, Group, Run, differences, group_runs, listed, read_runs
from mantissa.runs.health import VERDICTS, decides, gap_sentence, metric_of, sentence, small
from mantissa.runs.live import count, duration, seconds_text
from mantissa.runs.metrics import SERIES, Series
from mantissa.runs.page import Banner, Block, Heading, Plots, Sentence, Table
from mantissa.runs.plots import MUTED, PHASE_COLOURS, Line, Plot, chart, figure, to_svg

ACCURACIES = ("eval/greedy_accuracy", "eval/avg_at_k")
PANELS = (
    "reward/accuracy", "reward/mean", *ACCURACIES, "train/loss", "gap/abs_logp_diff_mean", "gap/k3_kl",
    "gap/seq_log_ratio_std", "precision/loss_scale", "policy/entropy", "length/mean", "optim/grad_norm",
)  # fmt: skip
_NOT_THE_QUESTIONS = ("task.train_size", "task.warm_start_size")  # keys of a task that leave held-out problems alone
_CLOCKS = ("device", "cpu", "threads", "cores", "torch", "cuda")  # facts without which times mean nothing
_EVENTS = tuple(f"precision/{name}" for name in ("overflows", "retries", "skipped"))
_TRAINED = f"training accuracy, last {ENDS} steps"
_MISSING = "not logged"
_ON_ONE_LINE = 4  # groups up to which both ends of a metric stand beside each other
_MOST_KEYS = 12  # differing keys that the terminal prints; all are on the page
_STYLES = {"healthy": "green", "watch": "yellow", "unhealthy": "bold red"}


@dataclass(frozen=True)
class Final:
    """One accuracy at the end: of each group an estimate and the steps it was measured at, or None; and a sentence."""

    title: str
    estimates: tuple[tuple[Group, Estimate | None, list[int]], ...]
    said: str


@dataclass(frozen=True)
class Comparison:
    """Runs, grouped, and all that both the page and the terminal show of them."""

    groups: tuple[Group, ...]
    finals: tuple[Final, ...]
    recipes: Differences
    environments: Differences
    precisions: Differences

    @property
    def runs(self) -> list[Run]:
        return [run for group in self.groups for run in group.runs]


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Group the runs and compute what is said of them."""
    groups = tuple(group_runs(runs))
    recipes = differences(groups, lambda run: run.config)
    finals = tuple(_final(groups, recipes, metric) for metric in ACCURACIES)
    where, formats = (differences(groups, read) for read in (lambda run: run.facts, lambda run: run.precision))
    return Comparison(groups, finals, recipes, where, formats)


def build_comparison(
    paths: Sequence[Path], out: Path, show: Callable[[Comparison], None] = lambda comparison: None
) -> None:
    """Write the page of these runs to ``out``, atomically. Raises ``MantissaError`` for what cannot be compared.

    ``show`` is called with what was found before anything is drawn, which needs more.
    """
    if out.suffix != ".html":
        raise MantissaError(f"-o {out}: expected the name of a page, ending in .html")
    if out.is_dir() or not out.parent.is_dir():
        raise MantissaError(f"-o {out}: {'is a folder' if out.is_dir() else f'no folder {out.parent}'}; name a file")
    comparison = compare_runs(read_runs(paths))
    show(comparison)
    write_atomically(out, document(comparison))


# What is said, on the page and in the terminal.


def _final(groups: Sequence[Group], recipes: Differences, metric: str) -> Final:
    found = [(group, final_accuracy(group, metric)) for group in groups]
    estimates = tuple((group, *(final or (None, []))) for group, final in found)
    there = [(group.label, estimate) for group, estimate, _ in estimates if estimate is not None]
    tasks = [name for name in recipes if name.startswith("task") and name not in _NOT_THE_QUESTIONS]
    if not there:
        said = "No run has logged it."
    elif tasks:
        said = f"Not compared: the questions are not the same (different {listed(tasks)})."
    else:
        said, differ = distinguish(there)
        if differ and any(estimate is not None and len(group.runs) == 1 for group, estimate, _ in estimates):
            said += (
                " Where a single run stands for a recipe, this is about the policy that it made: another seed may do "
                "otherwise."
            )
    return Final(SERIES[metric].heading, estimates, said)


def comparison_warnings(comparison: Comparison) -> list[str]:
    """What must be known before two figures are compared: amounts and kinds of steps, groups, clocks."""
    said = []
    lasts = {run.last_step for run in comparison.runs}
    if len(lasts) > 1:
        said.append(
            f"The runs ended at different steps, {min(lasts)} to {max(lasts)}: their last figures are of different "
            "amounts of training."
        )
    if len({"train/loss" in run.rows[-1] for run in comparison.runs}) > 1:
        said.append(
            "A step of the drop-in trainer is one optimiser step, a step of mantissa train is one batch of completions."
        )
    several = [group for group in comparison.groups if len(group.runs) > 1]
    if several:
        parts = [f"{group.label} (seeds {', '.join(str(run.seed) for run in group.runs)})" for group in several]
        said.append(f"Runs that differ only in their seed are one line and one figure: {'; '.join(parts)}.")
    return [*said, timing_note(comparison)]


def timing_note(comparison: Comparison) -> str:
    """Whether times can be compared."""
    differing = [name for name in comparison.environments if name in _CLOCKS]
    if differing:
        return f"Times are not comparable: different {listed(differing)}."
    if any(not run.facts for run in comparison.runs):
        return "Times may not be comparable: not every run recorded its device and threads."
    resumed = [run.name for run in comparison.runs if _resumed_elsewhere(run)]
    if resumed:
        return f"Times may not be comparable: {listed(resumed)} went on in a changed environment."
    return (
        "Device, threads and torch are the same. Times can be compared if nothing else kept the machine busy, which "
        "no run records."
    )


def _progress(run: Run) -> str:
    """``12 of 40`` steps, or ``40``."""
    planned = run.planned
    return f"{run.last_step} of {planned}" if planned and planned != run.last_step else f"{run.last_step}"


def _resumed_elsewhere(run: Run) -> list[str]:
    """What had changed when the run went on: names of facts."""
    resumed = run.environment.get("resumed")
    entries = [e for e in resumed if isinstance(e, dict)] if isinstance(resumed, list) else []
    return list(dict.fromkeys(str(name) for entry in entries for name in (entry.get("changed") or ())))


def _trained(group: Group) -> str:
    """Training accuracy of the last steps, as text."""
    if not _verdicts(group):
        return "no verifier decides"
    estimate = training_accuracy(group)
    if estimate is None:
        return _MISSING
    return f"{estimate.value:.3f}" + ("" if estimate.low is None else f" ({estimate.interval}; {estimate.how})")


def _verdicts(group: Group) -> bool:
    return all(decides(run.environment) for run in group.runs)


def _reward(group: Group) -> tuple[str, str, str]:
    """Mean reward of the first and of the last step, and its spread over the last steps, means over the runs."""
    first, last = (over_runs(group, "reward/mean", itemgetter(place)) for place in (0, -1))
    figures = (first, last, spread_of(group, "reward/mean"))
    one, other, spread = (_MISSING if figure is None else f"{figure:.3g}" for figure in figures)
    return one, other, spread


# The figures: one line a group, the same in every figure.


def curves(groups: Sequence[Group]) -> tuple[list[Plot], list[str]]:
    """The figures of every metric of ``PANELS`` that some group logged, and the names of those that none did."""
    drawn, missing = [], []
    for metric in PANELS:
        told = [group for group in groups if metric not in VERDICTS or _verdicts(group)]
        found = [(group, curve) for group in told if (curve := curve_of(group, metric)) is not None]
        if not found:
            missing.append(metric)
        elif metric != "reward/mean" or not all(_reward_is_accuracy(group) for group, _ in found):
            drawn.append(_panel(SERIES[metric], groups, found))
    return drawn, missing


def _reward_is_accuracy(group: Group) -> bool:
    return all(logged(run, "reward/mean") == logged(run, "reward/accuracy") for run in group.runs)


def _panel(of: Series, groups: Sequence[Group], found: Sequence[tuple[Group, Curve]]) -> Plot:
    note = _note(of.metric, groups, found)
    if of.axis == "power of two" and all((curve.mean == 1).all() for _, curve in found):
        return Plot(of.heading, f"No loss is scaled: 1 on every step. {note}".strip())
    lines = []
    for group, curve in found:
        band = (curve.low, curve.high) if curve.runs > 1 else ()
        lines.append(Line(group.title, group.colour, curve.steps, curve.mean, group.dash, *band))
    zero = f"Exactly 0 wherever it was measured, in all of them. {note}".strip()
    return chart(of.heading, note, lines, of.unit, of.axis, height=2.8, zero=zero)


def _note(metric: str, groups: Sequence[Group], found: Sequence[tuple[Group, Curve]]) -> str:
    """What a reader must know of these lines: bands, averaging, what is missing or not finite."""
    said = []
    if any(curve.runs > 1 for _, curve in found):
        said.append("Line: mean over seeds; band: smallest to largest.")
    averaged = sorted({curve.per_point for _, curve in found if curve.per_point > 1})
    if averaged:
        said.append(f"Each point is the mean of {' or '.join(map(str, averaged))} steps.")
    with_it = {group.index for group, _ in found}
    without = [group.label for group in groups if group.index not in with_it]
    if without:
        said.append(f"Not logged by {', '.join(without)}.")
    for group, curve in found:
        if curve.runs < len(group.runs):
            said.append(f"{group.label}: logged by {curve.runs} of {len(group.runs)} runs.")
        odd = sum(not np.isfinite(v) for run in group.runs for v in logged(run, metric))
        if odd:
            said.append(f"{group.label}: not finite on {odd} step{'s' if odd > 1 else ''}, left out.")
    return " ".join(said)


def intervals(title: str, named: Sequence[tuple[Group, Estimate]]) -> Plot:
    """Final accuracies with their intervals, one below the other in the order given."""

    def draw(axes: Any, place: int) -> None:
        group, estimate = named[place]
        if estimate.low is not None and estimate.high is not None:
            both = ([estimate.low, estimate.high], [place, place])
            axes.plot(*both, color=group.colour, linewidth=2)
            axes.plot(*both, "|", color=group.colour, markersize=9, mew=1.6)
        axes.plot(estimate.value, place, "o", color=group.colour, markersize=6)
        axes.set_xlim(-0.02, 1.02)

    return Plot(title, "", _one_below_the_other(title, [group for group, _ in named], "fraction correct", draw))


def phases(groups: Sequence[Group]) -> Plot:
    """Seconds a step by phase, one bar a group."""
    title = "Seconds a step, by phase"
    timed = [(group, seconds) for group in groups if (seconds := seconds_by_phase(group)) is not None]
    if not timed:
        return Plot(title, "No times were logged.")
    used = [name for name in PHASE_COLOURS if any(name in seconds for _, seconds in timed)]

    def draw(axes: Any, place: int) -> None:
        seconds, left = timed[place][1], 0.0
        for name in used:
            width = seconds.get(name, 0.0)
            axes.barh(place, width, left=left, height=0.6, color=PHASE_COLOURS[name], linewidth=0)
            left += width
        if left == 0:  # a trainer's run: it times whole steps only
            axes.barh(place, seconds["step"], height=0.6, color=MUTED, linewidth=0)

    svg = _one_below_the_other(title, [group for group, _ in timed], "seconds a step", draw)
    legend = [(name.replace("_", " "), PHASE_COLOURS[name]) for name in used]
    if any(len(seconds) == 1 for _, seconds in timed):
        legend.append(("whole step, phases not logged", MUTED))
    return Plot(title, "", svg, tuple(legend))


def _one_below_the_other(title: str, groups: Sequence[Group], across: str, draw_at: Callable[[Any, int], None]) -> str:
    """An SVG with a line for each group, drawn by ``draw_at(axes, place)``."""
    with figure(5.6, 0.75 + 0.3 * len(groups)) as drawing:
        axes = drawing.subplots()
        for place in range(len(groups)):
            draw_at(axes, place)
        axes.set_yticks(
            range(len(groups)), ["\n".join(wrap(g.title, 24, max_lines=2, placeholder="…")) for g in groups]
        )
        for label in axes.get_yticklabels():
            label.set_parse_math(False)  # a recipe may hold dollars
        axes.set_ylim(len(groups) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(across)
    return to_svg(drawing, title, f"groups-{'-'.join(title.lower().replace(',', '').split())}")


# The page.


def document(comparison: Comparison) -> str:
    """The whole page."""
    groups, runs = comparison.groups, comparison.runs
    drawn, missing = curves(groups)
    title = f"{len(runs)} runs compared"
    blocks = [
        Heading(title, 1),
        Sentence(" · ".join(group.title for group in groups), "sub"),
        _summary(comparison),
        Heading("Runs"),
        *_runs(groups),
        Heading("Final accuracy"),
        *_finals(comparison),
        Heading("Curves"),
        Plots(drawn),
        *([Sentence(f"Logged by none of these runs: {', '.join(missing)}.", "note below")] if missing else []),
        Heading("Gap between rollout and learner"),
        *_gap(groups),
        Heading("Time"),
        Sentence(timing_note(comparison), "sub"),
        Plots([phases(groups)], "one"),
        *_times(groups),
        Heading("What differs"),
        _differences("recipe", "recipes", comparison.recipes, groups, [run.config is not None for run in runs]),
        _differences("environment", "environments", comparison.environments, groups, [bool(r.facts) for r in runs]),
        _differences("precision", "precision tables", comparison.precisions, groups, [bool(r.precision) for r in runs]),
    ]
    return page.render(title, blocks)


def _summary(comparison: Comparison) -> Block:
    """The card at the top: what can be said, and what must be known first."""
    lines: list[str] = [page.joined((page.strong(f"{final.title}."), " ", final.said)) for final in comparison.finals]
    lines += comparison_warnings(comparison)
    unwell = [run.name for run in comparison.runs if run.judgement.kind == "unhealthy"]
    if unwell:
        lines.append(f"Unhealthy: {', '.join(unwell)}; the reasons are below.")
    return Banner("What can be said", lines=lines)


def _runs(groups: Sequence[Group]) -> list[Block]:
    header = ("run", "folder", "seed", "steps", "overflows", "retries", "given up", "last scale", "health")
    lines = [_run(group, run) for group in groups for run in group.runs]
    note = (
        "Overflows: backward passes whose gradient overflowed; retries: those redone at a lower scale; given up: "
        "optimiser steps not taken. In all steps of the run."
    )
    return [Table(header, lines, ("n", "v", *"nnnnnn", "")), Sentence(note, "note below")]


def _run(group: Group, run: Run) -> list[Any]:
    scale = logged(run, "precision/loss_scale")
    judged = run.judgement
    reasons = [*judged.remarks, *(sentence(excursion) for excursion in run.excursions[:2])]
    if len(run.excursions) > 2:
        reasons.append(f"And {len(run.excursions) - 2} more: see its report.")
    changed = _resumed_elsewhere(run)
    if changed:
        reasons.append(f"Resumed where this had changed: {', '.join(changed)}.")
    health = page.pill(judged.kind, judged.kind)
    return [
        page.Key(group.colour, group.dash, group.label),
        run.name,
        "-" if run.seed is None else str(run.seed),
        _progress(run),
        *(page.NOT_LOGGED if (number := total(run, name)) is None else f"{number:,}" for name in _EVENTS),
        ("none" if scale[-1] == 1 else page.scale_text(scale[-1])) if scale else page.NOT_LOGGED,
        page.noted(health, " ".join(reasons)) if reasons else health,
    ]


def _heads(groups: Sequence[Group]) -> list[page.Key]:
    return [page.Key(group.colour, group.dash, group.title) for group in groups]


def _finals(comparison: Comparison) -> list[Block]:
    named = [(final.title, [(group, e) for group, e, _ in final.estimates if e]) for final in comparison.finals]
    drawn = [intervals(title, there) for title, there in named if there]
    reward = f"mean reward, first to last step (spread, last {ENDS} steps)"
    header = ["run", reward, *(final.title.lower() for final in comparison.finals), _TRAINED]
    lines = [
        [
            head,
            "{} to {} ({})".format(*_reward(group)) if over_runs(group, "reward/mean", len) else page.NOT_LOGGED,
            *(_estimate(*final.estimates[i][1:]) for final in comparison.finals),
            _trained(group),
        ]
        for i, (head, group) in enumerate(zip(_heads(comparison.groups), comparison.groups, strict=True))
    ]
    note = (
        "95% intervals. Wilson: of one run, how well so many held-out problems measure it; for the mean of k samples "
        "it errs on the wide side. t: Student's, over seeds. Results are called different only where their intervals "
        "do not overlap. Training accuracy is of those steps' own problems, sampled, while the policy still changed."
    )
    gallery = [Plots(drawn)] if drawn else []
    return [*gallery, Table(header, lines, "v" * len(header), "gap"), Sentence(note, "note below")]


def _estimate(estimate: Estimate | None, steps: Sequence[int]) -> str:
    if estimate is None:
        return page.NOT_LOGGED
    at = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    value = page.joined((page.strong(f"{estimate.value:.3f}"), f" \N{NO-BREAK SPACE}{estimate.interval}"))
    return page.noted(value, f"{estimate.how}; {at}")


def _gap(groups: Sequence[Group]) -> list[Block]:
    lines, missing = [], []
    for metric in GAP_METRICS:
        ends = [ends_of(group, metric.name) for group in groups]
        if not any(ends):
            missing.append(metric.name)
            continue
        cells = [_ends(metric, group, both, len(groups)) for group, both in zip(groups, ends, strict=True)]
        told = [group for group, both in zip(groups, ends, strict=True) if both is not None]
        ranges = " | ".join(dict.fromkeys(_of(group, metric).healthy_text for group in told))
        wanted = f"; healthy: {ranges}" if metric.gated else ""
        lines.append([page.noted(page.code(metric.name), metric.unit + wanted), *cells])
    if not lines:
        return [Sentence("No run logged a gap metric.")]
    note = f"Each cell: mean over the first {ENDS} steps → mean over the last {ENDS}; over seeds, the mean of theirs."
    if min(run.last_step for group in groups for run in group.runs) < 2 * ENDS:
        note += f" Runs of fewer than {2 * ENDS} steps count some steps in both."
    note += " Marked (!): not in the healthy range, which for k3 is that of the run's formats."
    if missing:
        note += f" Logged by none: {', '.join(missing)}."
    table = Table(["metric", *_heads(groups)], lines, "n" * (1 + len(groups)))
    return [table, *(Sentence(f"{name}: {said}.") for name, said in _sizes(groups)), Sentence(note, "note below")]


def _of(group: Group, metric: Metric) -> Metric:
    """The metric with the range that it has in the group's runs, which have one recipe."""
    return metric_of(metric.name, group.runs[0].expected)


def _sizes(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Of each run that logged a gap its name and what is said of that gap's size."""
    said = [(run.name, gap_sentence(run.rows, run.expected)) for group in groups for run in group.runs]
    return [both for both in said if both[1]]


def _ends(metric: Metric, group: Group, both: Ends | None, groups: int) -> str:
    if both is None:
        return page.NOT_LOGGED
    fold = " " if groups <= _ON_ONE_LINE else page.BREAK
    metric = _of(group, metric)
    cell = page.joined((_marked(metric, both.first), fold, "→ ", _marked(metric, both.last)))
    return page.noted(cell, f"{both.runs} of {len(group.runs)} runs") if both.runs < len(group.runs) else cell


def _marked(metric: Metric, value: float) -> str:
    shown = small(value) if abs(value) < 0.01 else f"{value:.4g}"
    return shown if metric.is_healthy(value) else page.pill("unhealthy", f"{shown} (!)")


def _times(groups: Sequence[Group]) -> list[Block]:
    phases = [seconds_by_phase(group) or {} for group in groups]
    names = list(dict.fromkeys(name for seconds in phases for name in seconds if name != "step"))
    rows: dict[str, list[str | None]] = {
        "all steps": [_duration(over_runs(group, "time/step", np.sum)) for group in groups]
    }
    for name in ("step", *names):
        title = "one step" if name == "step" else f"of it {name.replace('_', ' ')}"
        rows[title] = [seconds_text(seconds[name]) if name in seconds else None for seconds in phases]
    for title, name in (("sampled, tokens/s", "rollout"), ("trained on, tokens/s", "learner")):
        rates = [over_runs(group, f"rate/{name}_tokens_per_s", np.median) for group in groups]
        rows[title] = [None if value is None else count(value) for value in rates]
    for name in ("device", "cpu", "threads"):
        found = [dict.fromkeys(run.facts[name] for run in group.runs if name in run.facts) for group in groups]
        rows[name] = [", ".join(values) or None for values in found]
    lines = [
        [name, *(page.NOT_LOGGED if cell is None else cell for cell in cells)]
        for name, cells in rows.items()
        if any(cell is not None for cell in cells)
    ]
    note = "Means over steps, and over seeds; rates are medians over steps. The warm start is not timed."
    table = Table(["", *_heads(groups)], lines, ("n", *("v" for _ in groups)), "gap")
    return [table, Sentence(note, "note below")]


def _duration(value: float | None) -> str | None:
    return None if value is None else f"{value:.2g} s" if value < 10 else duration(value)


def _differences(
    kind: str, plural: str, found: Differences, groups: Sequence[Group], recorded: Sequence[bool]
) -> Block:
    """A table of what differs, or a sentence. ``recorded``: which runs have such a thing at all."""
    if not any(recorded):
        return Sentence(f"No run recorded its {kind}.", "note below")
    if not found:
        which = "" if all(recorded) else f" of the {sum(recorded)} runs that recorded one"
        return Sentence(f"The {plural}{which} are equal.", "note below")
    lines = [[page.code(name), *(value or page.NOT_RECORDED for value in values)] for name, values in found.items()]
    return Table([kind, *_heads(groups)], lines, ("n", *("v" for _ in groups)), "gap")


# The terminal.


def show(comparison: Comparison, console: Console) -> None:
    """Print the summary."""
    groups = comparison.groups
    rows = [_run_row(group, run) for group in groups for run in group.runs]
    _print(console, "Runs", ("run", "folder", "steps", "overflow/retry/skip", "health"), rows)
    for run in comparison.runs:
        reasons = [*run.judgement.remarks, *(sentence(excursion) for excursion in run.excursions)]
        if reasons:
            more = f" And {len(reasons) - 1} more, on the page." if len(reasons) > 1 else ""
            console.print(Text(f"{run.name}: {reasons[0]}{more}", style="dim"))
    for final in comparison.finals:
        if any(estimate is not None for _, estimate, _ in final.estimates):
            shown = [
                (group.title, *((_MISSING, "", "") if e is None else (f"{e.value:.3f}", e.interval, e.how)))
                for group, e, _ in final.estimates
            ]
            _print(console, final.title, ("run", "last", "95% interval", "of"), shown)
            console.print(final.said)
    if any("reward/mean" in run.rows[-1] for run in comparison.runs):
        rewards = [(group.title, *_reward(group)) for group in groups]
        _print(console, "Mean reward", ("run", "first step", "last step", f"spread, last {ENDS} steps"), rewards)
    if any("reward/accuracy" in run.rows[-1] and decides(run.environment) for run in comparison.runs):
        _print(console, _TRAINED.capitalize(), ("run", "mean"), [(group.title, _trained(group)) for group in groups])
    header = ("run", "|dlogp|", "k3 KL", "ESS", "s/step", "tokens/s")
    _print(console, f"Gap (mean of the last {ENDS} steps) and time", header, map(_gap_and_time, groups))
    for name, said in _sizes(groups):
        console.print(Text(f"{name}: {said}", style="dim"))
    console.print()
    for line in comparison_warnings(comparison):
        console.print(line)
    _print_differences(comparison, console)


def _print(console: Console, title: str, header: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    cells = ([cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows)
    console.print(Text(f"\n{title}", style="bold"))
    console.print(page.terminal(header, cells, padding=(0, 1), pad_edge=False, header_style="dim"))


def _run_row(group: Group, run: Run) -> tuple[str | Text, ...]:
    counts = [total(run, name) for name in _EVENTS]
    events = _MISSING if counts == [None] * 3 else "/".join("?" if n is None else str(n) for n in counts)
    kind = run.judgement.kind
    return group.label, run.name, _progress(run), events, Text(kind, style=_STYLES[kind])


def _gap_and_time(group: Group) -> list[str | Text]:
    row: list[str | Text] = [group.title]
    for name in ("gap/abs_logp_diff_mean", "gap/k3_kl", "gap/ess"):
        ends = ends_of(group, name)
        style = "" if ends is None or metric_of(name, group.runs[0].expected).is_healthy(ends.last) else "bold red"
        row.append(_MISSING if ends is None else Text(f"{ends.last:.2g}", style=style))
    seconds = (seconds_by_phase(group) or {}).get("step")
    tokens = over_runs(group, "rate/rollout_tokens_per_s", np.median)
    return [*row, _MISSING if seconds is None else f"{seconds:.3g}", _MISSING if tokens is None else count(tokens)]


def _print_differences(comparison: Comparison, console: Console) -> None:
    """One line a differing key: its values in the order of the groups."""
    for title, found in (("recipe", comparison.recipes), ("environment", comparison.environments)):
        if not found:
            continue
        console.print()
        console.print(Text(f"What differs in the {title}, in the order above", style="bold"))
        for name, values in [*found.items()][:_MOST_KEYS]:
            console.print(Text(f"{name}: ").append(" | ".join(value or "-" for value in values), style="dim"))
        if len(found) > _MOST_KEYS:
            console.print(f"and {len(found) - _MOST_KEYS} more, on the page")
