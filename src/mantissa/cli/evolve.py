"""``mantissa evolve``: programs improved against their tests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mantissa.base.errors import MantissaError, say
from mantissa.base.readers.yaml import parse_yaml
from mantissa.cli import progress, screen, split, tell

if TYPE_CHECKING:
    from mantissa.genesis.evolution import EvolutionConfig


def evolve(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings; --list names them.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where to; a run that is there goes on.", show_default="runs/evolve-TIME"),
    ] = None,
    profile: Annotated[str, typer.Option(help="A role's preset; all: the table of fp16 against fp32 over all.")] = "",
    no_world_model: Annotated[bool, typer.Option("--no-world-model", help="Choose what to execute by chance.")] = False,
    compare: Annotated[int, typer.Option(metavar="SEEDS", min=0, help="Both ways, from so many seeds.")] = 0,
    listed: Annotated[bool, typer.Option("--list", help="Print tasks, profiles and settings, and do nothing.")] = False,
) -> None:
    """Improve programs against unit tests that run in the sandbox, until they pass or the executions are spent.

    Proposals come from edits of the syntax tree (proposer=edits), a model (proposer=policy model=...), or an
    OpenAI-compatible server (proposer=openai url=... model=...). A world model chooses which of them are executed.
    Killed at any instant, the same command goes on where it was.

    Writes evolution.html and archive.db.

    [bold]Examples[/]

    mantissa evolve tasks=fibonacci,rotate executions=200 --out runs/evolve

    mantissa evolve --profile qa

    mantissa evolve --compare 5 executions=60
    """
    values = _values(overrides or []) | ({"rank": "random"} if no_world_model else {})
    folder = out or Path(f"runs/evolve-{time.strftime('%Y%m%d-%H%M%S')}")
    if listed:
        _list()
    elif profile == "all":
        _profiles(values, folder)
    else:
        from mantissa.genesis.evolution.compare import configured

        _evolve(configured(profile, values), folder, compare)


def _profiles(values: dict[str, Any], folder: Path) -> None:
    from mantissa.genesis.evolution.compare import PROFILE_HEADER, precision_row, profiles
    from mantissa.runs.page import terminal

    rows = [precision_row(name, values, folder, progress).cells for name in profiles()]
    progress("")
    screen().print(terminal(PROFILE_HEADER, rows))


def _evolve(config: EvolutionConfig, folder: Path, seeds: int) -> None:
    from mantissa.genesis.evolution.compare import compare_rankings
    from mantissa.genesis.evolution.loop import Evolution
    from mantissa.genesis.evolution.page import write_comparison, write_page

    if seeds:
        found = compare_rankings(config, folder, seeds, progress)
        _print_line("\n".join((found.verdict, *found.lines, f"page: {write_comparison(folder, config, found)}")))
        return
    with Evolution(config, folder, say=_print_line, progress=progress) as evolution:
        results = evolution.run()
        solved = sum(each.solved_at is not None for each in results)
        spent = sum(each.executions for each in results)
        say(f"{solved} of {len(results)} tasks solved with {spent:,} executions")
        say(f"page: {write_page(folder, config, results, evolution.archive)}")


def _print_line(line: str) -> None:
    progress("")
    tell(line)


def _values(overrides: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for each in overrides:
        name, equals, text = each.partition("=")
        if not equals:
            raise MantissaError(f"{each!r}: expected KEY=VALUE, such as executions=200")
        value = parse_yaml(text, each)
        values[name] = split(value) if name == "tasks" and isinstance(value, str) else value
    return values


def _list() -> None:
    from mantissa.genesis.evolution import EvolutionConfig, shipped
    from mantissa.genesis.evolution.compare import profiles

    tell(f"tasks:  {', '.join(shipped())}\nprofiles:  {', '.join(profiles())}\nsettings:")
    for name, field in EvolutionConfig.model_fields.items():
        value = field.get_default(call_default_factory=True)
        tell(f"  {name}={value!r}:  {field.description or 'of every draw'}")
