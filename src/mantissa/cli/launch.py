"""``mantissa launch``: a recipe as a job on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mantissa.base.errors import MantissaError
from mantissa.cli.common import Overrides

if TYPE_CHECKING:
    from mantissa.launch import Plan


def launch(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, such as recipes/cluster/*.yaml.")],
    overrides: Overrides = None,
    on: Annotated[str, typer.Option(metavar="ENGINE", help="The cluster's engine: verl.")] = "verl",
    address: Annotated[
        str | None, typer.Option(metavar="URL", help="The Ray head's dashboard, such as http://head:8265.")
    ] = None,
    options: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Launch options in YAML; RECIPE's .launch.yml where there is one."),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="The learner's: fsdp, fsdp2 or megatron.")] = None,
    rollout: Annotated[str | None, typer.Option(help="The rollout's: vllm or sglang.")] = None,
    verl_version: Annotated[str | None, typer.Option(metavar="VERSION", help="verl's version there.")] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", help="Machines.")] = None,
    gpus: Annotated[int | None, typer.Option(metavar="N", help="GPUs of each.")] = None,
    hardware: Annotated[str | None, typer.Option(metavar="GPU", help="Their name, such as h100; fp8 needs it.")] = None,
    cuda: Annotated[str | None, typer.Option(metavar="VERSION", help="The nodes' CUDA, such as 12.9.")] = None,
    working_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder that travels with the job; there is none by default.")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Follow the job to its end, and exit as it does.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted, and from what.")] = False,
) -> None:
    """Run a recipe on a cluster, through verl on Ray.

    Every field becomes a key that this verl, with these engines, really reads.
    What would be ignored there, or cannot be done, is refused with the reason.

    Exit code: the job's own; 2 for bad input, a head that does not answer, a job that Ray refuses.

    [bold]Examples[/]

    mantissa launch recipes/cluster/qwen3-8b-fp16-fsdp2.yaml --dry-run

    mantissa launch recipes/cluster/qwen3-8b-fp16-fsdp2.yaml --address http://head:8265
    """
    if on != "verl":
        raise MantissaError(f"--on {on}: expected verl, the one engine that recipes can be launched on")
    if address is None and not dry_run:
        raise MantissaError("expected --address URL of the Ray head, such as http://head:8265, or --dry-run")
    if working_dir is not None and not working_dir.is_dir():
        raise MantissaError(f"--working-dir {working_dir}: expected a folder")
    from mantissa.base.shipped import find_recipe
    from mantissa.launch import export, launch_file, load_options
    from mantissa.rl import load_recipe

    recipe = find_recipe(recipe)
    config = load_recipe(recipe, overrides or [])
    if options is None and launch_file(recipe).is_file():
        options = launch_file(recipe)
    given = {"engine": engine, "rollout": rollout, "version": verl_version, "nodes": nodes, "gpus": gpus}
    given |= {"hardware": hardware, "cuda": cuda}
    plan = export(config, load_options(options, {name: value for name, value in given.items() if value is not None}))
    if dry_run:
        typer.echo(plan.dry_run(address, working_dir))
    else:
        _submit(plan, str(address), working_dir, wait)


def _submit(plan: Plan, address: str, working_dir: Path | None, wait: bool) -> None:
    import shlex

    from mantissa.launch.ray_job import connect, follow, submit

    client = connect(address)
    job = submit(client, shlex.join(plan.arguments), plan.runtime_env(working_dir), plan.name)
    typer.echo(f"submitted {job} to {address}")
    if not wait:
        typer.echo(f"ray job logs --address {address} --follow {job} shows its log")
        return
    end = follow(client, job, lambda text: typer.echo(text, nl=False))
    if end.status == "SUCCEEDED":
        typer.echo(f"{job} succeeded")
        return
    typer.echo(f"mantissa: error: {job} {end.status.lower()} with exit code {end.code}: {end.message}", err=True)
    raise typer.Exit(end.code)
