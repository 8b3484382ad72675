"""``mantissa compare``: several runs on one page, and in short on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mantissa.cli import progress, screen


def compare(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN RUN ...", help="Two or more runs' folders; they may still be running."),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The page.")] = Path("compare.html"),
) -> None:
    """Compare runs: curves, final accuracy with intervals, gap, time, what differs in their recipes.

    Writes one self-contained page and prints a summary. Runs that differ only in their seed are taken together.
    Results whose intervals overlap are not ranked.
    A RUN is a folder of mantissa train, or the run_dir of a PrecisionTrainer.

    [bold]Examples[/]

    mantissa compare runs/fp16 runs/bf16

    mantissa compare runs/demo-* -o demo.html
    """
    from mantissa.runs.compare_page import Comparison, build_comparison, show

    def shown(found: Comparison) -> None:
        progress("")
        show(found, screen())
        progress("drawing the page")

    progress("reading the runs")
    build_comparison(runs or [], out, shown)
    progress("")
    typer.echo(f"comparison: {out}")
