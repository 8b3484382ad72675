"""The command ``mantissa``: one file a command, and here what they share: options, how they print, how they fail.

Bad input ends with one line on stderr and exit code 2.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from mantissa import __version__
from mantissa.base.bounds import boundary, spending
from mantissa.base.environ import Heartbeat, spin_briefly
from mantissa.base.errors import MantissaError, missing, printable, say, visible
from mantissa.base.hub import HUB, find_model

if TYPE_CHECKING:
    from rich.console import Console


def _model(name: str) -> str:
    """Refuse a model that is not there before anything heavy is imported to open it. The hub is asked later."""
    if not name.startswith(HUB):
        find_model(name, weights=False)
    return name


def there(expected: str) -> Callable[[Path | None], Path | None]:
    """What refuses a path at which nothing is, likewise."""

    def check(path: Path | None) -> Path | None:
        if path is not None and not path.exists():
            raise MantissaError(f"{path}: no such file or folder; expected {expected}")
        return path

    return check


def recipe_there(given: Path | None) -> Path | None:
    """Refuse a recipe that is neither a file nor comes with Mantissa, likewise; beside --resume it is an override."""
    if given is not None and "=" not in str(given):
        from mantissa.base.readers.yaml import find_recipe  # with it YAML, which a command without a recipe has not

        with boundary(f"recipe {given}", "expected a YAML file of UTF-8 text, such as recipes/demo.yaml"):
            find_recipe(given)
    return given


Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run's, a Hugging Face or an adapter's folder, FILE.gguf, package:NAME or hub:ORG/NAME.",
        callback=_model,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Dotted keys of the recipe, YAML values.", show_default=False),
]
Recipe = Annotated[
    Path | None,
    typer.Argument(
        metavar="RECIPE", help="A recipe: a file, or a name such as demo.", show_default=False, callback=recipe_there
    ),
]
Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="A run's folder; it may still be running.", callback=there("a run that mantissa train made")
    ),
]


class ModelCommand(TyperCommand):
    """A command that has an option for each described field of a pydantic model, beside those of its function.

    ``model``: its dotted name; it is imported when the command is the one that is used. The function finds in
    ``context.obj`` what was given, by field, for the model to check.
    """

    model: ClassVar[str]

    @functools.cached_property
    def _fields(self) -> dict[str, Any]:
        home, _, name = self.model.rpartition(".")
        fields = getattr(importlib.import_module(home), name).model_fields
        return {name: field for name, field in fields.items() if field.description}

    @functools.cached_property
    def _options(self) -> list[Any]:
        app = typer.Typer(add_completion=False)
        app.command()(_callback(self._fields))
        return [each for each in typer.main.get_command(app).params if each.name in self._fields]

    def get_params(self, ctx: Any) -> list[Any]:
        return [*self._options, *super().get_params(ctx)]

    def invoke(self, ctx: Any) -> Any:
        given = {name: ctx.params.pop(name) for name in self._fields}
        lists = (name for name in given if isinstance(given[name], str) and _has(self._fields[name].annotation, tuple))
        ctx.obj = given | {name: split(given[name]) for name in lists}
        return super().invoke(ctx)


def _callback(fields: dict[str, Any]) -> Any:
    """A function whose parameters, as Typer reads them, are the options of a model's fields."""
    parameters = []
    for name, field in fields.items():
        plain = next((kind for kind in (bool, int, float, Path) if _has(field.annotation, kind)), str)
        least = next((bound.ge for bound in field.metadata if hasattr(bound, "ge")), None)
        switch = f"--{name.replace('_', '-')}"  # alone, so that there is no --no-NAME
        option = Annotated[plain | None, typer.Option(switch, help=field.description, min=least)]  # type: ignore[valid-type]
        default = ",".join(field.default) or None if isinstance(field.default, tuple) else field.default
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option))

    def callback(**values: Any) -> None: ...

    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {each.name: each.annotation for each in parameters}
    return callback


def _has(annotation: Any, kind: type) -> bool:
    """Whether a type is somewhere in an annotation, outside of a tuple's elements and a choice's values."""
    if annotation is kind or get_origin(annotation) is kind:
        return True
    inner = () if get_origin(annotation) in (tuple, Literal) else get_args(annotation)
    return any(_has(each, kind) for each in inner)


def split(names: str) -> tuple[str, ...]:
    """The names of a list with commas."""
    return tuple(name.strip() for name in names.split(",") if name.strip())


_heart = Heartbeat(lambda line: print(line, file=sys.stderr, flush=True))


def progress(line: str) -> None:
    """One line on stderr that is overwritten, and goes where it is empty; where that is no terminal, the newest line
    after 3 seconds and then every 20."""
    if sys.stderr.isatty():
        room = shutil.get_terminal_size().columns - 1  # what goes on in the next row is not wiped out
        print(f"\r\x1b[2K{visible(line)[:room]}", end="", file=sys.stderr, flush=True)  # the line's own escapes
    else:
        _heart.at(line)


def echo_warning(warning: str | None, err: bool = False) -> None:
    """Print a warning where there is one."""
    if warning is not None:
        say(warning, err=err)


def screen(least: int = 0) -> Console:
    """A console that prints text as it is, at least so wide: a narrower terminal wraps its lines."""
    from mantissa.base.screen import Screen

    console = Screen(markup=False, highlight=False)
    console.width = max(console.width, least)
    return console


def folded(text: str, wide: int | None = None) -> str:
    """Lines of at most ``wide`` columns, broken between words and gone on with below their last column; by default the
    terminal's width, and where output is no terminal the text as it is."""
    if wide is None:
        if not sys.stdout.isatty():
            return text
        wide = shutil.get_terminal_size().columns
    lines = []
    for line in text.split("\n"):
        starts = [each.end() for each in re.finditer(r" {2,}(?=\S)", line)]
        near = [start for start in starts if start <= wide // 2]
        first, under = line[: len(line) - len(line.lstrip())], " " * (near[-1] if near else 0)
        if starts != near and under == first:  # a column so far right that it has a line of its own
            under += "    "
        fold = textwrap.TextWrapper(wide, first, under, break_long_words=False, break_on_hyphens=False)  # to be copied
        lines.append(fold.fill(line.lstrip()))
    return "\n".join(lines)


def tell(text: str) -> None:
    """Print a text as ``folded`` has it."""
    say(folded(text))


# Each command's line in the list of --help, under its group; those of MORE are in that of ``mantissa more``.
GROUPS = {
    "Understand the gap": {
        "gap": "Measure a model's gap in each pair of formats.",
        "doctor": "Say whether a gap is noise or a fault, and which.",
        "check": "Say which settings of a script do nothing or harm.",
        "precision": "Show which format each role would use here, and why.",
    },
    "Train": {
        "demo": "The demo: train a small policy, measure a real model.",
        "recipes": "List the recipes that come with Mantissa.",
        "train": "Train a policy by RL from a recipe; resume a run.",
        "sample": "Sample completions of a prompt.",
        "report": "Write a run's report, also while it runs.",
        "compare": "Compare runs on one page.",
    },
}
MORE = {
    "Choose a format": {
        "fitness": "Say whether a model can be trained in fp16.",
        "tune": "Choose the layers that may be fp8, by a budget.",
        "bench": "Time each precision on this device.",
    },
    "Look closer": {
        "metrics": "Explain the figures that a run logs.",
        "guard": "Say when a run should have fallen back.",
        "weights": "Say whether an engine has the trainer's weights.",
        "certify": "Certify equal log-probs, or check a certificate.",
        "tokens": "Say where a dialogue encoded again has other tokens.",
        "replay": "Name the operation where two sides part.",
        "lab": "Run a grid of recipes with paired seeds.",
        "data": "Prepare files of problems for training.",
    },
    "Cluster": {
        "launch": "Run a recipe on verl and Ray.",
        "check-verl": "As check, for verl alone.",
        "serve": "Start a vLLM server for runs of a recipe.",
    },
    "Programs": {
        "evolve": "Improve programs against tests in the sandbox.",
        "worldmodel": "Predict how actions end, from trajectories.",
    },
}
_BESIDE = {"check-verl": "check"}  # a command that lies in another's module
_OTHERS = {"And": {"more": f"List the {sum(map(len, MORE.values()))} other commands."}}


class Commands(TyperGroup):
    """The commands above; a command's module is imported when it is the one that is used."""

    listed: ClassVar[dict[str, dict[str, str]]] = GROUPS | _OTHERS

    def invoke(self, ctx: Any) -> Any:
        with spending():  # one budget for whatever the command reads
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for lines in self.listed.values() for name in lines]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        line = next((lines[cmd_name] for lines in (GROUPS | MORE | _OTHERS).values() if cmd_name in lines), None)
        if line is None:
            return None
        stem = cmd_name.replace("-", "_")
        module = importlib.import_module(f"mantissa.cli.{_BESIDE.get(cmd_name, stem)}")
        alone = typer.Typer(**_LOOKS)
        if not hasattr(module, "app"):
            alone.command(cmd_name, cls=getattr(module, "Command", None), short_help=line)(getattr(module, stem))
        command = typer.main.get_command(getattr(module, "app", alone))
        for each in (command, *getattr(command, "commands", {}).values()):
            each.help = re.sub(r"(?<=\S)\n(?=\S)", " ", each.help or "")  # a terminal breaks its lines by itself
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The groups' lines as they stand here: no command is imported for them."""
        wide = max(map(len, self.list_commands(ctx)))
        for group, lines in self.listed.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(wide), line) for name, line in lines.items()])


_LOOKS: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": "rich"}
# Without rich: loading it would be half of the time of ``mantissa --help``.
app = typer.Typer(name="mantissa", cls=Commands, **(_LOOKS | {"rich_markup_mode": None}))


def _version(wanted: bool) -> None:
    if wanted:
        say(f"mantissa {__version__}")
        raise typer.Exit


@app.callback()
def mantissa(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Find and remove the difference between the numbers of a rollout engine and a trainer; train in any format."""


# Typer has used click and, since 0.26, a copy of its own: this is the base of usage errors in either.
_UsageError = cast(type[Exception], typer.BadParameter.__base__)


def main() -> None:
    """Entry point of the command."""
    spin_briefly()
    plain = warnings.formatwarning
    warnings.formatwarning = lambda *given, **more: visible(plain(*given, **more))
    # torch's, at the first backward on a GPU: its thread has no context yet, and takes the device's
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context", UserWarning)
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
    line = f"mantissa: error: {printable(' '.join(message.split()))}"
    progress("")  # the line of what was at work is wiped out, or is whole, and none comes into this one
    if sys.stderr.isatty():
        line = folded(line, shutil.get_terminal_size().columns)
    say(line, err=True)
    sys.exit(code)
