"""``mantissa lab``: a grid of runs from one file, and the page of what came out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mantissa.base.errors import MantissaError, say
from mantissa.cli import progress, split, tell, there

if TYPE_CHECKING:
    from mantissa.lab import Lab

_File = Annotated[
    Path, typer.Argument(metavar="FILE", help="A lab file, such as lab/dose.yaml.", callback=there("a lab file"))
]
_Only = Annotated[str, typer.Option(metavar="TEXT,...", help="Only cells whose name, with -seedN, holds one of these.")]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Measure a step of each kind of cell; print the bill, of time and disk.")
]
_NoSpaceCheck = Annotated[
    bool, typer.Option("--no-space-check", help="Begin although the disk seems to have too little room.")
]
_Exploratory = Annotated[
    bool, typer.Option("--exploratory", help="Begin although the file is not committed to git; the page says so.")
]
_Page = Annotated[bool, typer.Option("--page", help="Write the page anew from the rows that there are; run nothing.")]


def lab(
    file: _File,
    only: _Only = "",
    workers: Annotated[int | None, typer.Option(min=1, max=64, help="Cells at a time; else the file's.")] = None,
    dry_run: _DryRun = False,
    no_space_check: _NoSpaceCheck = False,
    exploratory: _Exploratory = False,
    page: _Page = False,
) -> None:
    """Run a grid of recipes with paired seeds, one thread a cell; go on where it was stopped; write one page.

    The page has the question and what was expected as they were before the first run, the answer in words with paired
    differences to the control, curves with their range over seeds, and what was not run. A cell that fails is reported
    and stops no other.

    The file, with its question and expectation, has to be committed to git before its first run; the rows record the
    commit. Without one, --exploratory begins all the same.

    Rows go to results/lab/NAME.jsonl, runs and the page to runs/lab/NAME.

    [bold]Examples[/]

    mantissa lab lab/dose.yaml --dry-run

    mantissa lab lab/dose.yaml --only e8m4,fp32 --workers 2
    """  # fmt: skip
    from mantissa.lab import Rows, bill, load_lab, run_lab, write_page
    from mantissa.lab.disk import free, needed, size_text
    from mantissa.lab.page import answers

    chosen = load_lab(file)
    wanted = split(only)
    cells = [cell for cell in chosen.cells if not wanted or any(part in cell.folder for part in wanted)]
    if not cells:
        raise MantissaError(f"--only {only}: no cell has this in its name; there are {', '.join(chosen.names)}")
    count = workers or chosen.file.workers
    if dry_run:
        _note_uncommitted(chosen)
        say(f"disk: about {size_text(needed(chosen, cells, count))}; {size_text(free(chosen))} are free")
        _print_bill(chosen.name, [cell.name for cell in cells], bill(chosen, cells, _told, progress), count)
        return
    checks = {"space_check": not no_space_check, "exploratory": exploratory}
    rows = Rows(chosen) if page else run_lab(chosen, cells, count, _told, at=progress, **checks)
    for line in answers(rows):
        tell(line)
    say(f"page: {write_page(rows)}")
    failed = [cell.folder for cell in cells if (row := rows.of(cell)) and row["status"] != "finished"]
    if failed:
        raise MantissaError(
            f"{len(failed)} of {len(cells)} cells failed: {', '.join(failed)}; the page has their errors"
        )


def _told(text: str) -> None:
    """Print a text where the line of what is at work stood."""
    progress("")
    tell(text)


def _note_uncommitted(lab: Lab) -> None:
    from mantissa.lab.plan import committed

    try:
        committed(lab)
    except MantissaError as error:
        tell(f"a run would be refused: {error}")


def _print_bill(name: str, cells: list[str], seconds: dict[str, float | None], workers: int) -> None:
    from mantissa.runs.live import duration

    known = [seconds[cell] for cell in cells]
    total = sum(value for value in known if value is not None)
    unknown = f"; {known.count(None)} of unknown length" if None in known else ""
    tell(
        f"bill of {name}: {len(cells)} cells, {duration(total)} of one core, {duration(total / workers)} with "
        f"{workers} workers{unknown}; warm starts and evaluations are not in it"
    )
