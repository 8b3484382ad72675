"""The report's figures: each takes rows and returns a ``Plot``, a drawing or a sentence where there is nothing to draw.

Which metric is drawn under which title, in which unit and on which axis stands in one table, ``metrics.SERIES``; what
draws here and in a comparison is ``draw``, in one style.

Log axes have no zero, and a run in fp32 can have a gap of exactly 0: zeros are drawn on the floor of the plot as open
circles. What is 0 throughout is a sentence, on any axis: a figure that is a flat line looks as if it were broken.

Matplotlib figures as inline SVG that follows the page: its colours (light or dark), its font, no ids in common. They
are drawn in stand-in colours, one for each role, which are replaced by CSS variables in the SVG's text; so one drawing
is legible in both colour schemes. Text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import escape

from mantissa.runs.metrics import (
    PHASES,
    SERIES,
    Array,
    Axis,
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

INK, MUTED, GRID, PAPER = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04"
COLOURS = ("#0a0b11", "#0a0b12", "#0a0b13", "#0a0b14", "#0a0b15", "#0a0b16", "#0a0b17", "#0a0b18")
BLUE, ORANGE, GREEN, PURPLE, TEAL, PINK, BROWN, GREY = COLOURS
# Whole runs beside each other: told apart by any two eyes, and by their dashes too.
RUNS = ("#0a0b21", "#0a0b22", "#0a0b23", "#0a0b24", "#0a0b25", "#0a0b26", "#0a0b27", "#0a0b28")
VARIABLES = (
    {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--card"}
    | {colour: f"--c{i}" for i, colour in enumerate(COLOURS, start=1)}
    | {colour: f"--r{i}" for i, colour in enumerate(RUNS, start=1)}
)
_PRINTED = {INK: "#1c1d1f", MUTED: "#63656b", GRID: "#e6e5e0"}  # the light page's, for a picture without a page
PHASE_COLOURS = dict(
    zip(
        (*PHASES, "other"),
        (BLUE, PINK, RUNS[3], TEAL, RUNS[1], MUTED, INK, ORANGE, PURPLE, GREEN, BROWN, GREY),
        strict=True,
    )
)
Rows = Sequence[dict[str, Any]]
Dash = tuple[float, ...]  # lengths of strokes and spaces in line widths; empty is solid
DASHES: tuple[Dash, ...] = ((), (4, 1.8), (1.1, 1.3), (5, 1.4, 1.1, 1.4), (8, 2), (2.4, 1.2), (5, 1.2, 1, 1.2, 1, 1.2),
                            (8, 1.5, 2.5, 1.5))  # fmt: skip
_FEW = 12  # points up to which a line also shows its markers
_MANY = 250  # points from which a line is thin, so that noise does not turn into a band
_BROKEN: Any = (0, (4, 3))  # the stroke of what is no measurement: a diagonal, an end

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "mantissa", "font.family": "sans-serif", "font.size": 8.5,
    "font.sans-serif": "DejaVu Sans",  # comes with matplotlib; wider than most, so what fits in it fits
    "mathtext.default": "regular", "text.color": INK, "figure.facecolor": "none",
    "axes.edgecolor": GRID, "axes.labelcolor": MUTED, "axes.facecolor": "none", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "axes.linewidth": 0.8,
    "axes.titlesize": 8.5, "axes.titlecolor": MUTED, "axes.titlelocation": "left", "grid.color": GRID,
    "grid.linewidth": 0.6, "lines.linewidth": 1.6, "lines.solid_joinstyle": "round", "legend.frameon": False,
    **{f"{axis}tick.{part}": MUTED for axis in "xy" for part in ("color", "labelcolor")},
    **{f"{axis}tick.{part}.size": 0 for axis in "xy" for part in ("major", "minor")},
}  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """A figure of a page. ``legend``: label and stand-in colour; ``svg`` is empty where ``note`` says it all."""

    title: str
    note: str
    svg: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    dashes: tuple[Dash, ...] = ()  # of each entry of the legend, where lines differ in more than colour


@dataclass(frozen=True)
class Line:
    """One line of a figure; ``low`` and ``high`` are a band around it."""

    label: str
    colour: str
    x: Array
    y: Array
    dash: Dash = ()
    low: Array | None = None
    high: Array | None = None


@contextmanager
def figure(width: float = 5.6, height: float = 2.7, printed: bool = False) -> Iterator[Figure]:
    """An empty figure, in inches, outside pyplot's global state, to be drawn in the house style; ``printed``: in
    colours of its own, for a file without a page."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with _styled(_PRINTED if printed else {}):
        drawing = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(drawing)
        yield drawing


@contextmanager
def _styled(colours: Mapping[Any, str]) -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context({key: colours.get(value, value) for key, value in _STYLE.items()}):
        yield


def step_axis(axes: Axes, label: str = "step", ticks: int = 8) -> None:
    """Steps along x: about ``ticks`` whole numbers. Call it after drawing: a single step gets room around it."""
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_xlim()
    if high - low < 2:
        axes.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks, integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="x", visible=False)
    axes.set_xlabel(label)


def to_svg(drawing: Figure, title: str, name: str = "") -> str:
    """The figure as an ``<svg>`` element. ``title``: what a screen reader says; ``name`` (or it) prefixes ids."""
    name = name or re.sub("[^a-z0-9]+", "-", title.lower()).strip("-")
    buffer = io.StringIO()
    with _styled({}):
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
    head = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {view.group()} role="img" aria-label="{escape(title)}">'
    return head + text[text.index(">") + 1 :].strip()


def lines_of(rows: Rows, colours: Mapping[str, str], dash: Dash = ()) -> list[Line]:
    """A line for each of these metrics that was logged, with its title in ``SERIES`` as label."""
    found = [Line(SERIES[name].title, colour, *series(rows, name), dash) for name, colour in colours.items()]
    return [line for line in found if line.x.size]


def draw(axes: Axes, lines: Sequence[Line], axis: Axis = "linear", **style: Any) -> int:
    """Bands, and lines over them; returns how many zeros lie on a log axis's floor.

    A line has markers where it has few points, and is thin where it has many. On a log axis at least one value must be
    above 0; k3 may be a hair below 0 by rounding.
    """
    logarithmic = axis in ("log", "power of two")
    for line in lines:
        if line.low is not None and line.high is not None:
            low = np.where(line.low > 0, line.low, np.nan) if logarithmic else line.low
            axes.fill_between(line.x, low, line.high, color=line.colour, alpha=0.16, linewidth=0)
    floor = 0.0
    if axis == "log":
        positive = np.concatenate([line.y[line.y > 0] for line in lines])
        floor = 10.0 ** (np.floor(np.log10(positive.min())) - 1)
        axes.set_yscale("log")
    zeros = 0
    for line in lines:
        at_zero = (line.y <= 0) & (axis == "log")
        zeros += int(at_zero.sum())
        path: dict[str, Any] = {"color": line.colour, "marker": "o" if line.x.size <= _FEW else "", "markersize": 3.5}
        path |= {"linestyle": (0, line.dash), "dash_capstyle": "butt"} if line.dash else {}
        path |= {"drawstyle": "steps-mid"} if axis == "power of two" else {}
        path |= style
        axes.plot(line.x, np.where(at_zero, np.nan, line.y), lw=0.8 if line.x.size > _MANY else 1.6, **path)
        on_floor = np.full(at_zero.sum(), floor)
        axes.plot(line.x[at_zero], on_floor, "o", color=line.colour, markerfacecolor="none", markersize=4)
    lowest = min(float((line.y if line.low is None else line.low).min()) for line in lines)
    highest = max(float((line.y if line.high is None else line.high).max()) for line in lines)
    if zeros:
        axes.set_ylim(bottom=floor / 2)
    elif axis == "power of two":
        axes.set_yscale("log", base=2)
        axes.set_ylim(lowest / 2, highest * 2)
    elif axis == "fraction" and lowest >= -0.001 and highest <= 1.001:
        axes.set_ylim(-0.03, 1.03)
    return zeros


def chart(title: str, note: str, lines: Sequence[Line], unit: str, axis: Axis = "linear", *, across: str = "step",
          height: float = 2.7, bottom: float | None = None, legend: Sequence[Line] | None = None, keys: bool = True,
          none: str = "None of these runs logged it.", zero: str = "Exactly 0 wherever it was measured.",
          **style: Any) -> Plot:  # fmt: skip
    """A figure of one panel. ``legend``: the lines in it, all unless given; with ``keys`` it shows dashes too.

    ``none``, ``zero``: the sentence in place of a figure without lines, or with nothing to show: on a log axis nothing
    above 0, on others nothing but 0.
    """
    if not lines:
        return Plot(title, none)
    if not any((line.y > 0).any() if axis == "log" else _seen(line) for line in lines):
        return Plot(title, zero)
    with figure(5.6, height) as drawing:
        axes = drawing.subplots()
        if draw(axes, lines, axis, **style):
            note += " Open circles on the floor are exact zeros."
        if bottom is not None:
            axes.set_ylim(bottom=bottom)
        axes.set_ylabel(unit)
        step_axis(axes, across)
    shown = lines if legend is None else legend
    dashes = tuple(line.dash for line in shown) if keys else ()
    return Plot(title, note.strip(), to_svg(drawing, title), _legend(shown), dashes)


def _seen(line: Line) -> bool:
    """Whether there is anything but 0 in a line and its band."""
    return bool(line.y.any() or (line.high is not None and line.high.any()))


def _why_none(rows: Rows, *metrics: str) -> str:
    """Why a panel of these metrics is empty."""
    if not rows:
        return "No step is finished yet."
    if all(row.get("optim/updates") == 0 for row in rows) and any("reward/mean" in row for row in rows):
        return "Nothing was learned at any step, so there is nothing to show: every advantage was 0, or was left out."
    return f"No row of this run has {' or '.join(metrics)}."


def _legend(lines: Sequence[Line]) -> tuple[tuple[str, str], ...]:
    return tuple((line.label, line.colour) for line in lines)


def learning(rows: Rows, warm_start: Rows, verdicts: bool = True) -> Plot:
    """Accuracy and reward by step, evaluations as points, the warm start to the left of where RL begins; the reward
    alone where there are no ``verdicts`` of what is correct."""
    title = "Reward and accuracy" if verdicts else "Reward"
    trained = lines_of(rows, {"reward/accuracy": BLUE} if verdicts else {})
    trained += lines_of(rows, {"reward/mean": ORANGE})
    if not trained:
        return Plot(title, "No step has been logged.")
    if len(trained) == 2 and np.array_equal(trained[0].y, trained[1].y):
        both, _ = trained
        trained = [Line("accuracy, also the reward", BLUE, both.x, both.y)]
    held_out = lines_of(rows, {"eval/greedy_accuracy": GREEN, "eval/avg_at_k": BROWN} if verdicts else {}, dash=(2, 2))
    warm = lines_of(warm_start, {"warm_start/accuracy": PURPLE})
    if not any(map(_seen, (*trained, *held_out, *warm))):
        return Plot(title, "Exactly 0 throughout: no completion was right, and none was rewarded.")
    note = "Fractions of completions judged correct." if verdicts else "Mean reward of the completions trained on."
    with figure(5.6, 2.9) as drawing:
        axes = drawing.subplots(1, 2, sharey=True, width_ratios=(1, 3)) if warm else [drawing.subplots()]
        main = axes[-1]
        draw(main, trained)
        for line in held_out:
            draw(main, [line], marker="D", markersize=5 if line.x.size <= 2 * _FEW else 0)
        for line in warm:
            draw(axes[0], [line])
            axes[0].set_title("warm start")
            axes[0].axvline(line.x[-1], color=MUTED, linewidth=1, linestyle=_BROKEN)
            step_axis(axes[0], "update", ticks=3)
            main.set_title("reinforcement learning")
            note += f" The warm start ended at update {line.x[-1]:.0f} with {line.y[-1]:.2f}."
        shown = np.concatenate([line.y for line in (*trained, *warm)])
        if shown.min() >= -0.001 and shown.max() <= 1.001:
            main.set_ylim(-0.03, 1.03)
        step_axis(main)
    return Plot(title, note, to_svg(drawing, title), _legend((*trained, *held_out, *warm)))


def decades(axes: Axes, which: str, ticks: int = 6) -> None:
    """Tick labels 10^k on an axis that already holds log10 values; what they stand for where ticks lie between."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(nbins=ticks, integer=True))

    def label(value: float, _: int) -> str:
        if abs(value) < 1e-9:
            return "1"
        return f"$10^{{{value:.0f}}}$" if abs(value - round(value)) < 1e-9 else f"{10**value:.2g}"

    axis.set_major_formatter(FuncFormatter(label))


def density(axes: Axes, x: Array, y: Array, colour: str) -> None:
    """Hexagons whose opacity grows with the log of how many points fell in; legible on light and dark."""
    from matplotlib.colors import to_rgb

    cells = axes.hexbin(x, y, gridsize=46, mincnt=1, linewidths=0)
    counts = np.asarray(cells.get_array())
    weight = np.log1p(counts) / np.log1p(counts.max())
    red, green, blue = to_rgb(colour)
    cells.set_array(None)
    cells.set_facecolor([(red, green, blue, round(float(w), 2)) for w in 0.2 + 0.8 * weight])


def agreement(axes: Axes, rollout: Array, learner: Array, low: float, colour: str, ticks: tuple[int, int]) -> None:
    """Probabilities (log-probs, in nats) of one policy against the other's, from 10^``low`` to 1; the diagonal."""
    axes.plot([low, 0], [low, 0], color=MUTED, linewidth=0.8, linestyle=_BROKEN)
    density(axes, rollout / np.log(10), learner / np.log(10), colour)
    axes.set(xlim=(low, -low * 0.03), ylim=(low, -low * 0.03))
    decades(axes, "x", ticks[0])
    decades(axes, "y", ticks[1])


def probabilities(rollouts: Rows) -> Plot:
    """Each token's probability under the learner against the rollout, and how far apart they are."""
    title = "Token probabilities: learner against rollout"
    rollout, learner = token_logps(rollouts)
    if rollout.size == 0:
        return Plot(title, "No rollouts with both log-probs were kept.")
    gap = np.abs(learner - rollout)
    equal = float(np.mean(gap == 0))
    apart = gap > 0
    steps = sorted({row["step"] for row in rollouts if row.get("learner_logp") is not None})
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    if not apart.any():
        return Plot(
            title, f"{rollout.size:,} tokens of {span}: every log-prob is equal on both sides, to the last bit."
        )
    to_decades = 1 / np.log(10)
    with figure(5.6, 2.9) as drawing:
        left, right = drawing.subplots(1, 2)
        low = float(min(rollout.min(), learner.min(), np.log(0.1))) * to_decades
        agreement(left, rollout, learner, low, BLUE, (6, 6))
        left.set_xlabel("p under the rollout")
        left.set_ylabel("p under the learner")
        density(right, rollout[apart] * to_decades, np.log10(gap[apart]), ORANGE)
        decades(right, "y")
        right.set_xlim(low, -low * 0.03)
        decades(right, "x")
        right.set_xlabel("p under the rollout")
        right.set_ylabel("|log-prob difference|, nats")
    note = (
        f"{rollout.size:,} tokens of {span}. On the diagonal both agree: {equal:.1%} do to the last bit; the "
        f"log-probs differ by {gap.mean():.1e} nats in the mean, {gap.max():.1e} at most."
    )
    return Plot(title, note, to_svg(drawing, title))


def length_drift(rollouts: Rows) -> Plot:
    """Each sequence's log-ratio against its length, with the least-squares line."""
    title = "Sequence log-ratio against length"
    length, total = sequence_log_ratios(rollouts)
    if length.size == 0:
        return Plot(title, "No rollouts with both log-probs were kept.")
    if not total.any():
        return Plot(title, f"The log-ratio of all {length.size:,} sequences is exactly 0.")
    line = fit_line(length, total)
    with figure() as drawing:
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
    svg = to_svg(drawing, title)
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
    lines = lines_of(rows, {"gap/abs_logp_diff_max": PINK, "gap/abs_logp_diff_mean": ORANGE, "gap/k3_kl": BLUE})
    parts = {"gap/engine_abs_logp_diff_mean": GREEN, "gap/other_abs_logp_diff_mean": PURPLE}
    lines += lines_of(rows, parts, dash=(2.0, 1.6))
    measured = where_measured(max((line.x.size for line in lines), default=0), len(rows))
    drawn = chart(title, "The same tokens, scored by both.", lines, "nats", "log", keys=any(x.dash for x in lines),
                  none="No gap was logged.",
                  zero=f"Exactly 0 at {measured}: no token's log-prob differed.")  # fmt: skip
    return replace(drawn, note=f"{drawn.note} {share}".rstrip())


def ratio_parts(rows: Rows) -> Plot:
    """Sizes of the log-ratio's two parts by step on a log axis, and below them what the clip took, and for which."""
    title = "Log-ratio: what was learned and what is numerical"
    parts = lines_of(rows, {"policy/alpha_abs_mean": BLUE, "policy/beta_abs_mean": ORANGE})
    held = lines_of(rows, {"policy/clip_fraction": GREY, "policy/phantom_clip_fraction": PINK})
    if len(parts) < 2:
        return Plot(title, _why_none(rows, "policy/alpha_abs_mean", "policy/beta_abs_mean"))
    note = f"Means over the steps, in nats a token: alpha {parts[0].y.mean():.2g}; beta {parts[1].y.mean():.2g}."
    if held:
        phantom = held[-1].y
        note += f" The clip at alpha + beta holds {phantom.mean():.2%} of the tokens that alpha alone would leave"
        note += f" ({phantom.max():.2%} in the worst step); it does so with correction: bypass only."
    if not any(map(_seen, parts)):
        none = " The clip held none either." if held and not any(map(_seen, held)) else f" {note}" * bool(held)
        return Plot(title, f"Exactly 0 at every step: neither learning nor kernels and formats moved a token.{none}")
    if held and not any(map(_seen, held)):
        held, note = [], f"{note} Nothing was clipped at any step, so there is no curve of it."
    with figure() as drawing:
        ratios = (1.5, 1)[: 1 + bool(held)]
        top, *below = drawing.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False)[:, 0]
        draw(top, parts, "log")
        top.set_ylabel("nats")
        step_axis(top, "" if held else "step")
        for bottom in below:
            draw(bottom, [replace(line, y=100 * line.y) for line in held])
            bottom.set_ylim(bottom=0)
            bottom.set_ylabel("% of tokens")
            step_axis(bottom)
    return Plot(title, note, to_svg(drawing, title), _legend(parts + held))


def scaling(rows: Rows) -> Plot:
    """The loss scale by step, and below it the steps with overflows, retries and updates given up."""
    title = "Loss scale and overflows"
    scale = lines_of(rows, {"precision/loss_scale": PURPLE})
    if not scale:
        return Plot(title, "No loss scale was logged.")
    events = lines_of(rows, {"precision/skipped": PINK, "precision/retries": BLUE, "precision/overflows": ORANGE})
    quiet = not any(line.y.any() for line in events)
    if quiet and (scale[0].y == 1).all():
        return Plot(title, "The loss is not scaled (scale 1 at every step), and no backward pass overflowed.")
    totals = ", ".join(f"{line.label} {int(line.y.sum())}" for line in reversed(events))
    with figure() as drawing:
        ratios = (1,) if quiet else (2.4, 1)
        top, *below = drawing.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False)[:, 0]
        draw(top, scale, "power of two")
        top.set_ylabel("scale")
        step_axis(top, "step" if quiet else "")
        for bottom in below:
            for lane, line in enumerate(events):
                at = line.x[line.y > 0]
                bottom.plot(at, np.full(at.size, lane), "|", color=line.colour, markersize=11, markeredgewidth=2)
            bottom.set_yticks(range(len(events)), [line.label for line in events])
            bottom.set_ylim(-0.6, len(events) - 0.4)
            bottom.grid(visible=False)
            step_axis(bottom)
    return Plot(title, "No backward pass overflowed." if quiet else f"In all: {totals}.", to_svg(drawing, title))


def time_by_phase(rows: Rows) -> Plot:
    """Seconds of each step, stacked by phase."""
    title = "Time by phase"
    times = phase_times(rows)
    if times is None:
        return Plot(title, "No times were logged.")
    with figure() as drawing:
        axes = drawing.subplots()
        bottom = np.zeros_like(times.steps)
        width = 0.9 * (times.per_bar if times.steps.size > 1 else 0.3)
        for name, seconds in zip(times.names, times.seconds, strict=True):
            axes.bar(times.steps, seconds, width=width, bottom=bottom, color=PHASE_COLOURS[name], linewidth=0)
            bottom = bottom + seconds
        axes.set_ylabel("seconds a step")
        step_axis(axes)
    whole = times.seconds.sum()
    share = times.seconds.sum(axis=1) / whole if whole > 0 else []
    parts = sorted(zip(share, times.names, strict=False), reverse=True)
    note = ", ".join(f"{name.replace('_', ' ')} {part:.0%}" for part, name in parts if part >= 0.005) + "."
    if times.per_bar > 1:
        note += f" Each bar is the mean of {times.per_bar} steps."
    legend = tuple((name.replace("_", " "), PHASE_COLOURS[name]) for name in times.names)
    return Plot(title, note, to_svg(drawing, title), legend)


def entropy(rows: Rows) -> Plot:
    """Policy entropy by step."""
    return _simple("Entropy of the policy", rows, {"policy/entropy": TEAL}, "Entropy")


def length(rows: Rows) -> Plot:
    """Response length by step: mean and longest."""
    plot = _simple("Response length", rows, {"length/max": GREY, "length/mean": BLUE}, "Mean")
    truncated = series(rows, "length/truncated_fraction")[1]
    if not (plot.svg and truncated.size):
        return plot
    said = f"Cut off at the limit: {truncated[-1]:.1%} of completions on the last step, {truncated.max():.1%} at most."
    return replace(plot, note=said)


def _simple(title: str, rows: Rows, colours: Mapping[str, str], what: str) -> Plot:
    """Lines from 0 on; the note says where the last of them began and ended."""
    lines = lines_of(rows, colours)
    if not lines:
        return Plot(title, _why_none(rows, *colours))
    unit, (x, y) = SERIES[next(iter(colours))].unit, (lines[-1].x, lines[-1].y)
    note = f"{what}: {y[0]:.3g} {unit}"
    note += f" at step {x[0]:.0f}, {y[-1]:.3g} at step {x[-1]:.0f}." if x.size > 1 else "."
    bottom = min(0.0, *(float(line.y.min()) for line in lines))
    return chart(title, note, lines, unit, bottom=bottom, legend=lines if len(lines) > 1 else (), keys=False)
