"""``mantissa launch``: a recipe as a job on a cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mantissa.base.errors import MantissaError, StoppedError, nearest, say
from mantissa.cli import Overrides, Recipe, tell
from mantissa.cli.processes import RankError, blame, go_on, stopping

if TYPE_CHECKING:
    from mantissa.launch import Plan

_On = Annotated[str, typer.Option(metavar="ENGINE", help="What trains: verl, or ray (Mantissa's own training on Ray).")]
_Address = Annotated[
    str | None,
    typer.Option(metavar="URL", help="The Ray head: for verl its dashboard, http://head:8265; for ray head:6379."),
]
_Options = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="verl: launch options in YAML; RECIPE's .launch.yml where there is one."),
]
_Engine = Annotated[
    str | None, typer.Option(help="verl: the learner's: fsdp, fsdp2, megatron, mantissa_fsdp2 or mantissa.")
]
_Hardware = Annotated[str | None, typer.Option(metavar="GPU", help="verl: their name, such as h100; fp8 needs it.")]
_WorkingDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="verl: a folder that travels with the job; there is none by default."),
]
_Wait = Annotated[
    bool | None, typer.Option("--wait/--no-wait", help="verl: follow the job to its end, and exit as it does.")
]
_Resume = Annotated[
    Path | None, typer.Option(metavar="RUN", help="ray: continue this run, bit for bit, from its last checkpoint.")
]
_Local = Annotated[
    bool | None,
    typer.Option(
        "--local",
        help="A Ray of its own on this machine, for this run; verl: a rehearsal on its processor.",
    ),
]
_TrustNetwork = Annotated[
    bool | None,
    typer.Option("--trust-network", help="Let it listen beyond this machine's loopback; it says what does."),
]


def launch(
    recipe: Recipe = None,
    overrides: Overrides = None,
    on: _On = "verl",
    address: _Address = None,
    options: _Options = None,
    engine: _Engine = None,
    rollout: Annotated[str | None, typer.Option(help="verl: the rollout's: vllm, sglang or mantissa.")] = None,
    verl_version: Annotated[str | None, typer.Option(metavar="VERSION", help="verl's version there.")] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", help="Machines.", min=1)] = None,
    gpus: Annotated[int | None, typer.Option(metavar="N", help="verl: GPUs of each.")] = None,
    hardware: _Hardware = None,
    cuda: Annotated[str | None, typer.Option(metavar="VERSION", help="verl: the nodes' CUDA, such as 12.9.")] = None,
    working_dir: _WorkingDir = None,
    wait: _Wait = None,
    resume: _Resume = None,
    local: _Local = None,
    trust_network: _TrustNetwork = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and where.")] = False,
) -> None:
    """Run a recipe on a cluster.

    --on verl: verl's trainer and engines, as a job on Ray. Every field becomes a key that this verl, with these
    engines, really reads. What would be ignored there, or cannot be done, is refused with the reason. With --local the
    same keys run here first: two steps on this machine's processor, of a tiny policy on tiny problems, to a checkpoint
    that mantissa sample loads. Overrides change that too: model.path=FOLDER steps=5. The same run_dir goes on.

    --on ray: Mantissa's own training, on --nodes machines of a Ray cluster, nproc processes in all (one a machine, if
    the recipe does not say). Run it on a node of the cluster. The run's folder must be shared.

    Exit code: the job's own; 2 for bad input, a head that does not answer, a job that Ray refuses.

    [bold]Examples[/]

    mantissa launch recipes/cluster/qwen3-8b-fp16-fsdp2.yaml --dry-run

    mantissa launch recipes/cluster/qwen3-8b-fp16-fsdp2.yaml --on verl --local

    mantissa launch recipes/cluster/qwen3-8b-fp16-fsdp2.yaml --address http://head:8265

    mantissa launch recipes/demo.yaml run_dir=/shared/demo --on ray --address head:6379 --nodes 2 --trust-network

    mantissa launch --resume /shared/demo --on ray --address head:6379 --nodes 2 --trust-network
    """
    given = dict(locals())  # the options alone: nothing else has a name here yet
    ours = ("recipe", "overrides", "on", "dry_run")
    said = {name: value for name, value in given.items() if name not in ours and value is not None}
    if on not in _ENGINES:
        raise MantissaError(f"--on {on}: expected {' or '.join(_ENGINES)}{nearest(on, _ENGINES)}")
    run, takes = _ENGINES[on]
    for name in said:
        if name not in takes:
            raise MantissaError(f"--{name.replace('_', '-')} does nothing with --on {on}; leave it out")
    run(recipe, overrides or [], said, dry_run)


def _on_verl(recipe: Path | None, overrides: list[str], said: dict[str, Any], dry_run: bool) -> None:
    address, working_dir, options = (said.pop(name, None) for name in ("address", "working_dir", "options"))
    wait, trusted, local = (said.pop(name, None) for name in ("wait", "trust_network", "local"))
    if recipe is None:
        raise MantissaError("expected a recipe, such as recipes/cluster/qwen3-8b-fp16-fsdp2.yaml")
    if address is None and not dry_run and not local:
        raise MantissaError(
            "expected --address URL of the Ray head, such as http://head:8265, or --local for a rehearsal on this "
            "machine, or --dry-run"
        )
    if trusted and not local:
        raise MantissaError("--trust-network does nothing with --on verl but for --local; leave it out")
    if working_dir is not None and not working_dir.is_dir():
        raise MantissaError(f"--working-dir {working_dir}: expected a folder")
    from mantissa.base.readers.yaml import find_recipe
    from mantissa.launch import launch_file, load_options
    from mantissa.launch.export import export
    from mantissa.rl import load_recipe

    recipe = find_recipe(recipe)
    if options is None and launch_file(recipe).is_file():
        options = launch_file(recipe)
    given = {name.removeprefix("verl_"): value for name, value in said.items()}
    if local:
        if address is not None or working_dir is not None or wait is not None:
            raise MantissaError("--local is a Ray of this machine: leave out --address, --working-dir and --wait")
        _rehearse(recipe, overrides, options, given, bool(trusted), dry_run)
        return
    plan = export(load_recipe(recipe, overrides), load_options(options, given))
    if dry_run:
        tell(plan.dry_run(address, working_dir))
    else:
        _say(plan.warnings())
        _submit(plan, str(address), working_dir, wait is not False)


def _say(text: str) -> None:
    if text:
        tell(text)


def _rehearse(
    recipe: Path, overrides: list[str], options: Path | None, given: dict[str, Any], trusted: bool, dry_run: bool
) -> None:
    from mantissa.launch.rehearsal import listens, rehearse, run_local

    rehearsal = rehearse(recipe, overrides, options, given)
    tell(rehearsal.text())
    if dry_run:
        tell(f"\n{rehearsal.plan.dry_run(None, None)}")
        return
    _say(rehearsal.plan.warnings())
    lines = listens()
    for line in lines:
        say(f"network: {line}")
    if lines and not trusted:
        raise MantissaError("this listens beyond the loopback interface, as is said above: allow it, --trust-network")
    with stopping():
        try:
            end = run_local(rehearsal, say, isolated=not lines)
        except KeyboardInterrupt:
            raise StoppedError(
                f"interrupted, and everything that was started is ended; the same command with "
                f"run_dir={rehearsal.folder} goes on from its last checkpoint"
            ) from None
    for line in end.learned:
        say(line)
    say(f"{len(end.metrics)} steps in {end.seconds:.0f} s; the policy: {end.policy}")
    say(f"mantissa sample {end.policy} '3+4' --max-tokens 16")


def _on_ray(recipe: Path | None, overrides: list[str], said: dict[str, Any], dry_run: bool) -> None:
    from mantissa.launch.on_ray import cluster, listens, placed, planned, run

    nodes, local = said.get("nodes", 1), said.get("local", False)
    if local and ("address" in said or nodes > 1):
        raise MantissaError("--local is a Ray of one machine: leave out --address, and --nodes above 1")
    lines = listens(nodes, local)
    trusted = not lines or said.get("trust_network", False)
    with planned(recipe, overrides, said.get("resume"), nodes, keep=trusted and not dry_run) as plan:
        for line in lines:
            say(f"network: {line}")
        if dry_run:
            say(plan.dry_run())
            return
        if not trusted:
            raise MantissaError(
                "this listens beyond the loopback interface, as is said above: allow it, --trust-network"
            )
        again = ["mantissa launch --on ray", "--local" if local else f"--address {said.get('address', 'auto')}"]
        again += [f"--nodes {nodes}"] if nodes > 1 else []
        resume = " ".join([*again, *(["--trust-network"] if lines else []), "--resume"])
        run_dir, screen = str(plan.run_dir), sys.stdout  # which is Ray's own, and unread, within
        with cluster(said.get("address"), local) as head, stopping(), placed(plan, head) as there:
            for line in plan.lines(there.addresses):
                say(line, to=screen)
            try:
                outcome = run(plan, there, lambda text: say(text, end="", to=screen))
            except KeyboardInterrupt:
                raise StoppedError(f"interrupted{go_on(run_dir, resume)}") from None
            except RankError as lost:
                raise RankError(f"{lost}{go_on(run_dir, resume)}") from None
        if outcome.lost:
            index, why = min(outcome.lost.items())
            raise RankError(f"node {there.addresses[index]} {why}; the processes were stopped{go_on(run_dir, resume)}")
        if outcome.failures:
            hosts = {rank: f"node {there.addresses[rank // plan.processes]}" for rank in range(plan.world)}
            raise blame(outcome.failures, run_dir, hosts=hosts, resume=resume)


# What each engine is, and the options that do something for it.
_ENGINES: dict[str, tuple[Callable[[Path | None, list[str], dict[str, Any], bool], None], frozenset[str]]] = {
    "verl": (
        _on_verl,
        frozenset(
            ("address", "options", "engine", "rollout", "verl_version", "nodes", "gpus", "hardware", "cuda",
             "working_dir", "wait", "local", "trust_network")
        ),
    ),
    "ray": (_on_ray, frozenset(("address", "nodes", "resume", "local", "trust_network"))),
}  # fmt: skip


def _submit(plan: Plan, address: str, working_dir: Path | None, wait: bool) -> None:
    import shlex

    from mantissa.launch.ray_job import connect, follow, submit

    client = connect(address)
    job = submit(client, shlex.join(plan.arguments), plan.runtime_env(working_dir), plan.name)
    say(f"submitted {job} to {address}")
    if not wait:
        say(f"ray job logs --address {address} --follow {job} shows its log")
        return
    end = follow(client, job, lambda text: say(text, end=""))
    if end.status == "SUCCEEDED":
        say(f"{job} succeeded")
        return
    say(f"mantissa: error: {job} {end.status.lower()} with exit code {end.code}: {end.message}", err=True)
    raise typer.Exit(end.code)
