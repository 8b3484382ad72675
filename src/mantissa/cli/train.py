"""``mantissa train``: run a recipe, or continue a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mantissa.cli.memory import keep_freed_memory
from mantissa.errors import MantissaError


def train(
    recipe: Annotated[
        Path | None, typer.Argument(help="A recipe, such as recipes/demo.yaml.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Dotted keys of the recipe, YAML values.", show_default=False),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Continue this run, bit for bit.", show_default=False)
    ] = None,
) -> None:
    """Train a policy by reinforcement learning: warm start, RL, measurement of the gap, report.

    [bold]mantissa train recipes/demo.yaml[/]
    [bold]mantissa train recipes/demo.yaml precision=bf16 steps=20 optimizer.lr=1e-4[/]
    [bold]mantissa train recipes/demo.yaml precision=fp16 precision.rollout=bf16[/]   a field, after the preset
    [bold]mantissa train --resume runs/demo-20260101-120000[/]
    """
    keep_freed_memory()
    from mantissa.rl import load_recipe
    from mantissa.rl import resume as resume_run
    from mantissa.rl import start as start_run

    if resume is not None:
        if recipe is not None or overrides:
            raise MantissaError(
                f"--resume continues {resume} with its own recipe, which cannot be changed: leave the recipe and the "
                "overrides out, or start a new run without --resume"
            )
        report = resume_run(resume)
    elif recipe is None:
        raise MantissaError("expected a recipe, such as recipes/demo.yaml, or --resume RUN")
    else:
        report = start_run(load_recipe(recipe, overrides or []))
    typer.echo(f"report: {report}")
