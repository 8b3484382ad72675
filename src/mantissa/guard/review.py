"""A guard's decisions again: with which settings, what each rule had to go by, and whether the run logged the same."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mantissa.base.errors import MantissaError
from mantissa.guard.config import DROPS, GuardConfig, ReferenceRun
from mantissa.guard.log import GuardSettings
from mantissa.guard.rules import GATE, RULES, Decision, Guard, Rule, noteworthy
from mantissa.mismatch.tables import ALL_METRICS, Metric
from mantissa.runs.health import expected_in, metric_of

_NO_LOSS = "no data: no row has train/loss"


Plain = dict[str, Any]


def guard_of(folder: Path, change: Callable[[Plain], Plain], reference: Path | None) -> tuple[Guard, str, str]:
    """A guard with the run's settings (or the defaults) as ``change`` makes them, a word on these, and why its
    decisions cannot be compared with ``guard.jsonl``; that is empty where these are the run's own.

    ``reference``: a run to use instead of the run's own, or where that lies now. Raises ``MantissaError`` as
    ``GuardSettings.read`` and ``GuardConfig``.
    """
    settings = GuardSettings.read(folder)
    if settings is None:
        if (folder / "guard.jsonl").exists():
            raise MantissaError(f"{folder} has a guard.jsonl and no guard.json; restore it, or delete guard.jsonl")
        expected = expected_in(folder)
        gates = {metric.name: metric_of(metric.name, expected).healthy for metric in ALL_METRICS if metric.gated}
        settings, source = GuardSettings(GuardConfig(gates=gates)), "no guard.json, so the default settings"
        foreign = "the run was not guarded: there is no log to compare with"
    else:
        source, foreign = f"the settings of {folder / 'guard.json'}", ""
    values = settings.config.model_dump(mode="json")
    changed = change(values)
    different = [key for key in changed if key not in values or changed[key] != values[key]]
    config = GuardConfig(**changed)
    guard = Guard(config, _reference(settings, config, reference))
    digest = guard.reference.digest if guard.reference else None
    if not foreign and (digest != settings.reference_digest or set(different) - {"reference"}):
        foreign = (
            "not compared with guard.jsonl: these settings are not the run's, and what the run did about its own "
            "decisions is in its rows"
        )
    if different:
        source += ", but for " + ", ".join(f"{key}={changed[key]}" for key in different)
    return guard, source, foreign


def _reference(settings: GuardSettings, config: GuardConfig, given: Path | None) -> ReferenceRun | None:
    """The run's own reference, wherever it lies now, or another that was asked for."""
    where = given if given is not None else config.reference
    if where is None:
        return None
    if where == settings.config.reference:
        return settings.read_reference()
    own = ReferenceRun.read(where, settings.reference_rows)  # moved? then these rows are what they were
    return own if own.digest == settings.reference_digest else ReferenceRun.read(where)


def refuse_unjudged(run: Path, rows: Sequence[dict[str, Any]], guard: Guard) -> None:
    """Raise ``MantissaError`` for rows that hold nothing the guard goes by."""
    known = {"train/loss", *DROPS.values(), "precision/overflows", "time/step", *guard.config.gates}
    if not any(known & row.keys() for row in rows):
        raise MantissaError(
            f"{run}: no row has train/loss, precision/overflows, time/step or a metric with a gate; expected the "
            "metrics of the trainer or of mantissa train"
        )


def described(reference: ReferenceRun) -> str:
    """What a reference holds, in a line."""
    loss = f"a loss on {len(reference.loss)} of {reference.rows} steps" if reference.loss else "no train/loss"
    speed = f"{reference.seconds:.3g} s a step (median)" if reference.seconds is not None else "no time/step"
    return f"{loss}, {speed}" + (f", {reference.format}" if reference.format else "")


def rules(
    rows: Sequence[dict[str, Any]], decisions: Sequence[Decision], guard: Guard
) -> Iterator[tuple[str, str, str]]:
    """For each rule: the worst that it saw, or why it saw nothing; and where it fires."""
    config, reference = guard.config, guard.reference
    logged = Counter(name for row in rows for name, value in row.items() if value is not None)

    def worst(rule: Rule, gate: str = "") -> str:
        """The worst value of a rule's figure with its step, or what was missing."""
        figure, needs = rule.figure.format(gate), rule.needs.format(gate)
        seen = [(d.numbers[figure], d.step) for d in decisions if figure in d.numbers]
        if not logged[needs]:
            return f"no data: no row has {needs}"
        if not seen:
            return f"too few steps: {logged[needs]} with {needs}, {config.enough} are needed"
        value, step = rule.worst(seen, key=lambda pair: pair[0])
        return f"{rule.show.format(value) if math.isfinite(value) else f'{value:g}'} at step {step}"

    no_loss = "" if logged["train/loss"] else _NO_LOSS
    if no_loss and logged["policy/loss"]:
        no_loss += " (of policy/loss only whether it is finite: batches of RL have no common scale)"

    def seen_by(rule: Rule) -> str:
        if rule.name == "nonfinite":
            judged = "train/loss" if logged["train/loss"] else "policy/loss"
            if any(decision.numbers[rule.figure] for decision in decisions):
                return worst(dataclasses.replace(rule, needs=judged))
            return "all are finite" if logged[judged] else _NO_LOSS
        if rule.name == "divergence":
            return no_loss or (_divergence(decisions, config.enough) if config.divergence else "off")
        if rule.name in ("loss", "speed"):
            if reference is None:
                return "no data: no reference"
            if rule.name == "loss":
                return (no_loss or worst(rule)) if reference.loss else "no data: no loss there"
            return worst(rule) if reference.seconds else "no data: no time/step there"
        return worst(rule)

    for rule in RULES:
        if rule is not GATE and (rule.name not in DROPS or logged[rule.needs]):
            yield rule.name, seen_by(rule), rule.thresholds(config)
    measured = [name for name in config.gates if logged[name]]
    for name in measured:
        healthy = Metric(name, "", "", config.gates[name]).healthy_text
        yield f"gate {name}", worst(GATE, name), f"healthy {healthy}; {GATE.thresholds(config)}"
    if len(measured) < len(config.gates):
        yield f"{len(config.gates) - len(measured)} more gates", "no data: no row has their metrics", ""
    elif not config.gates:
        yield "gate", "none is set", ""


def _divergence(decisions: Sequence[Decision], enough: int) -> str:
    seen = [d for d in decisions if "best_loss_mean" in d.numbers]
    if not seen:
        return f"too few steps: {enough} are needed"
    worst = max(seen, key=lambda d: d.numbers["loss_mean"] - d.numbers["best_loss_mean"])
    return f"{worst.numbers['loss_mean']:.4g} at step {worst.step}, best {worst.numbers['best_loss_mean']:.4g}"


def compared(logged: Sequence[Decision], decisions: Sequence[Decision]) -> tuple[bool, str]:
    """Whether the log holds these decisions, and a sentence that says so, or names the first difference."""
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
