"""``mantissa check-verl``: the older name of ``mantissa check`` for scripts of verl."""

from __future__ import annotations

from typing import Annotated

import typer

from mantissa.cli.check import verl


def check_verl(
    overrides: Annotated[
        list[str],
        typer.Argument(metavar="OVERRIDES", help="verl's overrides, or one shell script that has them in it."),
    ],
    verl_version: Annotated[str, typer.Option(metavar="VERSION", help="verl's version.")] = "0.9.1",
) -> None:
    """The same as mantissa check --framework verl.

    [bold]Example[/]

    mantissa check-verl actor_rollout_ref.actor.fsdp_config.dtype=float16
    """
    verl(overrides, verl_version)
