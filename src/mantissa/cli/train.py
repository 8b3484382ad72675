"""``mantissa train``: run a recipe, or continue a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mantissa.base.environ import crowded, keep_freed_memory, unsteady
from mantissa.base.errors import MantissaError
from mantissa.cli import Overrides, Recipe, echo_warning, progress, there

if TYPE_CHECKING:
    from mantissa.rl import RunConfig


def train(
    recipe: Recipe = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Continue this run, bit for bit, from its last checkpoint.", callback=there("a run")
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="As run_dir=FOLDER.", show_default="runs/NAME-TIME")
    ] = None,
) -> None:
    """Train a policy by reinforcement learning, measure the gap between rollout and learner, write a report.

    All of it goes into one folder: runs/NAME-TIME, or --out FOLDER.
    A run that was stopped or killed goes on with --resume, if need be on another number of processes (nproc=N), or with
    another vLLM server (rollout.vllm.server=URL).

    [bold]Examples[/]

    mantissa train recipes/demo.yaml

    mantissa train recipes/demo.yaml precision=bf16 steps=20 optimizer.lr=1e-4

    mantissa train recipes/demo.yaml precision=fp16 precision.rollout=bf16

    mantissa train --resume runs/demo-20260101-120000

    mantissa train recipes/demo.yaml nproc=2
    """
    keep_freed_memory()
    if out is not None and resume is not None:
        raise MantissaError("--out and --resume: a run goes on in its own folder; leave --out out")
    given = [*(overrides or []), *([] if out is None else [f"run_dir={out}"])]
    from mantissa.base.ranks import world_size

    world = world_size()
    if world is None:
        _run(recipe, given, resume, None)
        return
    from mantissa.cli.processes import as_rank

    with as_rank():
        _run(recipe, given, resume, world)


def _run(recipe: Path | None, overrides: list[str], resume: Path | None, world: int | None) -> None:
    """``world``: how many processes do this; None: this one alone, and it may start others."""
    import torch

    from mantissa.rl import load_recipe, resumed_config
    from mantissa.rl import resume as resume_run
    from mantissa.rl import start as start_run

    given = [] if recipe is None else [str(recipe), *overrides]
    if resume is not None:
        config = resumed_config(resume, given, world)
    elif recipe is None:
        raise MantissaError("expected a recipe, such as demo (mantissa recipes lists them), or --resume RUN")
    else:
        config = load_recipe(recipe, overrides, nproc=world)
    if world is None and config.nproc > 1:
        _start_ranks(config, resume, given)
        return
    rank0 = world is None or os.environ["RANK"] == "0"
    if rank0:
        echo_warning(unsteady())
        echo_warning(crowded(torch.get_num_threads(), world or 1))
    say = progress if rank0 else lambda line: None
    report = start_run(config, say) if resume is None else resume_run(resume, given, world, say)
    if rank0:
        typer.echo(f"report: {report}")


def _start_ranks(config: RunConfig, resume: Path | None, given: list[str]) -> None:
    from mantissa.base.ranks import choose_device
    from mantissa.cli.processes import launch
    from mantissa.runs.directory import default_path

    if choose_device(config.device).type == "cuda":
        import torch

        if torch.cuda.device_count() < config.nproc:
            raise MantissaError(
                f"nproc={config.nproc}, but torch sees {torch.cuda.device_count()} GPUs here; lower nproc, or set "
                "device=cpu"
            )
    if resume is not None:
        launch(["train", "--resume", str(resume), *given], config.nproc, str(resume))
        return
    folder = config.run_dir or str(default_path(config.name))
    named = [] if config.run_dir else [f"run_dir={folder}"]
    launch(["train", *given, *named], config.nproc, folder)
