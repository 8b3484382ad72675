"""The guard: a plan for leaving low precision, as code. It reads what a run logs and says when to go back.

A run in fp16 can fail in ways that its own loop does not see: it overflows so often that little is learned, its loss
drifts from that of the same run in fp32, it is slower than fp32 would be. What is tolerable is decided before the run,
as thresholds; the guard holds each step's row against them, by the table ``RULES``.

The most severe action wins and every reason is kept. *Fall back* means: load the last good checkpoint and go on in a
wider format. The guard does none of that itself; it decides, and then forgets its window, since the steps in it led to
a state that is gone. Where no fall back is left, or the format is as wide already, the same trouble is *stop*.

A run of RL has no loss on a common scale from batch to batch, so of its ``policy/loss`` only ``nonfinite`` is judged;
accuracy and reward are its measure, as the rows of a trainer know neither.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from mantissa.base.bounds import outside
from mantissa.base.errors import MantissaError
from mantissa.base.files import Row
from mantissa.guard.config import DROPS, GuardConfig, ReferenceRun, figure, finite_loss, mean
from mantissa.mismatch.tables import Metric

Action = Literal["ok", "warn", "alert", "fall back", "stop"]
ACTIONS: tuple[Action, ...] = get_args(Action)  # in the order of severity
_AS_WIDE = {"bf16": ("bf16", "fp32"), "fp32": ("fp32",)}  # formats from which falling back to the key gains nothing


@dataclass(frozen=True)
class Decision:
    """What the guard says after a step.

    ``reasons``: one line for each rule that fired, the most severe first, beginning with the rule's name and a colon;
    for "fall back" and "stop" one more line that says where to, or why not. ``rules``: the names of those that fired,
    in the same order; of a guard's own decision, not of one that was read.
    ``numbers``: every figure there was enough data for, whether its rule fired or not: ``steps`` (in the window),
    ``overflowed_rate``, ``loss_mean``, ``nonfinite_in_a_row``, ``fall_backs`` (before this step) and, where measured,
    ``best_loss_mean``, ``compared_loss_mean``, ``reference_loss_mean``, ``loss_excess``, ``accuracy_mean``,
    ``accuracy_drop``, ``reward_mean``, ``reward_drop``, ``speed``, ``outside/<gate>``.
    """

    step: int
    action: Action
    reasons: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    rules: tuple[str, ...] = field(default=(), compare=False)

    def row(self) -> Row:
        """The decision as one flat row of JSON; ``from_row`` reads it."""
        return {"step": self.step, "action": self.action, "reasons": "\n".join(self.reasons), **self.numbers}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Decision:
        """The inverse of ``row``. Raises ``MantissaError`` for a row that is no decision."""
        numbers = {name: value for name, value in row.items() if name not in ("step", "action", "reasons")}
        good = row.get("action") in ACTIONS and isinstance(row.get("reasons"), str)
        if not good or not all(isinstance(value, int | float) for value in numbers.values()):
            raise MantissaError(f"step {row.get('step')}: expected a decision of the guard, got {dict(row)!r:.80}")
        return cls(row["step"], row["action"], tuple(row["reasons"].split("\n")) if row["reasons"] else (), numbers)


def severity(action: Action) -> int:
    """0 for ok up to 4 for stop."""
    return ACTIONS.index(action)


@dataclass(frozen=True)
class _Seen:
    """What is kept of one row, by name: ``loss``, ``overflowed`` and ``outside/<gate>`` (0 or 1), ``seconds``, and the
    names of ``DROPS``; finite numbers only. ``theirs``: what the reference had, where training was as far."""

    ours: dict[str, float]
    theirs: dict[str, float]


Finding = tuple[Action, "Rule", str]  # what a rule says, and why


class Guard:
    """Watches one run. ``observe`` each row once, in order; no row is kept longer than the window.

    ``reference``: read from ``config.reference`` where not given, which raises ``MantissaError`` when it is no run.

    Decisions are a pure function of the rows (and of the reference, read once): no clock, no random numbers, sums that
    are rounded once. So they can be reproduced from ``metrics.jsonl``, and a guard can be rebuilt by replaying it. Two
    things follow for whoever writes the rows. Steps must go on counting over a fall back, and its rows stay in the
    file. And the guard is never restored from the checkpoint that a fall back loads: it would forget that it fell
    back.

    What the guard cannot see: a window is evidence of the past, and trouble may be some steps older than its decision.
    So ``good`` asks for more than the absence of an alert.
    """

    def __init__(self, config: GuardConfig | None = None, reference: ReferenceRun | None = None) -> None:
        self.config = config or GuardConfig()
        if reference is None and self.config.reference is not None:
            reference = ReferenceRun.read(self.config.reference)
        self.reference = reference
        self.rules = (*RULES, *(_gate(*each) for each in self.config.gates.items()))
        self.fall_backs = 0
        self._last_step: int | None = None
        self._quiet: int | None = None  # steps since the last trouble; None: there was none yet
        self._updates: float | None = None  # the row before's optim/updates
        self._rewards: tuple[float, float] | None = None  # the smallest and the largest seen
        self._lost = 0  # updates undone by going back to a checkpoint: step n continues what was step n - lost
        self._forget()

    def _forget(self) -> None:
        self._window: deque[_Seen] = deque()
        self._counts: Counter[str] = Counter()  # of the window: how many values each name of ``_Seen`` has
        self._raised: Counter[str] = Counter()  # and how many of them are 1, of those that are 0 or 1
        self._nonfinite = 0
        self._best: float | None = None
        self._tops: dict[str, float] = {}  # best window mean by name of DROPS
        self._magnitude: float | None = None  # mean |loss| of the first losses: what the floor is a share of

    @property
    def good(self) -> bool:
        """Whether a checkpoint written now may be called the last good one.

        True before the first step and until trouble is seen; after trouble, when ``good_after`` steps were free of it.
        Trouble: an alert or worse, and a warning of the rules that are marked so.
        """
        return self._quiet is None or self._quiet >= self.config.good_after

    def observe(self, row: Mapping[str, Any]) -> Decision:
        """Decide after one more row. Raises ``MantissaError`` for a row that is none, or out of order."""
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            raise MantissaError(f"guard: expected a row with a whole number as its step, got {step!r}")
        if self._last_step is not None and step <= self._last_step:
            raise MantissaError(f"guard: expected a step after {self._last_step}, got {step}; give rows in their order")
        seen = self._look(step, row)
        self._last_step = step
        self._window.append(seen)
        self._count(seen, 1)
        if len(self._window) > self.config.window:
            self._count(self._window.popleft(), -1)
        numbers: dict[str, float] = {"steps": len(self._window)}
        findings = [found for rule in self.rules if (found := rule.finding(self, numbers)) is not None]
        numbers["fall_backs"] = self.fall_backs
        decision = self._decide(step, row.get("precision/format"), findings, numbers)
        self._remember(decision, any(rule.spoils for _, rule, _ in findings))
        return decision

    def _look(self, step: int, row: Mapping[str, Any]) -> _Seen:
        """Take from the row what the rules need, and keep count of what is not a matter of windows."""
        loss, seconds = figure(row, "train/loss"), figure(row, "time/step")
        overflows, updates = figure(row, "precision/overflows"), figure(row, "optim/updates")
        found = {name: figure(row, metric) for name, metric in DROPS.items()}
        found["loss"] = loss if loss is not None and finite_loss(loss) else None
        found["seconds"] = seconds if seconds is not None and seconds > 0 else None
        found["overflowed"] = None if overflows is None else float(overflows > 0)
        for name, healthy in self.config.gates.items():
            value = figure(row, name)
            found[f"outside/{name}"] = None if value is None else float(outside(value, *healthy) > 0)
        if updates is not None and math.isfinite(updates):
            began_at = updates - (0 if figure(row, "precision/skipped") else 1)
            if self._updates is not None and updates < self._updates:
                self._lost += round(self._updates - began_at)
            self._updates = updates
        judged = figure(row, "policy/loss") if loss is None else loss
        if judged is not None:
            self._nonfinite = 0 if finite_loss(judged) else self._nonfinite + 1
        ends = [figure(row, "reward/min"), figure(row, "reward/max"), *(self._rewards or ())]
        known = [end for end in ends if end is not None and math.isfinite(end)]
        self._rewards = (min(known), max(known)) if known else None
        ours = {name: value for name, value in found.items() if value is not None and math.isfinite(value)}
        theirs = {} if self.reference is None else {"loss": self.reference.loss, **self.reference.drops}
        at = step - self._lost
        return _Seen(ours, {name: known[at] for name, known in theirs.items() if name in ours and at in known})

    def _decide(self, step: int, fmt: object, findings: list[Finding], numbers: dict[str, float]) -> Decision:
        findings = sorted(findings, key=lambda finding: -severity(finding[0]))  # stable: rules keep their order
        action: Action = findings[0][0] if findings else "ok"
        reasons = tuple(f"{rule.name}: {why}" for _, rule, why in findings)
        if action == "fall back":
            used, to = self.config.max_fall_backs, self.config.to
            if isinstance(fmt, str) and set(fmt.split("/")) <= set(_AS_WIDE[to]):  # of learner and rollout, where two
                action, why = "stop", f"the format is {fmt}, and {to} is no wider"
            elif self.fall_backs >= used:
                action, why = "stop", f"{self.fall_backs} of {used} fall backs are used up"
            else:
                why = f"to {to}, from the last good checkpoint"
            reasons = (*reasons, f"{action}: {why}")
        return Decision(step, action, reasons, numbers, tuple(rule.name for _, rule, _ in findings))

    def _remember(self, decision: Decision, spoilt: bool) -> None:
        if spoilt or severity(decision.action) >= severity("alert"):
            self._quiet = 0
        elif self._quiet is not None:
            self._quiet += 1
        if decision.action == "fall back":
            self.fall_backs += 1
            self._forget()

    # for the rules below

    def _count(self, seen: _Seen, by: int) -> None:
        for name, value in seen.ours.items():
            self._counts[name] += by
            if value == 1.0:
                self._raised[name] += by

    def _values(self, name: str) -> list[float]:
        """The window's values; none at all where they are too few to be judged."""
        if self._counts[name] < self.config.enough:
            return []
        return [seen.ours[name] for seen in self._window if name in seen.ours]

    def _share(self, name: str) -> tuple[float, int] | None:
        """The share of the window's values that are 1, of those that are 0 or 1, and their number; None: too few."""
        known = self._counts[name]
        return (self._raised[name] / known, known) if known and known >= self.config.enough else None

    def _means(self, name: str) -> tuple[float, float, int] | None:
        """The window's mean, the reference's over the same steps, and their number; None where they are too few."""
        pairs = [(seen.ours[name], seen.theirs[name]) for seen in self._window if name in seen.theirs]
        if len(pairs) < self.config.enough:
            return None
        return mean([ours for ours, _ in pairs]), mean([theirs for _, theirs in pairs]), len(pairs)


def replay(
    rows: Iterable[Mapping[str, Any]], config: GuardConfig, reference: ReferenceRun | None = None
) -> list[Decision]:
    """The decision after each of ``rows``: what a guard that watched the run has said."""
    guard = Guard(config, reference)
    return [guard.observe(row) for row in rows]


def noteworthy(decisions: Sequence[Decision]) -> list[Decision]:
    """Those that are logged: not ok, or the first that is ok again."""
    before = ["ok", *(decision.action for decision in decisions)]
    return [each for each, was in zip(decisions, before, strict=False) if not each.action == was == "ok"]


# The rules: each writes its figures among a decision's ``numbers`` and says what is held against its bounds.

Level = tuple[Action, float]


def _shares(rule: str, *actions: Action) -> Callable[[GuardConfig], list[Level]]:
    """The bounds of a rule with a setting ``<rule>_<action>`` for each of its actions."""
    return lambda config: [(each, getattr(config, f"{rule}_{each.replace(' ', '_')}")) for each in actions]


@dataclass(frozen=True)
class Rule:
    """A line of the table of rules, which a run's guard, a replay of its files and the documentation read alike.

    ``what`` it watches; ``needs``: the metrics it can go by, of which a run has one; ``measure``: what is held against
    the bounds, and that in words, or None where there is too little. ``levels``: action and bound, the mildest first;
    none where it is off. ``at``: a bound in words; ``beyond``: whether a value passes one; ``names_last``: a reason
    names the last bound, not the one passed. ``spoils``: its warning is trouble already.

    For a table of what a run's rules saw: ``figure``, its number in a decision; ``show``, the numbers in words, and
    ``zero``, a figure of 0; ``height``: the highest is the worst; ``compared``: what a reference must have;
    ``optional``: no line for a run that has none of its metrics; ``of``: what one of several rules of a name is about,
    ``note``, and a word on that.
    """

    name: str
    what: str
    needs: tuple[str, ...]
    measure: Callable[[Guard, Rule, dict[str, float]], tuple[float, str] | None]
    levels: Callable[[GuardConfig], list[Level]]
    figure: str
    show: str = "{:+.1%}"
    at: str = "above {percent:g}%"
    beyond: Callable[[float, float], bool] = operator.gt
    names_last: bool = False
    spoils: bool = False
    zero: str = ""
    height: Callable[[Mapping[str, float]], float] | None = None
    compared: str = ""
    optional: bool = False
    of: str = ""
    note: str = ""

    def bounds(self, config: GuardConfig) -> dict[Action, str]:
        """Each action with its bound in words."""
        return {each: self.at.format(bound, percent=100 * bound, more=1 + bound) for each, bound in self.levels(config)}

    def finding(self, guard: Guard, numbers: dict[str, float]) -> Finding | None:
        """The most severe action whose bound is passed, with that bound in the reason; None where none is."""
        measured = self.measure(guard, self, numbers)
        passed = [each for each, at in self.levels(guard.config) if measured and self.beyond(measured[0], at)]
        if measured is None or not passed:
            return None
        bounds = self.bounds(guard.config)
        named = [*bounds][-1] if self.names_last else passed[-1]
        return passed[-1], self, f"{measured[1]} ({named} {bounds[named]})"


def _nonfinite(guard: Guard, rule: Rule, numbers: dict[str, float]) -> tuple[float, str]:
    count = numbers[rule.figure] = guard._nonfinite
    return count, f"the last {count} {'loss is' if count == 1 else 'losses are'} not finite"


def _overflow(guard: Guard, rule: Rule, numbers: dict[str, float]) -> tuple[float, str] | None:
    found = guard._share("overflowed")
    if found is None:
        return None
    rate = numbers[rule.figure] = found[0]
    return rate, f"{rate:.1%} of {found[1]} steps overflowed"


def _against_reference(guard: Guard, rule: Rule, numbers: dict[str, float]) -> tuple[float, str] | None:
    found, config = guard._means("loss"), guard.config
    if found is None or guard.reference is None:
        return None
    ours, theirs, steps = found
    unit = max(abs(theirs), config.loss_floor * guard.reference.first_magnitude(config.enough))
    excess = _excess(ours, theirs, unit)
    numbers |= {"compared_loss_mean": ours, "reference_loss_mean": theirs, rule.figure: excess}
    return excess, f"{ours:.4g} over {steps} steps, {excess:.1%} above the reference's {theirs:.4g}"


def _divergence(guard: Guard, rule: Rule, numbers: dict[str, float]) -> tuple[float, str] | None:
    losses, config = guard._values("loss"), guard.config
    if not losses:
        return None
    now = numbers["loss_mean"] = mean(losses)
    if config.divergence is None:
        return None
    if guard._magnitude is None:
        guard._magnitude = mean([abs(loss) for loss in losses])
    best = guard._best = now if guard._best is None else min(now, guard._best)
    numbers[rule.figure] = best
    excess = _excess(now, best, max(abs(best), config.loss_floor * guard._magnitude))
    return excess, f"mean loss {now:.4g}, the best was {best:.4g}"


def _drop(guard: Guard, rule: Rule, numbers: dict[str, float], ends: tuple[float, float]) -> tuple[float, str] | None:
    known = guard._values(rule.name)
    if not known:
        return None
    now = numbers[f"{rule.name}_mean"] = mean(known)
    base = guard._tops[rule.name] = max(now, guard._tops.get(rule.name, now))
    steps, whose = len(known), "the best window's"
    compared = guard._means(rule.name)
    if compared:
        now, base, steps = compared
        whose = "the reference's"
    low, high = ends
    drop = numbers[rule.figure] = (base - now) / (high - low) if high > low else 0.0
    return drop, f"{now:.4g} over {steps} steps, {drop:.1%} below {whose} {base:.4g}"


def _speed(guard: Guard, rule: Rule, numbers: dict[str, float]) -> tuple[float, str] | None:
    known, reference = guard._values("seconds"), guard.reference
    if not known or reference is None or reference.seconds is None:
        return None
    ours, theirs = statistics.median(known), reference.seconds
    speed = numbers[rule.figure] = theirs / ours
    name = f"the reference's ({reference.format})" if reference.format else "the reference's"
    return speed, f"{speed:.2f} x {name}, {ours:.3g} s a step against {theirs:.3g} s"


def _gate(metric: str, ends: tuple[float | None, float | None]) -> Rule:
    """The rule of one metric with a healthy range."""
    low, high = ("" if end is None else f"{end:g}" for end in ends)
    said = f"{metric} outside {low or '-inf'} to {high or 'inf'}"

    def measure(guard: Guard, rule: Rule, numbers: dict[str, float]) -> tuple[float, str] | None:
        found = guard._share(rule.figure)
        if found is None:
            return None
        share = numbers[rule.figure] = found[0]
        return share, f"{said} on {share:.0%} of {found[1]} steps"

    healthy = f"healthy {Metric(metric, '', '', ends).healthy_text}; "
    return replace(GATE, needs=(metric,), measure=measure, figure=f"outside/{metric}", of=metric, note=healthy)


RULES = (
    Rule("nonfinite", "losses that are not finite, in a row", ("train/loss", "policy/loss"), _nonfinite,
         lambda config: [("warn", 1), ("fall back", config.nonfinite_in_a_row)], "nonfinite_in_a_row",
         "{:.0f} in a row", "at {:g} in a row", operator.ge, names_last=True, spoils=True, zero="all are finite"),
    Rule("overflow", "steps that overflowed / steps", ("precision/overflows",), _overflow,
         _shares("overflow", "warn", "alert", "fall back"), "overflowed_rate", "{:.1%} of steps"),
    Rule("loss", "mean loss above the reference's, over the same steps", ("train/loss",), _against_reference,
         _shares("loss", "warn", "fall back"), "loss_excess", spoils=True, compared="loss"),
    Rule("divergence", "mean loss over the best window's so far", ("train/loss",), _divergence,
         lambda config: [("fall back", config.divergence - 1)] if config.divergence else [], "best_loss_mean",
         "{loss_mean:.4g} (best {best_loss_mean:.4g})", "above {more:g} times",
         height=lambda numbers: numbers["loss_mean"] - numbers["best_loss_mean"]),
    Rule("accuracy", "mean accuracy below the reference's, or the best window's", (DROPS["accuracy"],),
         lambda guard, rule, numbers: _drop(guard, rule, numbers, (0.0, 1.0)),
         _shares("accuracy", "warn", "fall back"), "accuracy_drop", spoils=True, optional=True),
    Rule("reward", "mean reward below it, of the range of rewards", (DROPS["reward"],),
         lambda guard, rule, numbers: _drop(guard, rule, numbers, guard._rewards or (0.0, 0.0)),
         _shares("reward", "warn", "fall back"), "reward_drop", spoils=True, optional=True),
    Rule("speed", "reference's median step time / this run's", ("time/step",), _speed,
         lambda config: [("warn", config.slow_warn)], "speed", "{:.2f} x", "below {:g}", operator.lt,
         height=lambda numbers: -numbers["speed"], compared="seconds"),
)  # fmt: skip
# Of each metric with a gate, whose ``needs`` and ``measure`` are its own.
GATE = Rule("gate", "steps with a metric outside its range / steps", (), lambda *_: None,
            _shares("gate", "warn", "alert"), "", "outside on {:.0%}", optional=True)  # fmt: skip


def _excess(value: float, base: float, unit: float) -> float:
    """How far ``value`` lies above ``base``, in units that may be 0 (a base of 0 with no floor): then 0 or infinite."""
    above = value - base
    if unit > 0:
        return above / unit
    return math.copysign(math.inf, above) if above else 0.0
