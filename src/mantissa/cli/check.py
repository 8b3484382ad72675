"""``mantissa check``: which settings of a training do nothing, something else, or harm."""

from __future__ import annotations

from typing import Annotated

import typer

from mantissa.base.errors import MantissaError, say

_WRONG, _UNKNOWN = 1, 3  # exit codes
Files = Annotated[
    list[str],
    typer.Argument(metavar="FILE|KEY=VALUE...", help="Scripts and configurations of one run; the last value counts."),
]
_Version = Annotated[str, typer.Option("--verl-version", metavar="VERSION", help="verl's version.")]


def check(
    files: Files,
    framework: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="verl, trl, openrlhf, nemo-rl, skyrl or areal.", show_default="found by looking"
        ),
    ] = None,
    verl_version: _Version = "0.9.1",
) -> None:
    """Say which settings of precision, log-probs and correction are ignored, changed, refused or harmful.

    Reads scripts (shell, Python) and configurations (YAML) of verl, TRL, OpenRLHF, NeMo-RL, SkyRL and AReaL. Nothing
    is run. Each answer names the line of the framework's source that shows it.

    Exit code 0: every setting does what it says. 1: some do not. 2: bad input. 3: what some do is not known.

    [bold]Examples[/]

    mantissa check train_grpo.py

    mantissa check config.yaml actor.temperature=0.7

    mantissa check run_qwen3_megatron.sh
    """  # fmt: skip
    from mantissa.launch.scripts import is_verl
    from mantissa.launch.settings import check_settings, read_settings, whose

    if framework == "verl" or (framework is None and all("actor_rollout_ref." in each for each in files)):
        return verl(files, verl_version)
    given = read_settings(files)
    if framework is None and is_verl(given):
        shell = [str(path) for path in given.shell]
        pairs = [f"++{key}={value}" for key, value in given.settings.items() if "." in key]
        return verl(shell if len(files) == len(shell) == 1 else pairs, verl_version)
    found = check_settings(given, whose(given, framework))
    say(found.text)
    if found.wrong or found.unknown:
        raise typer.Exit(_WRONG if found.wrong else _UNKNOWN)


def verl(overrides: list[str], version: str) -> None:
    """What verl's own check says, and its exit code."""
    from mantissa.launch.check import check_verl
    from mantissa.launch.facts import VERSIONS

    if version not in VERSIONS:
        raise MantissaError(f"--verl-version {version}: expected one of {', '.join(VERSIONS)}")
    report = check_verl(overrides, version)
    say(report.text)
    if report.wrong or report.refused:
        known = report.refused or any(each.verdict != "unknown" for each in report.wrong)
        raise typer.Exit(_WRONG if known else _UNKNOWN)
