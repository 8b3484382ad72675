"""Evolution, replay buffer and world model under load, with faults, and an account of it.

python benchmarks/soak.py --jobs 2 --faults all
python benchmarks/soak.py --sizes small_api,simple_service --iterations 3 --faults kill,lock
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from soak_job import SIZES
from soak_load import FAULTS, SoakConfig, run_soak
from soak_report import SIZE_HEADER, size_rows

from mantissa.base.errors import MantissaError
from mantissa.cli import progress, screen, split
from mantissa.runs import rows


def soak(
    sizes: Annotated[
        str,
        typer.Option(
            help="Of simple_service, medium_saas, complex_platform, small_api, enterprise_app.", show_default="all"
        ),
    ] = "",
    iterations: Annotated[int, typer.Option(help="Times that a job of each size is done.")] = 10,
    jobs: Annotated[int, typer.Option(help="Jobs at a time, a process each.")] = 5,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16: of the world models.")] = "fp16",
    faults: Annotated[str, typer.Option(help="Of kill, lock, disk, hang; all.", show_default="none")] = "",
    seed: Annotated[int, typer.Option(help="Of every draw, the faults' too.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where to; a load that is there goes on.", show_default="runs/soak-TIME"),
    ] = None,
) -> None:
    """Put evolution, replay buffer and world model under load, and count that nothing was lost or written twice.

    A job evolves programs in the sandbox, stores their trajectories in the database that all jobs share, trains a world
    model on them, saves it, reads it back and predicts. Faults are real: a worker is killed, the database is locked,
    the disk is full, a program never ends. Killed itself, the same command goes on.

    Writes soak.jsonl (rows) and events.jsonl. Exit code 1 where something was lost or given up.
    """
    from mantissa.runs.page import terminal

    chosen = tuple(FAULTS) if faults == "all" else split(faults)
    wanted = split(sizes) or tuple(SIZES)
    config = SoakConfig(sizes=wanted, iterations=iterations, jobs=jobs, precision=precision, faults=chosen, seed=seed)
    folder = out or Path(f"runs/soak-{time.strftime('%Y%m%d-%H%M%S')}")
    report = run_soak(config, folder, progress)
    progress("")
    screen(120).print(terminal(SIZE_HEADER, size_rows(report)))
    for sentence in report.sentences:
        typer.echo(sentence)
    rows.write(folder / "soak.jsonl", report.rows)
    if not report.good:
        raise typer.Exit(1)


def main() -> None:
    try:
        typer.run(soak)
    except MantissaError as error:
        sys.exit(f"soak: {error}")


if __name__ == "__main__":
    main()
