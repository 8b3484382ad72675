"""``mantissa replay``: both sides of a mismatch again, from the file that the run wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mantissa.base.errors import MantissaError, say
from mantissa.cli import Device, there


def replay(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="RUN/mismatch-step-N.safetensors, or RUN: its first one.",
            callback=there("a mismatch of a run"),
        ),
    ],
    device: Device = "auto",
) -> None:
    """Run both sides of a mismatch again on the recorded tokens, and name the first operation that differs.

    Exits with 1 where they differ here too, with 0 where they do not.
    """
    from mantissa.base.ranks import be_deterministic, choose_device
    from mantissa.rl.replay import read_case
    from mantissa.rl.replay import replay as run_again

    chosen = choose_device(device)
    be_deterministic(chosen)
    stored = read_case(_first_of(file) if file.is_dir() else file)
    say(f"seen by the run: {stored.note}")
    found, plan = run_again(stored, chosen)
    for line in plan:
        say(f"exact: {line}")
    for line in found.lines(stored.case):
        say(line)
    say(f"{'reproduced' if found.reproduced else 'not reproduced'} here ({chosen}): {found}")
    if found.reproduced:
        raise typer.Exit(1)


def _first_of(run: Path) -> Path:
    """The earliest mismatch that a run wrote: later ones may follow from it."""
    found = {path: path.stem.rpartition("-")[2] for path in run.glob("mismatch-step-*.safetensors")}
    steps = {int(step): path for path, step in found.items() if step.isdecimal()}
    if not steps:
        raise MantissaError(
            f"{run}: no mismatch-step-N.safetensors there: the run saw no mismatch, or did not look for one; "
            "precision.kernels=exact looks"
        )
    return steps[min(steps)]
