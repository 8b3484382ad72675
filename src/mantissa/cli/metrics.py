"""``mantissa metrics``: the catalogue of everything a run logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_TABLE_WIDTH = 150  # below it a table would fold every formula into a narrow column


def metrics() -> None:
    """Print every metric that a run logs: name, formula, unit, healthy range, source."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if console.width >= _TABLE_WIDTH:
        _table(console)
    else:
        _list(console)


def _table(console: Console) -> None:
    from rich.table import Table

    from mantissa.runs.metrics import METRICS

    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    table.add_column("name", no_wrap=True)
    table.add_column("formula", ratio=3)
    table.add_column("unit", no_wrap=True)
    table.add_column("healthy", no_wrap=True)
    table.add_column("source", ratio=2, style="dim")
    for metric in METRICS:
        table.add_row(metric.name, metric.formula, metric.unit, metric.healthy_text, metric.source)
    console.print(table)


def _list(console: Console) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from mantissa.runs.metrics import METRICS

    for metric in METRICS:
        head = Text(metric.name, style="bold").append(f"  [{metric.unit}]", style="not bold")
        if metric.healthy_text:
            head.append(f"  healthy: {metric.healthy_text}", style="not bold green")
        console.print(head)
        console.print(Padding(metric.formula, (0, 0, 0, 4)))
        if metric.source:
            console.print(Padding(Text(metric.source, style="dim"), (0, 0, 0, 4)))
