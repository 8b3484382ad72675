"""``mantissa check-verl``: which precision settings of a verl run take effect."""

from __future__ import annotations

from typing import Annotated

import typer

_WRONG = 1  # exit code


def check_verl(
    overrides: Annotated[
        list[str],
        typer.Argument(metavar="OVERRIDES", help="verl's overrides, or one shell script that has them in it."),
    ],
    verl_version: Annotated[str, typer.Option(metavar="VERSION", help="verl's version.")] = "0.9.1",
) -> None:
    """Say which precision settings of a verl run take effect, which are ignored, and what is cast to bf16.

    verl accepts keys that the chosen engine never reads, and values that nobody understands.
    A script is read, not run.

    Exit code 0: every precision setting takes effect. 1: some do not. 2: bad input.

    [bold]Examples[/]

    mantissa check-verl train.sh

    mantissa check-verl actor_rollout_ref.actor.fsdp_config.dtype=float16
    """
    from mantissa.base.errors import MantissaError
    from mantissa.launch.check import check_verl as check
    from mantissa.launch.check import report_text
    from mantissa.launch.facts import VERSIONS

    if verl_version not in VERSIONS:
        raise MantissaError(f"--verl-version {verl_version}: expected one of {', '.join(VERSIONS)}")
    report = check(overrides, verl_version)
    typer.echo(report_text(report))
    if report.wrong:
        raise typer.Exit(_WRONG)
