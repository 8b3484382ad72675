"""``mantissa more``: the commands that ``mantissa --help`` leaves out."""

from __future__ import annotations

from typing import Any, ClassVar

import typer

from mantissa.base.errors import say
from mantissa.cli import MORE, Commands


class Others(Commands):
    """Those commands alone."""

    listed: ClassVar[dict[str, dict[str, str]]] = MORE


def more(context: typer.Context) -> None:
    """List the commands that mantissa --help leaves out."""
    parent: Any = context.parent
    others = Others(name="mantissa", params=parent.command.get_params(parent), help=more.__doc__, rich_markup_mode=None)
    say(others.get_help(typer.Context(others, info_name="mantissa")))
