"""``mantissa report``: (re)build a run's report."""

from __future__ import annotations

import typer

from mantissa.cli import Run, progress


def report(run: Run) -> None:
    """Build RUN/report.html, one self-contained page, from what the run has written so far."""
    from mantissa.runs.directory import RunDirectory
    from mantissa.runs.report import build_report

    folder = RunDirectory.open(run)
    folder.sweep()  # of an earlier report that was killed
    progress("drawing the report")
    path = build_report(folder)
    progress("")
    typer.echo(f"report: {path}")
