"""A guarded run's two files, ``guard.json`` and ``guard.jsonl``, the guard that is asked after every row, and its
decisions made again from them: with which settings, what each rule had to go by, whether the run logged the same."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mantissa.base.errors import MantissaError
from mantissa.base.files import JsonLines, write_atomically
from mantissa.base.ranks import ALONE, Ranks
from mantissa.base.readers.json import read_json
from mantissa.guard.config import GuardConfig, ReferenceRun
from mantissa.guard.rules import Action, Decision, Guard, Rule, noteworthy, severity
from mantissa.mismatch.tables import ALL_METRICS
from mantissa.runs.health import expected_in, metric_of

FORMAT = "mantissa-guard"
VERSION = 1


@dataclass(frozen=True)
class GuardSettings:
    """What ``guard.json`` holds: the config, and how many rows of the reference were read and what they hash to."""

    config: GuardConfig
    reference_rows: int | None = None
    reference_digest: str | None = None

    @classmethod
    def of(cls, guard: Guard) -> GuardSettings:
        known = guard.reference
        return cls(guard.config) if known is None else cls(guard.config, known.rows, known.digest)

    def write(self, folder: Path | str) -> None:
        """Write ``folder/guard.json``, atomically."""
        values = {
            "format": FORMAT,
            "version": VERSION,
            "config": self.config.model_dump(mode="json"),
            "reference_rows": self.reference_rows,
            "reference_digest": self.reference_digest,
        }
        write_atomically(Path(folder) / "guard.json", json.dumps(values, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path | str) -> GuardSettings | None:
        """What ``folder/guard.json`` says; None without one. Raises ``MantissaError`` where it is something else."""
        path = Path(folder) / "guard.json"
        if not path.exists():
            return None
        values: Any = read_json(path, "restore it, or delete it")
        if not isinstance(values, dict) or values.get("format") != FORMAT or not isinstance(values.get("config"), dict):
            raise MantissaError(f"{path}: expected the settings of a guard; restore it, or delete it")
        if values.get("version") != VERSION:
            raise MantissaError(f"{path} has version {values.get('version')!r}; this Mantissa reads version {VERSION}")
        try:
            config = GuardConfig(**values["config"])
        except MantissaError as error:
            raise MantissaError(f"{path}: {error}") from None
        rows = values.get("reference_rows")
        return cls(config, rows if isinstance(rows, int) else None, values.get("reference_digest"))

    def read_reference(self, path: Path | str | None = None) -> ReferenceRun | None:
        """The part of the reference that the run was judged with; ``path``: where it lies now, if it was moved.

        Raises ``MantissaError`` where it is gone, or is not what it was.
        """
        where = path if path is not None else self.config.reference
        if where is None:
            return None
        if not Path(where).exists():
            raise MantissaError(f"the reference {where} is not there; give the folder that it was moved to")
        reference = ReferenceRun.read(where, self.reference_rows)
        if self.reference_digest is not None and reference.digest != self.reference_digest:
            raise MantissaError(
                f"the reference {where} has changed: its first {self.reference_rows} rows are not those that the run "
                "was judged with; restore it, or give the folder it was moved to"
            )
        return reference


class GuardLog:
    """The decisions of one run in ``folder/guard.jsonl``. Get one, and its guard, from ``open_guard``.

    A guarded run keeps two files beside its metrics: ``guard.json``, its settings, and ``guard.jsonl``, its decisions.

    ``guard.json`` says with which settings, and with how much of which reference, the run is judged. A run keeps them
    for its life, or its decisions could not be reproduced. ``guard.jsonl`` has a row for every decision that is not
    "ok", and for the first "ok" after one. A step's row in ``metrics.jsonl`` is written first: killed between the two,
    a run lacks its newest decision and nothing else.
    """

    def __init__(self, folder: Path | str) -> None:
        self._rows = JsonLines(Path(folder) / "guard.jsonl")
        self._action: Action = self._last_action()

    def add(self, decision: Decision) -> bool:
        """Log the decision if it is noteworthy, durably; returns whether it was."""
        kept = not decision.action == self._action == "ok"
        if kept:
            self._rows.append(decision.row())
        self._action = decision.action
        return kept

    def read(self) -> list[Decision]:
        """Every logged decision, oldest first. Raises ``MantissaError`` for rows that are none."""
        try:
            rows = self._rows.read()
        except OSError as error:
            raise MantissaError(f"cannot read {self._rows.path}: {error.strerror or error}") from None
        try:
            return [Decision.from_row(row) for row in rows]
        except MantissaError as error:
            raise MantissaError(f"{self._rows.path}: {error}") from None

    def truncate(self, step: int) -> None:
        """Forget the decisions after ``step``: what a resume from the checkpoint of that step begins with."""
        if self._rows.path.exists():
            self._rows.truncate(step)
        self._action = self._last_action()

    def _last_action(self) -> Action:
        decisions = self.read()  # the newest row tells: whatever came after it was ok, and before that too
        return decisions[-1].action if decisions else "ok"


def open_guard(folder: Path | str, config: GuardConfig) -> tuple[Guard, GuardLog]:
    """A run's guard and its log: of a new run, which gets its ``guard.json``, or of one that is resumed.

    Raises ``MantissaError`` where the run was guarded with other settings, or with a reference that is no longer so.
    """
    settings = GuardSettings.read(folder)
    if settings is None:
        guard = Guard(config)
        GuardSettings.of(guard).write(folder)
    else:
        was, now = settings.config.model_dump(), config.model_dump()
        changed = [f"{name}={was[name]!r}, now {now[name]!r}" for name in now if was[name] != now[name]]
        if changed:
            raise MantissaError(
                f"{folder} was guarded with {'; '.join(changed)}: go on with the settings it has, or start another run"
            )
        guard = Guard(config, settings.read_reference())
    return guard, GuardLog(folder)


class Judge:
    """A run's guard and its log, asked after every row. Rank 0 judges, and every rank learns what it decided.

    ``guard``: rank 0's; None elsewhere. ``reasons``: of the last decision. ``say`` hears what has changed.
    Raises ``MantissaError`` as ``open_guard``.
    """

    def __init__(
        self, folder: Path | str, config: GuardConfig, say: Callable[[str], None], ranks: Ranks = ALONE
    ) -> None:
        self.guard: Guard | None = None
        self.reasons: tuple[str, ...] = ()
        self._say = say
        self._ranks = ranks
        self._told: tuple[Any, ...] = ("ok", ())  # action and rules of the decision before
        if ranks.rank0:
            self.guard, self._log = open_guard(folder, config)

    @property
    def good(self) -> bool:
        """Whether a checkpoint written now may be called the last good one. Collective, as all here."""
        return self._ranks.max_of(float(self.guard is not None and self.guard.good)) > 0

    def judge(self, row: Mapping[str, Any]) -> bool:
        """Whether to fall back after this row, which is on disk already; the decision is logged when this returns.

        ``MantissaError``: the guard stops the run.
        """
        decision = None if self.guard is None else self._decide(self.guard, row)
        self.reasons = decision.reasons if decision else ("rank 0 says why",)
        action = self._ranks.max_of(float(severity(decision.action)) if decision else 0.0)
        if action == severity("stop"):
            raise MantissaError(f"the guard stops the run at step {row['step']}: {'; '.join(self.reasons)}")
        return action == severity("fall back")

    def _decide(self, guard: Guard, row: Mapping[str, Any]) -> Decision:
        decision = guard.observe(row)
        self._log.add(decision)
        told = (decision.action, decision.rules)
        if told != self._told:  # a standing warning is logged every step, and told once
            why = f": {'; '.join(decision.reasons)}" if decision.reasons else " again"
            self._say(f"guard: step {decision.step}: {decision.action}{why}")
        self._told = ("ok", ()) if decision.action == "fall back" else told
        return decision

    def rewind(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Be as after ``step``, whose rows these are: decisions are a function of them, those after it forgotten."""
        if self.guard is not None:
            self._log.truncate(step)
            self.guard = Guard(self.guard.config, self.guard.reference)
            for row in rows:
                self.guard.observe(row)


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
    known = {name for rule in guard.rules for name in rule.needs}
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
    logged = Counter(name for row in rows for name, value in row.items() if value is not None)
    shown = [rule for rule in guard.rules if not rule.optional or any(logged[name] for name in rule.needs)]
    for rule in shown:
        bounds = rule.note + ", ".join(f"{action} {bound}" for action, bound in rule.bounds(guard.config).items())
        yield f"{rule.name} {rule.of}".rstrip(), _seen(rule, logged, decisions, guard), bounds
    unseen = len(guard.config.gates) - sum(bool(rule.of) for rule in shown)
    if unseen:
        yield f"{unseen} more gates", "no data: no row has their metrics", ""
    elif not guard.config.gates:
        yield "gate", "none is set", ""


def _seen(rule: Rule, logged: Counter[str], decisions: Sequence[Decision], guard: Guard) -> str:
    """The worst value of a rule's figure with its step, or what was missing."""
    metric = next((name for name in rule.needs if logged[name]), "")
    if not rule.levels(guard.config):
        return "off"
    if rule.compared and guard.reference is None:
        return "no data: no reference"
    if rule.compared and not getattr(guard.reference, rule.compared):
        return f"no data: no {rule.needs[0]} there"
    if not metric:
        return f"no data: no row has {rule.needs[0]}"
    seen = [decision for decision in decisions if rule.figure in decision.numbers]
    if not seen:
        return f"too few steps: {logged[metric]} with {metric}, {guard.config.enough} are needed"
    worst = max(seen, key=lambda each: rule.height(each.numbers) if rule.height else each.numbers[rule.figure])
    value = worst.numbers[rule.figure]
    return f"{rule.show.format(value, **worst.numbers)} at step {worst.step}" if value or not rule.zero else rule.zero


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
