"""The report's figures: each takes rows and returns a ``Plot``, a drawing or a sentence where there is nothing to draw.

Log axes have no zero, and a run in fp32 can have a gap of exactly 0: zeros are drawn on the floor of the plot as open
circles, and a gap that is 0 throughout is a sentence.

Matplotlib figures as inline SVG that follows the page: its colours (light or dark), its font, no ids in common.

Figures are drawn in stand-in colours, one for each role, which are replaced by CSS variables in the SVG's text; so
one drawing is legible in both colour schemes. Text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mantissa.runs.metrics import (
    PHASES,
    Array,
    fit_line,
    phase_times,
    sequence_log_ratios,
    series,
    token_logps,
    where_measured,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


INK, MUTED, GRID, PAPER = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04"
SERIES = ("#0a0b11", "#0a0b12", "#0a0b13", "#0a0b14", "#0a0b15", "#0a0b16", "#0a0b17", "#0a0b18")
# Whole runs beside each other: told apart by any two eyes, and by their dashes too (``compare/plots.py``).
RUNS = ("#0a0b21", "#0a0b22", "#0a0b23", "#0a0b24", "#0a0b25", "#0a0b26", "#0a0b27", "#0a0b28")
VARIABLES = (
    {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--card"}
    | {colour: f"--c{i}" for i, colour in enumerate(SERIES, start=1)}
    | {colour: f"--r{i}" for i, colour in enumerate(RUNS, start=1)}
)

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mantissa",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib; wider than most, so what fits in it fits
    "font.size": 8.5,
    "mathtext.default": "regular",
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "axes.titlesize": 8.5,
    "axes.titlecolor": MUTED,
    "axes.titlelocation": "left",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "figure.facecolor": "none",
    "lines.linewidth": 1.6,
    "lines.solid_joinstyle": "round",
}


@contextmanager
def styled() -> Iterator[None]:
    """The house style, for the drawing and the saving of a figure."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def figure(width: float = 5.6, height: float = 2.7) -> Figure:
    """An empty figure, in inches, outside pyplot's global state."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(drawing)
    return drawing


def step_axis(axes: Axes, label: str = "step", ticks: int = 8) -> None:
    """Steps along x: about ``ticks`` whole numbers. Call it after drawing: a single step gets room around it."""
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_xlim()
    if high - low < 2:
        axes.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks, integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="x", visible=False)
    axes.set_xlabel(label)


def to_svg(drawing: Figure, name: str, description: str) -> str:
    """The figure as an ``<svg>`` element. ``name`` prefixes its ids; ``description`` is what a screen reader says."""
    buffer = io.StringIO()
    drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    view = re.search(r'viewBox="[^"]*"', text)
    assert view is not None, "matplotlib writes a viewBox"
    label = description.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    head = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {view.group()} role="img" aria-label="{label}">'
    return head + text[text.index(">") + 1 :].strip()


Rows = Sequence[dict[str, Any]]
BLUE, ORANGE, GREEN, PURPLE, TEAL, PINK, BROWN, GREY = SERIES
PHASE_COLOURS = (BLUE, PINK, TEAL, MUTED, INK, ORANGE, PURPLE, GREEN, BROWN, GREY)  # of PHASES and other
Dash = tuple[float, ...]  # lengths of strokes and spaces in line widths; empty is solid
_FEW = 12  # points up to which a line also shows its markers
_MANY = 250  # points from which a line is thin, so that noise does not turn into a band


@dataclass(frozen=True)
class Plot:
    """A figure of a page. ``legend``: label and stand-in colour; ``svg`` is empty where ``note`` says it all."""

    title: str
    note: str
    svg: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    dashes: tuple[Dash, ...] = ()  # of each entry of the legend, where lines differ in more than colour


def curve(axes: Axes, x: Array, y: Array, colour: str, **style: Any) -> None:
    """A curve: with markers where it has few points, thin where it has many."""
    width = 0.8 if x.size > _MANY else 1.6
    axes.plot(x, y, **{"color": colour, "marker": "o" if x.size <= _FEW else "", "markersize": 3.5} | style, lw=width)


def learning(rows: Rows, warm_start: Rows) -> Plot:
    """Accuracy and reward by step, evaluations as points, the warm start to the left of where RL begins."""
    title = "Reward and accuracy"
    accuracy, reward = series(rows, "reward/accuracy"), series(rows, "reward/mean")
    if accuracy[1].size + reward[1].size == 0:
        return Plot(title, "No step has been logged.")
    same = accuracy[1].size == reward[1].size and bool(np.array_equal(accuracy[1], reward[1]))
    legend = [("accuracy, also the reward" if same else "accuracy of training samples", BLUE)]
    warm = series(warm_start, "warm_start/accuracy")
    with styled():
        drawing = figure(5.6, 2.9)
        axes = drawing.subplots(1, 2, sharey=True, width_ratios=(1, 3)) if warm[0].size else [drawing.subplots()]
        main = axes[-1]
        curve(main, *accuracy, BLUE)
        if not same:
            curve(main, *reward, ORANGE)
            legend.append(("mean reward", ORANGE))
        legend += _evaluations(main, rows)
        if warm[0].size:
            curve(axes[0], *warm, PURPLE)
            axes[0].set_title("warm start")
            axes[0].axvline(warm[0][-1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
            step_axis(axes[0], "update", ticks=3)
            main.set_title("reinforcement learning")
            legend.append(("accuracy in the warm start", PURPLE))
        shown = [v for v in (accuracy[1], reward[1], warm[1]) if v.size]
        low, high = min(v.min() for v in shown), max(v.max() for v in shown)
        if low >= -0.001 and high <= 1.001:
            main.set_ylim(-0.03, 1.03)
        step_axis(main)
        svg = to_svg(drawing, "learning", title)
    note = "Fractions of completions judged correct."
    if warm[0].size:
        note += f" The warm start ended at update {warm[0][-1]:.0f} with {warm[1][-1]:.2f}."
    return Plot(title, note, svg, tuple(legend))


def _evaluations(axes: Axes, rows: Rows) -> list[tuple[str, str]]:
    """Held-out accuracies as diamonds, joined by a line; their legend."""
    legend = []
    for name, label, colour in (
        ("eval/greedy_accuracy", "held out, greedy", GREEN),
        ("eval/avg_at_k", "held out, mean of k", BROWN),
    ):
        x, y = series(rows, name)
        if x.size:
            size = 5 if x.size <= 2 * _FEW else 0
            axes.plot(x, y, color=colour, marker="D", markersize=size, linewidth=1, linestyle=(0, (2, 2)))
            legend.append((label, colour))
    return legend


def decades(axes: Axes, which: str, ticks: int = 6) -> None:
    """Tick labels 10^k on an axis that already holds log10 values."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(nbins=ticks, integer=True))
    axis.set_major_formatter(FuncFormatter(lambda v, _: "1" if v == 0 else f"$10^{{{v:.0f}}}$"))


def density(axes: Axes, x: Array, y: Array, colour: str) -> None:
    """Hexagons whose opacity grows with the log of how many points fell in; legible on light and dark."""
    from matplotlib.colors import to_rgb

    cells = axes.hexbin(x, y, gridsize=46, mincnt=1, linewidths=0)
    counts = np.asarray(cells.get_array())
    weight = np.log1p(counts) / np.log1p(counts.max())
    red, green, blue = to_rgb(colour)
    cells.set_array(None)
    cells.set_facecolor([(red, green, blue, round(float(w), 2)) for w in 0.2 + 0.8 * weight])


def probabilities(rollouts: Rows) -> Plot:
    """Each token's probability under the learner against the rollout, and how far apart they are."""
    title = "Token probabilities: learner against rollout"
    rollout, learner = token_logps(rollouts)
    if rollout.size == 0:
        return Plot(title, "No rollouts with both log-probs were kept.")
    gap = np.abs(learner - rollout)
    equal = float(np.mean(gap == 0))
    steps = sorted({row["step"] for row in rollouts if row.get("learner_logp") is not None})
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    to_decades = 1 / np.log(10)
    with styled():
        drawing = figure(5.6, 2.9)
        apart = gap > 0
        left, *others = drawing.subplots(1, 2 if apart.any() else 1, squeeze=False)[0]
        low = float(min(rollout.min(), learner.min(), np.log(0.1))) * to_decades
        left.plot([low, 0], [low, 0], color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
        density(left, rollout * to_decades, learner * to_decades, BLUE)
        left.set(xlim=(low, -low * 0.03), ylim=(low, -low * 0.03))
        left.set_xlabel("p under the rollout")
        left.set_ylabel("p under the learner")
        decades(left, "x")
        decades(left, "y")
        for right in others:
            density(right, rollout[apart] * to_decades, np.log10(gap[apart]), ORANGE)
            decades(right, "y")
            right.set_xlim(low, -low * 0.03)
            decades(right, "x")
            right.set_xlabel("p under the rollout")
            right.set_ylabel("|log-prob difference|, nats")
        svg = to_svg(drawing, "probabilities", title)
    note = (
        f"{rollout.size:,} tokens of {span}. On the diagonal both agree: {equal:.1%} do to the last bit; the "
        f"log-probs differ by {gap.mean():.1e} nats in the mean, {gap.max():.1e} at most."
    )
    if equal == 1.0:
        note = f"{rollout.size:,} tokens of {span}: every log-prob is equal on both sides."
    return Plot(title, note, svg)


def length_drift(rollouts: Rows) -> Plot:
    """Each sequence's log-ratio against its length, with the least-squares line."""
    title = "Sequence log-ratio against length"
    length, total = sequence_log_ratios(rollouts)
    if length.size == 0:
        return Plot(title, "No rollouts with both log-probs were kept.")
    if not total.any():
        return Plot(title, f"The log-ratio of all {length.size:,} sequences is exactly 0.")
    line = fit_line(length, total)
    with styled():
        drawing = figure()
        axes = drawing.subplots()
        axes.axhline(0, color=MUTED, linewidth=0.8)
        keep = np.linspace(0, length.size - 1, min(length.size, 1500)).astype(int)
        axes.plot(length[keep], total[keep], linestyle="", marker="o", markersize=3, color=BLUE, alpha=0.45, mew=0)
        if line is not None:
            ends = np.array([length.min(), length.max()])
            axes.plot(ends, line[0] * ends + line[1], color=ORANGE)
        axes.set_xlabel("length, tokens")
        axes.set_ylabel("sum of log r, nats")
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3), useMathText=True)
        svg = to_svg(drawing, "drift", title)
    spread = f"{length.size:,} sequences; the log-ratio's standard deviation is {total.std():.1e} nats"
    if line is None:
        return Plot(title, f"{spread}. All have the same length, so there is no slope.", svg, (("sequence", BLUE),))
    note = f"{spread}; fitted slope {1000 * line[0]:+.2g} nats per 1,000 tokens. r = p learner / p rollout."
    return Plot(title, note, svg, (("sequence", BLUE), ("least-squares line", ORANGE)))


def gap(rows: Rows, share: str = "") -> Plot:
    """Gap metrics by step on a log axis, zeros on its floor; dashed the gap's parts, where an engine's was measured.

    ``share``: a sentence on these, for the note.
    """
    title = "Gap between rollout and learner"
    part: Dash = (2.0, 1.6)
    named: tuple[tuple[str, str, str, Dash], ...] = (
        ("max |log-prob difference|", "gap/abs_logp_diff_max", PINK, ()),
        ("mean |log-prob difference|", "gap/abs_logp_diff_mean", ORANGE, ()),
        ("k3 KL", "gap/k3_kl", BLUE, ()),
        ("mean, the engine's part", "gap/engine_abs_logp_diff_mean", GREEN, part),
        ("mean, everything else", "gap/other_abs_logp_diff_mean", PURPLE, part),
    )
    drawn = [(label, colour, dash, *series(rows, name)) for label, name, colour, dash in named]
    drawn = [entry for entry in drawn if entry[3].size]
    if not drawn:
        return Plot(title, "No gap was logged.")
    positive = np.concatenate([y[y > 0] for *_, y in drawn])
    if positive.size == 0:
        measured = max(x.size for *_, x, _ in drawn)
        note = f"Exactly 0 at {where_measured(measured, len(rows))}: no token's log-prob differed."
        return Plot(title, f"{note} {share}".rstrip())
    with styled():
        drawing = figure()
        axes = drawing.subplots()
        lines = [(x, y, colour, {"linestyle": (0, dash)} if dash else {}) for _, colour, dash, x, y in drawn]
        zeros = log_lines(axes, lines)
        axes.set_ylabel("nats")
        step_axis(axes)
        svg = to_svg(drawing, "gap", title)
    note = "The same tokens, scored by both."
    if zeros:
        note += " Open circles on the floor are exact zeros."
    legend = tuple((label, colour) for label, colour, *_ in drawn)
    dashes = tuple(dash for _, _, dash, *_ in drawn)
    return Plot(title, f"{note} {share}".rstrip(), svg, legend, dashes if any(dashes) else ())


def ratio_parts(rows: Rows) -> Plot:
    """Sizes of the log-ratio's two parts by step on a log axis, and below them what the clip took, and for which."""
    title = "Log-ratio: what was learned and what is numerical"
    named = (("|alpha|, moved by learning", "alpha", BLUE), ("|beta|, kernels and formats", "beta", ORANGE))
    drawn = [(label, colour, *series(rows, f"policy/{name}_abs_mean")) for label, name, colour in named]
    clips = (("clipped", "clip", GREY), ("phantom: for beta alone", "phantom_clip", PINK))
    held = [(label, colour, *series(rows, f"policy/{name}_fraction")) for label, name, colour in clips]
    held = [entry for entry in held if entry[2].size]
    if not drawn[1][2].size:
        return Plot(title, "Not logged.")
    said = "; ".join(f"{part} {y.mean():.2g}" for part, (*_, y) in zip(("alpha", "beta"), drawn, strict=True))
    note = f"Means over the steps, in nats a token: {said}."
    if held:
        phantom = held[-1][3]
        note += f" The clip at alpha + beta holds {phantom.mean():.2%} of the tokens that alpha alone would leave"
        note += f" ({phantom.max():.2%} in the worst step); it does so with correction: bypass only."
    if not any(y.any() for *_, y in drawn + held):
        return Plot(title, note)
    with styled():
        drawing = figure()
        top, *below = drawing.subplots(
            1 + bool(held), 1, sharex=True, height_ratios=(1.5, 1)[: 1 + bool(held)], squeeze=False
        )[:, 0]
        if any(y.any() for *_, y in drawn):
            log_lines(top, [(x, y, colour, {}) for _, colour, x, y in drawn])
        top.set_ylabel("nats")
        step_axis(top, "" if held else "step")
        for bottom in below:
            for _, colour, x, y in held:
                curve(bottom, x, 100 * y, colour)
            bottom.set_ylim(bottom=0)
            bottom.set_ylabel("% of tokens")
            step_axis(bottom)
        svg = to_svg(drawing, "ratio_parts", title)
    return Plot(title, note, svg, tuple((label, colour) for label, colour, *_ in drawn + held))


def log_lines(axes: Axes, drawn: Sequence[tuple[Array, Array, str, dict[str, Any]]]) -> int:
    """Curves (x, y, colour, style) on a log axis, what is 0 or below as open circles on its floor; how many are.

    At least one value must be above 0. k3 may be a hair below 0 by rounding.
    """
    positive = np.concatenate([y[y > 0] for _, y, _, _ in drawn])
    floor = 10.0 ** (np.floor(np.log10(positive.min())) - 1)
    axes.set_yscale("log")
    zeros = 0
    for x, y, colour, style in drawn:
        at_zero = y <= 0
        zeros += int(at_zero.sum())
        curve(axes, x, np.where(at_zero, np.nan, y), colour, **style)
        axes.plot(x[at_zero], np.full(at_zero.sum(), floor), "o", color=colour, markerfacecolor="none", markersize=4)
    if zeros:
        axes.set_ylim(bottom=floor / 2)
    return zeros


def scaling(rows: Rows) -> Plot:
    """The loss scale by step, and below it the steps with overflows, retries and updates given up."""
    title = "Loss scale and overflows"
    x, scale = series(rows, "precision/loss_scale")
    if x.size == 0:
        return Plot(title, "No loss scale was logged.")
    named = (("given up", "skipped", PINK), ("retry", "retries", BLUE), ("overflow", "overflows", ORANGE))
    events = [(label, colour, *series(rows, f"precision/{name}")) for label, name, colour in named]
    totals = ", ".join(f"{label} {int(y.sum())}" for label, _, _, y in reversed(events))
    quiet = not any(y.any() for _, _, _, y in events)
    if quiet and scale.min() == scale.max() == 1:
        return Plot(title, "The loss is not scaled (scale 1 at every step), and no backward pass overflowed.")
    with styled():
        drawing = figure()
        ratios = (1,) if quiet else (2.4, 1)
        top, *below = drawing.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False)[:, 0]
        top.step(x, scale, where="mid", color=PURPLE, marker="o" if x.size <= _FEW else "", markersize=3.5)
        top.set_yscale("log", base=2)
        top.set_ylim(scale.min() / 2, scale.max() * 2)
        top.set_ylabel("scale")
        step_axis(top, "step" if quiet else "")
        for bottom in below:
            for lane, (_, colour, at, y) in enumerate(events):
                at = at[y > 0]
                bottom.plot(at, np.full(at.size, lane), "|", color=colour, markersize=11, markeredgewidth=2)
            bottom.set_yticks(range(len(events)), [label for label, *_ in events])
            bottom.set_ylim(-0.6, len(events) - 0.4)
            bottom.grid(visible=False)
            step_axis(bottom)
        svg = to_svg(drawing, "scaling", title)
    return Plot(title, "No backward pass overflowed." if quiet else f"In all: {totals}.", svg)


def time_by_phase(rows: Rows) -> Plot:
    """Seconds of each step, stacked by phase."""
    title = "Time by phase"
    times = phase_times(rows)
    if times is None:
        return Plot(title, "No times were logged.")
    colours = dict(zip((*PHASES, "other"), PHASE_COLOURS, strict=True))
    with styled():
        drawing = figure()
        axes = drawing.subplots()
        bottom = np.zeros_like(times.steps)
        width = 0.9 * (times.per_bar if times.steps.size > 1 else 0.3)
        for name, seconds in zip(times.names, times.seconds, strict=True):
            axes.bar(times.steps, seconds, width=width, bottom=bottom, color=colours[name], linewidth=0)
            bottom = bottom + seconds
        axes.set_ylabel("seconds a step")
        step_axis(axes)
        svg = to_svg(drawing, "time", title)
    share = times.seconds.sum(axis=1) / times.seconds.sum() if times.seconds.size and times.seconds.sum() > 0 else []
    parts = sorted(zip(share, times.names, strict=False), reverse=True)
    note = ", ".join(f"{name.replace('_', ' ')} {part:.0%}" for part, name in parts if part >= 0.005) + "."
    if times.per_bar > 1:
        note += f" Each bar is the mean of {times.per_bar} steps."
    return Plot(title, note, svg, tuple((name.replace("_", " "), colours[name]) for name in times.names))


def entropy(rows: Rows) -> Plot:
    """Policy entropy by step."""
    return _simple("Entropy of the policy", rows, (("entropy", "policy/entropy", TEAL),), "nats a token", "entropy")


def length(rows: Rows) -> Plot:
    """Response length by step: mean and longest."""
    plot = _simple(
        "Response length",
        rows,
        (("longest", "length/max", GREY), ("mean", "length/mean", BLUE)),
        "tokens",
        "length",
    )
    truncated = series(rows, "length/truncated_fraction")[1]
    if plot.svg and truncated.size:
        note = (
            f"Cut off at the limit: {truncated[-1]:.1%} of completions on the last step, {truncated.max():.1%} at most."
        )
        return Plot(plot.title, note, plot.svg, plot.legend)
    return plot


def _simple(title: str, rows: Rows, named: Sequence[tuple[str, str, str]], unit: str, name: str) -> Plot:
    drawn = [(label, colour, *series(rows, metric)) for label, metric, colour in named]
    drawn = [entry for entry in drawn if entry[2].size]
    if not drawn:
        return Plot(title, "Not logged.")
    with styled():
        drawing = figure()
        axes = drawing.subplots()
        for _, colour, x, y in drawn:
            curve(axes, x, y, colour)
        axes.set_ylim(bottom=min(0.0, *(float(y.min()) for _, _, _, y in drawn)))
        axes.set_ylabel(unit)
        step_axis(axes)
        svg = to_svg(drawing, name, title)
    label, _, x, y = drawn[-1]
    note = f"{label.capitalize()}: {y[0]:.3g} {unit}" + (
        f" at step {x[0]:.0f}, {y[-1]:.3g} at step {x[-1]:.0f}." if x.size > 1 else "."
    )
    return Plot(title, note, svg, _legend(drawn))


def _legend(drawn: Sequence[tuple[str, str, Array, Array]]) -> tuple[tuple[str, str], ...]:
    return tuple((label, colour) for label, colour, _, _ in drawn) if len(drawn) > 1 else ()
