"""What several commands share: options, and how they print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A run's, a Hugging Face or an adapter's folder, FILE.gguf, package:NAME or hub:ORG/NAME."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Dotted keys of the recipe, YAML values.", show_default=False),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder; it may still be running.")]


def split(names: str) -> tuple[str, ...]:
    """The names of a list with commas."""
    return tuple(name.strip() for name in names.split(",") if name.strip())


def progress(line: str) -> None:
    """One line on stderr that is overwritten, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)


def echo_warning(warning: str | None, err: bool = False) -> None:
    """Print a warning where there is one."""
    if warning is not None:
        typer.echo(warning, err=err)


def screen(least: int = 0) -> Console:
    """A console that prints text as it is, at least so wide: a narrower terminal wraps its lines."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    console.width = max(console.width, least)
    return console
