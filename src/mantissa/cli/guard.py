"""``mantissa guard``: what the guard says about a run, decided again from its metrics."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mantissa.cli import Run, screen

if TYPE_CHECKING:
    from rich.console import Console

    from mantissa.guard import Decision

_DIFFERENT, _FELL_BACK = 1, 3  # exit codes
_STYLES = {"ok": "green", "warn": "yellow", "alert": "red", "fall back": "bold red", "stop": "bold red"}


def guard(
    run: Run,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings to try instead, such as overflow_warn=0.1 or to=fp32."),
    ] = None,
    window: Annotated[int | None, typer.Option(metavar="N", help="Optimiser steps that count; the newest.")] = None,
    reference: Annotated[
        Path | None, typer.Option(metavar="RUN2", help="A run to compare loss and speed with, such as one in fp32.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Print the decision of every step, one by one.")] = False,
) -> None:
    """Decide again, from RUN/metrics.jsonl, when the run should have warned, fallen back or stopped.

    The settings are those of RUN/guard.json, or the defaults for a run that was not guarded.
    For a guarded run the decisions must be those in RUN/guard.jsonl.

    Exit code 0: nothing worse than an alert. 3: a fall back or a stop was decided.
    1: the decisions are not those that the run logged. 2: bad input.

    [bold]Examples[/]

    mantissa guard runs/fp16 --reference runs/fp32

    mantissa guard runs/fp16 --window 100 overflow_fall_back=0.2
    """
    from mantissa.guard import GuardLog
    from mantissa.guard.config import read_rows
    from mantissa.guard.log import compared, described, guard_of, refuse_unjudged, rules
    from mantissa.rl.config.run import apply_overrides
    from mantissa.runs.health import expected_in, gap_sentence
    from mantissa.runs.page import terminal

    folder = run.parent if run.is_file() else run
    logged = GuardLog(folder).read()  # before the metrics: a running run writes them first
    rows = read_rows(run)
    tried = [*(overrides or []), *([f"window={window}"] if window is not None else [])]
    judge, source, foreign = guard_of(folder, lambda values: apply_overrides(values, tried), reference)
    refuse_unjudged(run, rows, judge)
    decisions = [judge.observe(row) for row in rows]
    console = screen()
    console.print(f"guard of {run}: {len(rows)} steps, {rows[0]['step']} to {rows[-1]['step']}; {source}")
    if judge.reference is not None:
        console.print(f"reference {judge.reference.path}: {described(judge.reference)}")
    _print_decisions(console, decisions, every)
    table = terminal(("rule", "worst", "thresholds"), rules(rows, decisions, judge), whole=1)
    console.print(table)
    console.print()
    if said := gap_sentence(rows, expected_in(folder)):
        console.print(said)
    state = "may" if judge.good else "may not yet"
    console.print(f"after step {decisions[-1].step}: {decisions[-1].action}; a checkpoint {state} be called good")
    same, said = (True, foreign) if foreign else compared(logged, decisions)
    console.print(said, style="" if same else "bold red")
    if not same:
        raise typer.Exit(_DIFFERENT)
    if any(decision.action in ("fall back", "stop") for decision in decisions):
        raise typer.Exit(_FELL_BACK)


def _print_decisions(console: Console, decisions: Sequence[Decision], every: bool) -> None:
    """Each noteworthy decision; without ``every`` those in a row with the same action and rules as first and last."""
    from mantissa.guard import noteworthy

    console.print()
    shown = list(decisions) if every else noteworthy(decisions)
    if not shown:
        console.print(f"every one of {len(decisions)} decisions is ok\n")
    key: Callable[[Decision], object] = lambda d: d.step if every else (d.action, d.rules)  # noqa: E731
    for _, together in itertools.groupby(shown, key):
        group = list(together)
        for decision in group if len(group) < 3 else (group[0], group[-1]):
            _print_decision(console, decision)
        if len(group) > 2:
            console.print(f"    and {len(group) - 2} like it between these two (--all shows them)", style="dim")
    if shown:
        console.print()


def _print_decision(console: Console, decision: Decision) -> None:
    from rich.text import Text

    console.print(Text(f"step {decision.step:>6}  ").append(decision.action, style=_STYLES[decision.action]))
    for reason in decision.reasons:
        console.print(f"    {reason}")
    numbers = ", ".join(f"{name} {value:.6g}" for name, value in decision.numbers.items())
    console.print(f"    {numbers}", style="dim")
