"""The command ``mantissa``: one file a command. Bad input ends with one line on stderr and exit code 2."""

from __future__ import annotations

import sys

import typer

from mantissa.cli import metrics, precision, report, sample, train
from mantissa.errors import MantissaError

app = typer.Typer(
    name="mantissa",
    help="Reinforcement learning of language models in the precision you choose for each role, with the gap measured.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (train.train, sample.sample, report.report, precision.precision, metrics.metrics):
    app.command()(command)


def main() -> None:
    """Entry point of the command."""
    try:
        app()
    except MantissaError as error:
        print(f"mantissa: error: {error}", file=sys.stderr)
        sys.exit(2)
