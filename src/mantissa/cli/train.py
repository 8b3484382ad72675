"""``mantissa train``: run a recipe, or continue a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mantissa.cli.memory import keep_freed_memory
from mantissa.cli.threads import crowded, unsteady
from mantissa.errors import MantissaError


def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="A recipe, such as recipes/demo.yaml.", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Dotted keys of the recipe, YAML values.", show_default=False),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Continue this run, bit for bit, from its last checkpoint."),
    ] = None,
) -> None:
    """Train a policy by reinforcement learning, measure the gap between rollout and learner, write a report.

    All of it goes into one folder: runs/NAME-TIME, or run_dir=FOLDER.
    A run that was stopped or killed goes on with --resume.

    [bold]Examples[/]

    mantissa train recipes/demo.yaml

    mantissa train recipes/demo.yaml precision=bf16 steps=20 optimizer.lr=1e-4

    mantissa train recipes/demo.yaml precision=fp16 precision.rollout=bf16

    mantissa train --resume runs/demo-20260101-120000
    """
    keep_freed_memory()
    import torch

    from mantissa.rl import load_recipe
    from mantissa.rl import resume as resume_run
    from mantissa.rl import start as start_run

    _warn_if(unsteady())
    if resume is not None:
        if recipe is not None or overrides:
            raise MantissaError(
                f"--resume continues {resume} with its own recipe, which cannot be changed: leave the recipe and the "
                "overrides out, or start a new run without --resume"
            )
        _warn_if(crowded(torch.get_num_threads()))
        report = resume_run(resume)
    elif recipe is None:
        raise MantissaError("expected a recipe, such as recipes/demo.yaml, or --resume RUN")
    else:
        config = load_recipe(recipe, overrides or [])
        _warn_if(crowded(torch.get_num_threads()))
        report = start_run(config)
    typer.echo(f"report: {report}")


def _warn_if(warning: str | None) -> None:
    if warning is not None:
        typer.echo(warning)
