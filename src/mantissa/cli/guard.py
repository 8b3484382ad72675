"""``mantissa guard``: what the guard says about a run, decided again from its metrics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mantissa.cli.common import Run
from mantissa.errors import MantissaError

if TYPE_CHECKING:
    from rich.console import Console

    from mantissa.training import Decision, Guard, GuardConfig, GuardSettings, Reference

_DIFFERENT, _FELL_BACK = 1, 3  # exit codes
_NO_LOSS = "no data: no row has train/loss"
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
    from rich.console import Console
    from rich.table import Table

    from mantissa.training import GuardLog
    from mantissa.training.guard_config import read_rows

    folder = run.parent if run.is_file() else run
    logged = GuardLog(folder).read()  # before the metrics: a running run writes them first
    rows = read_rows(run)
    source, judge, as_logged = _judge(folder, overrides or [], window, reference)
    _refuse_foreign(run, rows, judge)
    decisions = [judge.observe(row) for row in rows]
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(f"guard of {run}: {len(rows)} steps, {rows[0]['step']} to {rows[-1]['step']}; {source}")
    if judge.reference is not None:
        console.print(f"reference {judge.reference.path}: {_described(judge.reference)}")
    _print_decisions(console, decisions, every)
    table = Table("rule", "worst", "thresholds", box=None, pad_edge=False, header_style="dim")
    table.columns[0].no_wrap = True
    for line in _Review(rows, decisions, judge).rules():
        table.add_row(*line)
    console.print(table)
    console.print()
    state = "may" if judge.good else "may not yet"
    console.print(f"after step {decisions[-1].step}: {decisions[-1].action}; a checkpoint {state} be called good")
    same, said = _compare(logged, decisions) if as_logged is True else (True, as_logged)
    console.print(said, style="" if same else "bold red")
    if not same:
        raise typer.Exit(_DIFFERENT)
    if any(decision.action in ("fall back", "stop") for decision in decisions):
        raise typer.Exit(_FELL_BACK)


def _judge(
    folder: Path, overrides: Sequence[str], window: int | None, reference: Path | None
) -> tuple[str, Guard, Literal[True] | str]:
    """A word on the settings used, a guard with them, and True where they are the run's own, or why they are not."""
    from mantissa.mismatch import ALL_METRICS
    from mantissa.rl.recipe import apply_overrides
    from mantissa.training import Guard, GuardConfig, GuardSettings

    settings = GuardSettings.read(folder)
    if settings is None:
        if (folder / "guard.jsonl").exists():
            raise MantissaError(f"{folder} has a guard.jsonl and no guard.json; restore it, or delete guard.jsonl")
        gates = {metric.name: metric.healthy for metric in ALL_METRICS if metric.gated}
        settings, source = GuardSettings(GuardConfig(gates=gates)), "no guard.json, so the default settings"
        as_logged: Literal[True] | str = "the run was not guarded: there is no log to compare with"
    else:
        source, as_logged = f"the settings of {folder / 'guard.json'}", True
    values = settings.config.model_dump(mode="json")
    changed = apply_overrides(values, [*overrides, *([f"window={window}"] if window is not None else [])])
    different = [key for key in changed if key not in values or changed[key] != values[key]]
    config = GuardConfig(**changed)
    judge = Guard(config, _reference(settings, config, reference))
    digest = judge.reference.digest if judge.reference else None
    if as_logged is True and (digest != settings.reference_digest or set(different) - {"reference"}):
        as_logged = (
            "not compared with guard.jsonl: these settings are not the run's, and what the run did about its own "
            "decisions is in its rows"
        )
    if different:
        source += ", but for " + ", ".join(f"{key}={changed[key]}" for key in different)
    return source, judge, as_logged


def _reference(settings: GuardSettings, config: GuardConfig, given: Path | None) -> Reference | None:
    """The run's own reference, wherever it lies now, or another that was asked for."""
    from mantissa.training import Reference

    where = given if given is not None else config.reference
    if where is None:
        return None
    if where == settings.config.reference:
        return settings.read_reference()
    own = Reference.read(where, settings.reference_rows)  # moved? then these rows are what they were
    return own if own.digest == settings.reference_digest else Reference.read(where)


def _refuse_foreign(run: Path, rows: Sequence[dict[str, Any]], judge: Guard) -> None:
    from mantissa.training.guard_config import DROPS

    known = {"train/loss", *DROPS.values(), "precision/overflows", "time/step", *judge.config.gates}
    if not any(known & row.keys() for row in rows):
        raise MantissaError(
            f"{run}: no row has train/loss, precision/overflows, time/step or a metric with a gate; expected the "
            "metrics of the trainer or of mantissa train"
        )


def _described(reference: Reference) -> str:
    loss = f"a loss on {len(reference.loss)} of {reference.rows} steps" if reference.loss else "no train/loss"
    speed = f"{reference.seconds:.3g} s a step (median)" if reference.seconds is not None else "no time/step"
    return f"{loss}, {speed}" + (f", {reference.format}" if reference.format else "")


# what was decided


def _print_decisions(console: Console, decisions: Sequence[Decision], every: bool) -> None:
    """Each noteworthy decision; without ``every`` those in a row with the same action and rules as first and last."""
    from mantissa.training.guard import noteworthy

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


# what each rule had to go by


@dataclass(frozen=True)
class _Review:
    """Rows, and what the judge decided on them."""

    rows: Sequence[dict[str, Any]]
    decisions: Sequence[Decision]
    judge: Guard

    def rules(self) -> Iterator[tuple[str, str, str]]:
        """For each rule: the worst that it saw, or why it saw nothing; and where it fires."""
        from mantissa.training.guard_config import DROPS

        config, reference, no_loss = self.judge.config, self.judge.reference, self._no_loss()
        loss = speed = "no data: no reference"
        if reference is not None:
            loss = no_loss or self._worst("loss_excess", "train/loss", "{:+.1%}")
            loss = loss if reference.loss else "no data: no loss there"
            speed = self._worst("speed", "time/step", "{:.2f} x", min)
            speed = speed if reference.seconds else "no data: no time/step there"
        yield "nonfinite", self._nonfinite(), f"fall back at {config.nonfinite_in_a_row} in a row"
        overflow = self._worst("overflowed_rate", "precision/overflows", "{:.1%} of steps")
        bounds = (config.overflow_warn, config.overflow_alert, config.overflow_fall_back)
        yield "overflow", overflow, "warn, alert, fall back above " + ", ".join(f"{100 * b:g}%" for b in bounds)
        yield "loss", loss, f"warn, fall back above {100 * config.loss_warn:g}%, {100 * config.loss_fall_back:g}%"
        divergence = no_loss or (self._divergence() if config.divergence else "off")
        yield "divergence", divergence, f"fall back above {config.divergence:g} times" if config.divergence else ""
        for name, metric in DROPS.items():
            if self._steps(metric):
                points = (100 * getattr(config, f"{name}_{level}") for level in ("warn", "fall_back"))
                fires = "warn, fall back for a fall of more than {:g}, {:g} points".format(*points)
                yield name, self._worst(f"{name}_drop", metric, "{:+.1%}"), fires
        yield "speed", speed, f"warn below {config.slow_warn:g} x"
        yield from self._gates()

    def _gates(self) -> Iterator[tuple[str, str, str]]:
        from mantissa.mismatch import Metric

        config = self.judge.config
        measured = [name for name in config.gates if self._steps(name)]
        levels = f"warn, alert above {100 * config.gate_warn:g}%, {100 * config.gate_alert:g}%"
        for name in measured:
            healthy = Metric(name, "", "", config.gates[name]).healthy_text
            worst = self._worst(f"outside/{name}", name, "outside on {:.0%}")
            yield f"gate {name}", worst, f"healthy {healthy}; {levels}"
        if len(measured) < len(config.gates):
            yield f"{len(config.gates) - len(measured)} more gates", "no data: no row has their metrics", ""
        elif not config.gates:
            yield "gate", "none is set", ""

    def _steps(self, name: str) -> int:
        return sum(row.get(name) is not None for row in self.rows)

    def _worst(self, figure: str, needs: str, show: str, pick: Callable[..., Any] = max) -> str:
        """The worst value of a figure with its step, or what was missing."""
        seen = [(d.numbers[figure], d.step) for d in self.decisions if figure in d.numbers]
        if not self._steps(needs):
            return f"no data: no row has {needs}"
        if not seen:
            return f"too few steps: {self._steps(needs)} with {needs}, {self.judge.config.enough} are needed"
        value, step = pick(seen, key=lambda pair: pair[0])
        return f"{show.format(value) if math.isfinite(value) else f'{value:g}'} at step {step}"

    def _no_loss(self) -> str:
        """Why no rule can go by the loss; empty where they can."""
        if self._steps("train/loss"):
            return ""
        if self._steps("policy/loss"):
            return f"{_NO_LOSS} (of policy/loss only whether it is finite: batches of RL have no common scale)"
        return _NO_LOSS

    def _nonfinite(self) -> str:
        name = "train/loss" if self._steps("train/loss") else "policy/loss"
        if any(decision.numbers["nonfinite_in_a_row"] for decision in self.decisions):
            return self._worst("nonfinite_in_a_row", name, "{:.0f} in a row")
        return "all are finite" if self._steps(name) else _NO_LOSS

    def _divergence(self) -> str:
        seen = [d for d in self.decisions if "best_loss_mean" in d.numbers]
        if not seen:
            return f"too few steps: {self.judge.config.enough} are needed"
        worst = max(seen, key=lambda d: d.numbers["loss_mean"] - d.numbers["best_loss_mean"])
        return f"{worst.numbers['loss_mean']:.4g} at step {worst.step}, best {worst.numbers['best_loss_mean']:.4g}"


# is it what the run said?


def _compare(logged: Sequence[Decision], decisions: Sequence[Decision]) -> tuple[bool, str]:
    """Whether the log holds these decisions, and a sentence that says so, or names the first difference."""
    from mantissa.training.guard import noteworthy

    decided = noteworthy(decisions)
    for log, now in itertools.zip_longest(logged, decided):
        if log == now:
            continue
        if log is None and now is decided[-1] and now.step == decisions[-1].step:
            return True, (
                f"the replay equals guard.jsonl ({len(logged)} decisions), which ends before the newest step: the run "
                "is writing it, or was killed there"
            )
        return False, f"the replay differs from guard.jsonl: {_difference(log, now)}"
    return True, f"the replay equals guard.jsonl: {len(logged)} decisions"


def _difference(log: Decision | None, now: Decision | None) -> str:
    if log is None or (now is not None and now.step < log.step):
        assert now is not None
        return f"step {now.step} is {now.action} here and has no row there"
    if now is None or log.step < now.step:
        return f"step {log.step} is {log.action} there and has no row here"
    if log.action != now.action:
        return f"step {now.step} is {now.action} here and {log.action} there"
    for name in sorted(log.numbers.keys() | now.numbers.keys()):
        ours, theirs = now.numbers.get(name), log.numbers.get(name)
        if ours != theirs:
            return f"step {now.step}: {name} is {ours!r} here and {theirs!r} there"
    return f"step {now.step}: the reasons are {list(now.reasons)} here and {list(log.reasons)} there"
