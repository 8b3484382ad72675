"""The command ``mantissa``: one file a command. Bad input ends with one line on stderr and exit code 2."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from mantissa import __version__
from mantissa.base.environ import spin_briefly
from mantissa.base.errors import MantissaError, missing, printable

# Each command's line in the list of --help, under its group.
GROUPS = {
    "Train": {
        "demo": "The demo: train a small policy, measure a real model.",
        "recipes": "List the recipes that come with Mantissa.",
        "train": "Train a policy by RL from a recipe; resume a run.",
        "sample": "Sample completions of a prompt.",
        "report": "Write a run's report, also while it runs.",
        "compare": "Compare runs on one page.",
        "lab": "Run a grid of recipes with paired seeds.",
        "bench": "Time each precision on this device.",
        "data": "Prepare files of problems for training.",
    },
    "Understand the gap": {
        "gap": "Measure a model's gap in each pair of formats.",
        "doctor": "Say whether a gap is noise or a fault, and which.",
        "replay": "Name the operation where two sides part.",
        "precision": "Show which format each role would use here, and why.",
        "metrics": "Explain every figure that a run logs.",
    },
    "Correct and guard": {
        "tune": "Choose the layers that may be fp8, by a budget.",
        "guard": "Say when a run should have fallen back.",
    },
    "Cluster": {
        "launch": "Run a recipe on verl and Ray.",
        "check": "Say which settings of a script do nothing or harm.",
        "check-verl": "The same, for verl alone.",
        "serve": "Start a vLLM server for runs of a recipe.",
    },
    "Programs": {
        "evolve": "Improve programs against tests in the sandbox.",
        "worldmodel": "Predict how actions end, from trajectories.",
    },
}


class Commands(TyperGroup):
    """The commands above; a command's module is imported when it is the one that is used."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for lines in GROUPS.values() for name in lines]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        group, line = next(((each, lines[cmd_name]) for each, lines in GROUPS.items() if cmd_name in lines), (None, ""))
        if group is None:
            return None
        if self._listing:
            return TyperCommand(cmd_name, short_help=line, rich_help_panel=group)
        stem = cmd_name.replace("-", "_")
        module = importlib.import_module(f"mantissa.cli.{stem}")
        if hasattr(module, "app"):
            return typer.main.get_command(module.app)
        alone = typer.Typer(**_LOOKS)
        alone.command(cmd_name, cls=getattr(module, "Command", None), short_help=line)(getattr(module, stem))
        return typer.main.get_command(alone)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


_LOOKS: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": "rich"}
app = typer.Typer(name="mantissa", cls=Commands, **_LOOKS)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mantissa {__version__}")
        raise typer.Exit


@app.callback()
def mantissa(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Reinforcement learning of language models in the precision you choose for each role, with the gap measured."""


# Typer has used click and, since 0.26, a copy of its own: this is the base of usage errors in either.
_UsageError = cast(type[Exception], typer.BadParameter.__base__)


def main() -> None:
    """Entry point of the command."""
    spin_briefly()
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="mantissa", standalone_mode=False)
    except MantissaError as error:
        _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if (refusal := missing(error)) is None:
            raise
        _fail(str(refusal), refusal.exit_code)
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
