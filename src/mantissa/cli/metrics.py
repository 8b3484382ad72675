"""``mantissa metrics``: the catalogue of everything a run logs."""

from __future__ import annotations

from typing import Annotated

import typer

from mantissa.base.errors import MantissaError, nearest
from mantissa.cli import screen


def metrics(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="One, such as gap/k3_kl, or those with this in their names: gap/.")
    ] = "",
) -> None:
    """Print the metrics that a run logs, all or those named: formula, unit, healthy range, source."""
    from rich.padding import Padding
    from rich.text import Text

    from mantissa.runs.metrics import METRICS

    found = [metric for metric in METRICS if metric.name == name] or [each for each in METRICS if name in each.name]
    if not found:
        raise MantissaError(f"no metric has {name!r} in its name{nearest(name, [each.name for each in METRICS])}")
    console = screen()
    for metric in found:
        head = Text(metric.name, style="bold").append(f"  [{metric.unit}]", style="not bold")
        if metric.healthy_text:
            head.append(f"  healthy: {metric.healthy_text}", style="not bold green")
        console.print(head)
        console.print(Padding(metric.formula, (0, 0, 0, 4)))
        if metric.source:
            console.print(Padding(Text(metric.source, style="dim"), (0, 0, 0, 4)))
