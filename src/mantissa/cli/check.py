"""``mantissa check``, for verl alone ``check-verl``: which settings do nothing, something else, or harm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mantissa.base.errors import MantissaError, say
from mantissa.cli import folded

if TYPE_CHECKING:
    from mantissa.launch.settings import Answer

_CODES = {"good": 0, "wrong": 1, "unknown": 3}
Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE|KEY=VALUE...",
        help="Scripts and configurations of one run; the last value counts.",
        show_default=False,
    ),
]
_LATEST = "0.9.1"


def check(
    files: Files = None,
    job: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A job's folder instead, running or over: what its framework saved."),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="verl, trl, ms-swift, prime-rl ...: see docs/check.md.",
            show_default="found by looking",
        ),
    ] = None,
    verl_version: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="verl's version.", show_default="0.9.1; of a job, as its keys say"),
    ] = None,
) -> None:
    """Say which settings of precision, log-probs and correction are ignored, changed, refused or harmful.

    Reads scripts (shell, Python) and configurations (YAML, TOML) of verl, TRL, OpenRLHF, NeMo-RL, SkyRL, AReaL,
    ms-swift, slime, miles and prime-rl, or what a job of theirs saved. Nothing is run. Each answer names the line of
    the framework's source that shows it.

    Exit code 0: every setting does what it says. 1: some do not. 2: bad input. 3: what some do is not known.

    [bold]Examples[/]

    mantissa check train_grpo.py

    mantissa check config.yaml actor.temperature=0.7

    mantissa check run_qwen3_megatron.sh

    mantissa check --job outputs/2026-01-31/12-00-00
    """  # fmt: skip
    from mantissa.launch.scripts import is_verl
    from mantissa.launch.settings import check_settings, read_settings, whose

    if (job is None) == (not files):
        raise MantissaError("mantissa check: expected scripts, configurations or KEY=VALUE, or --job DIR and no file")
    if job is not None:
        from mantissa.launch.job import check_job

        lines, answer = check_job(job, framework, verl_version)
        say(folded("\n".join([*lines, "", answer.text])))
        return _exit(answer)
    version = verl_version or _LATEST
    if framework == "verl" or (framework is None and all("actor_rollout_ref." in each for each in files or ())):
        return verl(files or [], version)
    given = read_settings(files or [])
    if framework is None and is_verl(given):
        shell = [str(path) for path in given.shell]
        pairs = [f"++{key}={value}" for key, value in given.settings.items() if "." in key]
        return verl(shell if len(files or ()) == len(shell) == 1 else pairs, version)
    found = check_settings(given, whose(given, framework))
    say(folded(found.text))
    return _exit(found)


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


def _exit(found: Answer) -> None:
    if code := _CODES[found.state]:
        raise typer.Exit(code)


def verl(overrides: list[str], version: str) -> None:
    """What verl's own check says, and its exit code."""
    from mantissa.launch import check as launched
    from mantissa.launch.facts import VERSIONS

    if version not in VERSIONS:
        raise MantissaError(f"--verl-version {version}: expected one of {', '.join(VERSIONS)}")
    report = launched.check_verl(overrides, version)
    say(folded(report.text))
    _exit(report)
