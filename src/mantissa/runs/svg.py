"""Matplotlib figures as inline SVG that follows the page: its colours (light or dark), its font, no ids in common.

Figures are drawn in stand-in colours, one for each role, which are replaced by CSS variables in the SVG's text; so
one drawing is legible in both colour schemes. Text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04"
SERIES = ("#0a0b11", "#0a0b12", "#0a0b13", "#0a0b14", "#0a0b15", "#0a0b16", "#0a0b17", "#0a0b18")
# Whole runs beside each other: told apart by any two eyes, and by their dashes too (compare_plots).
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
