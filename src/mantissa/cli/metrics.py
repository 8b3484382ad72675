"""``mantissa metrics``: the catalogue of everything a run logs."""

from __future__ import annotations


def metrics() -> None:
    """Print every metric that a run logs: name, formula, unit, healthy range, source."""
    from rich.console import Console
    from rich.table import Table

    from mantissa.runs.metrics import METRICS

    table = Table(title="Metrics of a run", title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True)
    for column in ("formula", "unit", "healthy", "source"):
        table.add_column(column)
    for metric in METRICS:
        table.add_row(metric.name, metric.formula, metric.unit, metric.healthy_text, metric.source)
    Console(markup=False, highlight=False).print(table)
