"""``mantissa recipes``: the recipes that come with Mantissa."""

from __future__ import annotations

from typing import Annotated

import typer

from mantissa.base.errors import say
from mantissa.base.readers.yaml import find_recipe, said_of, shipped_recipes
from mantissa.cli import screen


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print this one whole, to keep and change.", show_default=False)
    ] = None,
) -> None:
    """List the recipes that come with Mantissa, a line each; train and launch take their names.

    [bold]Examples[/]

    mantissa recipes

    mantissa recipes demo > mine.yaml
    """
    if name is not None:
        say(find_recipe(name).read_text("utf-8"), end="")
        return
    from mantissa.runs.page import terminal

    known, console = shipped_recipes(), screen()
    for folder in dict.fromkeys(each.rpartition("/")[0] for each in known):
        rows = [(each, said_of(path)) for each, path in known.items() if each.rpartition("/")[0] == folder]
        console.print(terminal(("name", "what it is"), rows))
