"""The command ``mantissa``: one file a command. Bad input ends with one line on stderr and exit code 2."""

from __future__ import annotations

import importlib
import sys
from typing import cast

import typer

from mantissa.base.errors import MantissaError, printable
from mantissa.cli import data, worldmodel
from mantissa.cli.machine import spin_briefly

COMMANDS = ("train", "sample", "serve", "report", "replay", "compare", "guard", "bench", "gap", "precision", "metrics",
            "launch", "check_verl", "doctor", "tune", "lab", "evolve")  # fmt: skip
app = typer.Typer(
    name="mantissa",
    help="Reinforcement learning of language models in the precision you choose for each role, with the gap measured.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for name in COMMANDS:
    module = importlib.import_module(f"mantissa.cli.{name}")
    app.command(cls=getattr(module, "Command", None))(getattr(module, name))
app.add_typer(data.app, name="data")
app.add_typer(worldmodel.app, name="worldmodel")

# Typer has used click and, since 0.26, a copy of its own: this is the base of usage errors in either.
_UsageError = cast(type[Exception], typer.BadParameter.__base__)


def main() -> None:
    """Entry point of the command."""
    spin_briefly()
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="mantissa", standalone_mode=False)
    except MantissaError as error:
        _fail(str(error), error.exit_code)
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "mantissa"
        _fail(f"{error.format_message()} (see {where} --help)", 2)  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    if code == 130:
        _fail("interrupted; nothing was begun that needs to be resumed", code)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    """One line on stderr, whatever is in the message, and the end."""
    print(f"mantissa: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)
