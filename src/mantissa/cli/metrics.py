"""``mantissa metrics``: the catalogue of everything a run logs."""

from __future__ import annotations

from mantissa.cli.common import screen

_TABLE_WIDTH = 150  # below it a table would fold every formula into a narrow column: a list instead


def metrics() -> None:
    """Print every metric that a run logs: name, formula, unit, healthy range, source."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from mantissa.runs.metrics import METRICS

    console = screen()
    if console.width >= _TABLE_WIDTH:
        table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
        for name, ratio in (("name", None), ("formula", 3), ("unit", None), ("healthy", None), ("source", 2)):
            table.add_column(name, ratio=ratio, no_wrap=ratio is None, style="dim" if name == "source" else "")
        for metric in METRICS:
            table.add_row(metric.name, metric.formula, metric.unit, metric.healthy_text, metric.source)
        console.print(table)
        return
    for metric in METRICS:
        head = Text(metric.name, style="bold").append(f"  [{metric.unit}]", style="not bold")
        if metric.healthy_text:
            head.append(f"  healthy: {metric.healthy_text}", style="not bold green")
        console.print(head)
        console.print(Padding(metric.formula, (0, 0, 0, 4)))
        if metric.source:
            console.print(Padding(Text(metric.source, style="dim"), (0, 0, 0, 4)))
