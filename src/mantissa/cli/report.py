"""``mantissa report``: (re)build a run's report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder; it may still be running.")],
) -> None:
    """Build RUN/report.html, one self-contained page, from what the run has written so far."""
    from mantissa.runs.directory import RunDirectory
    from mantissa.runs.report import build_report

    typer.echo(f"report: {build_report(RunDirectory.open(run))}")
