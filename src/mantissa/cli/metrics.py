"""``mantissa metrics``: the catalogue of everything a run logs."""

from __future__ import annotations

import shutil
import textwrap
from typing import Annotated

import typer

from mantissa.base.errors import MantissaError, nearest, say


def metrics(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="One, such as gap/k3_kl, or those with this in their names: gap/.")
    ] = "",
) -> None:
    """Print the metrics that a run logs, all or those named: formula, unit, healthy range, source."""
    from mantissa.runs.catalogue import METRICS

    found = [metric for metric in METRICS if metric.name == name] or [each for each in METRICS if name in each.name]
    if not found:
        meant = nearest(name, [each.name for each in METRICS])
        raise MantissaError(f"no metric has {name!r} in its name{meant}; mantissa metrics lists them all")
    wide = shutil.get_terminal_size().columns
    for metric in found:
        healthy = f"  healthy: {metric.healthy_text}" if metric.healthy_text else ""
        say(f"{metric.name}  [{metric.unit}]{healthy}")
        for text in filter(None, (metric.formula, metric.source)):
            say(textwrap.fill(text, wide, initial_indent="    ", subsequent_indent="    "))
