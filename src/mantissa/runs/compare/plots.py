"""The figures of a comparison: one line a group, told apart by colour and by dashes, the same in every figure.

The eight colours (``--r1`` to ``--r8``) keep apart for normal sight and for the three kinds of colour blindness, on
light and on dark; a test holds them to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mantissa.runs import plots
from mantissa.runs.compare.data import Group
from mantissa.runs.compare.stats import Curve, Estimate, curve_of, logged, seconds_by_phase
from mantissa.runs.metrics import PHASES
from mantissa.runs.plots import MUTED, RUNS, Dash, Plot, figure, step_axis, styled, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes


DASHES: tuple[Dash, ...] = ((), (4, 1.8), (1.1, 1.3), (5, 1.4, 1.1, 1.4), (8, 2), (2.4, 1.2), (5, 1.2, 1, 1.2, 1, 1.2),
                            (8, 1.5, 2.5, 1.5))  # fmt: skip
Scale = Literal["fraction", "linear", "log", "power of two"]


@dataclass(frozen=True)
class Panel:
    """One figure: its title, the metric it draws, the word at its axis, and the kind of that axis."""

    title: str
    metric: str
    unit: str
    scale: Scale


PANELS: tuple[Panel, ...] = (
    Panel("Accuracy of training samples", "reward/accuracy", "fraction correct", "fraction"),
    Panel("Mean reward", "reward/mean", "reward", "linear"),
    Panel("Held-out accuracy, greedy", "eval/greedy_accuracy", "fraction correct", "fraction"),
    Panel("Held-out accuracy, mean of k samples", "eval/avg_at_k", "fraction correct", "fraction"),
    Panel("Training loss", "train/loss", "loss", "linear"),
    Panel("Gap: mean |log-prob difference|", "gap/abs_logp_diff_mean", "nats", "log"),
    Panel("Gap: k3 KL", "gap/k3_kl", "nats a token", "log"),
    Panel("Gap: spread of sequence log-ratios", "gap/seq_log_ratio_std", "nats", "log"),
    Panel("Loss scale", "precision/loss_scale", "scale", "power of two"),
    Panel("Entropy of the policy", "policy/entropy", "nats a token", "linear"),
    Panel("Response length, mean", "length/mean", "tokens", "linear"),
    Panel("Gradient norm before clipping", "optim/grad_norm", "2-norm", "log"),
)


def colour_of(group: Group) -> str:
    """The group's colour in every figure, a CSS variable that light and dark pages define."""
    return RUNS[group.index]


def dash_of(group: Group) -> Dash:
    """The group's line style in every figure, so that no line is known by its colour alone."""
    return DASHES[group.index]


def curves(groups: Sequence[Group]) -> tuple[list[Plot], list[str]]:
    """The figures of every metric that some group logged, and the names of those that none did."""
    drawn, missing = [], []
    for panel in PANELS:
        found = [(group, curve) for group in groups if (curve := curve_of(group, panel.metric)) is not None]
        if not found:
            missing.append(panel.metric)
        elif panel.metric != "reward/mean" or not all(_reward_is_accuracy(group) for group, _ in found):
            drawn.append(_panel(panel, groups, found))
    return drawn, missing


def _reward_is_accuracy(group: Group) -> bool:
    return all(logged(run, "reward/mean") == logged(run, "reward/accuracy") for run in group.runs)


def _panel(panel: Panel, groups: Sequence[Group], found: Sequence[tuple[Group, Curve]]) -> Plot:
    note = _note(panel, groups, found)
    values = np.concatenate([curve.mean for _, curve in found])
    if panel.scale == "power of two" and (values == 1).all():
        return Plot(panel.title, f"No loss is scaled: 1 on every step. {note}".strip())
    if panel.scale == "log" and not (values > 0).any():
        return Plot(panel.title, f"Exactly 0 wherever it was measured, in all of them. {note}".strip())
    with styled():
        drawing = figure(5.6, 2.8)
        axes = drawing.subplots()
        zeros = _draw(axes, panel.scale, found)
        axes.set_ylabel(panel.unit)
        step_axis(axes)
        svg = to_svg(drawing, f"compare-{panel.metric.replace('/', '-').replace('_', '-')}", panel.title)
    if zeros:
        note += " Open circles on the floor are exact zeros."
    legend = tuple((group.title, colour_of(group)) for group, _ in found)
    return Plot(panel.title, note.strip(), svg, legend, tuple(dash_of(group) for group, _ in found))


def _draw(axes: Axes, scale: Scale, found: Sequence[tuple[Group, Curve]]) -> int:
    """Bands, then lines over them; the number of zeros on a log axis's floor."""
    for group, curve in found:
        if curve.runs > 1:
            low = np.where(curve.low > 0, curve.low, np.nan) if scale in ("log", "power of two") else curve.low
            axes.fill_between(curve.steps, low, curve.high, color=colour_of(group), alpha=0.16, linewidth=0)
    if scale == "log":
        drawn = [(curve.steps, curve.mean, colour_of(group), _style(group)) for group, curve in found]
        return plots.log_lines(axes, drawn)
    for group, curve in found:
        path = {"drawstyle": "steps-mid"} if scale == "power of two" else {}
        plots.curve(axes, curve.steps, curve.mean, colour_of(group), **_style(group), **path)
    if scale == "power of two":
        axes.set_yscale("log", base=2)
        low, high = min(c.low.min() for _, c in found), max(c.high.max() for _, c in found)
        axes.set_ylim(low / 2, high * 2)
    elif scale == "fraction" and all(c.low.min() >= 0 and c.high.max() <= 1 for _, c in found):
        axes.set_ylim(-0.03, 1.03)
    return 0


def _style(group: Group) -> dict[str, Any]:
    dash = dash_of(group)
    return {"linestyle": (0, dash) if dash else "-", "dash_capstyle": "butt"}


def _note(panel: Panel, groups: Sequence[Group], found: Sequence[tuple[Group, Curve]]) -> str:
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
        odd = sum(not np.isfinite(v) for run in group.runs for v in logged(run, panel.metric))
        if odd:
            said.append(f"{group.label}: not finite on {odd} step{'s' if odd > 1 else ''}, left out.")
    return " ".join(said)


def intervals(title: str, named: Sequence[tuple[Group, Estimate]]) -> Plot:
    """Final accuracies with their intervals, one below the other in the order given."""
    if not named:
        return Plot(title, "No run has logged it.")
    with styled():
        drawing = figure(5.6, 0.75 + 0.3 * len(named))
        axes = drawing.subplots()
        for place, (group, estimate) in enumerate(named):
            colour = colour_of(group)
            if estimate.low is not None and estimate.high is not None:
                axes.plot([estimate.low, estimate.high], [place, place], color=colour, linewidth=2)
                axes.plot([estimate.low, estimate.high], [place, place], "|", color=colour, markersize=9, mew=1.6)
            axes.plot(estimate.value, place, "o", color=colour, markersize=6)
        labels = [_folded(group.title) for group, _ in named]
        axes.set_yticks(range(len(named)), labels)
        axes.set_ylim(len(named) - 0.4, -0.6)
        axes.set_xlim(-0.02, 1.02)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("fraction correct")
        svg = to_svg(drawing, f"compare-final-{'greedy' if 'greedy' in title else 'sampled'}", title)
    return Plot(title, "", svg)


def phases(groups: Sequence[Group]) -> Plot:
    """Seconds a step by phase, one bar a group."""
    title = "Seconds a step, by phase"
    timed = [(group, seconds) for group in groups if (seconds := seconds_by_phase(group)) is not None]
    if not timed:
        return Plot(title, "No times were logged.")
    order = (*PHASES, "other")
    colours = dict(zip(order, plots.PHASE_COLOURS, strict=True))
    used = [name for name in order if any(name in seconds for _, seconds in timed)]
    with styled():
        drawing = figure(5.6, 0.75 + 0.3 * len(timed))
        axes = drawing.subplots()
        for place, (_, seconds) in enumerate(timed):
            left = 0.0
            for name in used:
                width = seconds.get(name, 0.0)
                axes.barh(place, width, left=left, height=0.6, color=colours[name], linewidth=0)
                left += width
            if left == 0:  # a trainer's run: it times whole steps only
                axes.barh(place, seconds["step"], height=0.6, color=MUTED, linewidth=0)
        axes.set_yticks(range(len(timed)), [_folded(group.title) for group, _ in timed])
        axes.set_ylim(len(timed) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds a step")
        svg = to_svg(drawing, "compare-phases", title)
    legend = [(name.replace("_", " "), colours[name]) for name in used]
    if any(len(seconds) == 1 for _, seconds in timed):
        legend.append(("whole step, phases not logged", MUTED))
    return Plot(title, "", svg, tuple(legend))


def _folded(label: str, width: int = 24) -> str:
    """A label for an axis, on two lines where it is long."""
    if len(label) <= width:
        return label
    cut = label.rfind(" ", 0, width + 1)
    first, rest = (label[:cut], label[cut + 1 :]) if cut > 0 else (label[:width], label[width:])
    return f"{first}\n{rest if len(rest) <= width else rest[: width - 1] + '…'}"
