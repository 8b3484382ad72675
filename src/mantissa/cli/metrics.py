"""``mantissa metrics``: the catalogue of everything a run logs."""

from __future__ import annotations

from mantissa.cli import screen


def metrics() -> None:
    """Print every metric that a run logs: name, formula, unit, healthy range, source."""
    from rich.padding import Padding
    from rich.text import Text

    from mantissa.runs.metrics import METRICS

    console = screen()
    for metric in METRICS:
        head = Text(metric.name, style="bold").append(f"  [{metric.unit}]", style="not bold")
        if metric.healthy_text:
            head.append(f"  healthy: {metric.healthy_text}", style="not bold green")
        console.print(head)
        console.print(Padding(metric.formula, (0, 0, 0, 4)))
        if metric.source:
            console.print(Padding(Text(metric.source, style="dim"), (0, 0, 0, 4)))
