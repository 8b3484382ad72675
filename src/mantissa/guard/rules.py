"""The guard: a plan for leaving low precision, as code. It reads what a run logs and says when to go back.

A run in fp16 can fail in ways that its own loop does not see: it overflows so often that little is learned, its loss
drifts from that of the same run in fp32, it is slower than fp32 would be. What is tolerable is decided before the run,
as thresholds; the guard holds each step's row against them:

    rule        over the window                                            says
    nonfinite   losses that are not finite, in a row                       warn (the first), fall back
    overflow    steps that overflowed / steps                              warn, alert, fall back
    loss        mean loss above the reference's, over the same steps       warn, fall back
    divergence  mean loss above the best mean so far (off by default)      fall back
    accuracy    mean accuracy below the reference's, or the best mean      warn, fall back
    reward      mean reward below it, as a share of the rewards' range     warn, fall back
    speed       reference's median time of a step / this run's             warn
    gate        steps with a metric outside its healthy range / steps      warn, alert

The most severe action wins and every reason is kept. *Fall back* means: load the last good checkpoint and go on in a
wider format. The guard does none of that itself; it decides, and then forgets its window, since the steps in it led to
a state that is gone. Where no fall back is left, or the format is as wide already, the same trouble is *stop*.

A run of RL has no loss on a common scale from batch to batch, so of its ``policy/loss`` only ``nonfinite`` is judged;
accuracy and reward are its measure, as the rows of a trainer know neither.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from mantissa.base.bounds import outside
from mantissa.base.errors import MantissaError
from mantissa.base.files import Row
from mantissa.guard.config import DROPS, GuardConfig, ReferenceRun, figure, finite_loss, mean

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


@dataclass(frozen=True)
class Finding:
    """What a rule says, and why."""

    action: Action
    rule: str
    why: str


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
        Trouble: a loss that is not finite, one above the reference's by ``loss_warn``, accuracy or reward lower by what
        warns, an alert, or worse.
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
        findings = [finding for rule in RULES for finding in rule.measure(self, rule, numbers)]
        numbers["fall_backs"] = self.fall_backs
        decision = self._decide(step, row.get("precision/format"), findings, numbers)
        self._remember(decision)
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
        findings = sorted(findings, key=lambda finding: -severity(finding.action))  # stable: rules keep their order
        action: Action = findings[0].action if findings else "ok"
        reasons = tuple(f"{finding.rule}: {finding.why}" for finding in findings)
        if action == "fall back":
            used, to = self.config.max_fall_backs, self.config.to
            if isinstance(fmt, str) and set(fmt.split("/")) <= set(_AS_WIDE[to]):  # of learner and rollout, where two
                action, why = "stop", f"the format is {fmt}, and {to} is no wider"
            elif self.fall_backs >= used:
                action, why = "stop", f"{self.fall_backs} of {used} fall backs are used up"
            else:
                why = f"to {to}, from the last good checkpoint"
            reasons = (*reasons, f"{action}: {why}")
        return Decision(step, action, reasons, numbers, tuple(finding.rule for finding in findings))

    def _remember(self, decision: Decision) -> None:
        trouble = self._nonfinite > 0 or severity(decision.action) >= severity("alert")
        trouble = trouble or not {"loss", *DROPS}.isdisjoint(decision.rules)
        if trouble:
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


# The rules: each adds its figures to a decision's ``numbers`` and returns what it found.

Measure = Callable[["Guard", "Rule", dict[str, float]], list[Finding]]


@dataclass(frozen=True)
class Rule:
    """A line of the table of rules.

    ``figure``: what it goes by, among a decision's numbers, ``show``: in words; ``needs``: the metric that is made of;
    ``worst``: of several figures, the one nearest to the threshold. ``actions``: those with a share as their threshold,
    ``<name>_<action>`` of the settings. ``fires``: where, in words, of the other rules.
    """

    name: str
    measure: Measure
    figure: str
    needs: str
    show: str
    actions: tuple[Action, ...] = ()
    fires: Callable[[GuardConfig], str] | None = None
    worst: Callable[..., Any] = max

    def bounds(self, config: GuardConfig) -> list[tuple[Action, float]]:
        """The share beyond which each action is said, the mildest first."""
        return [(action, getattr(config, f"{self.name}_{action.replace(' ', '_')}")) for action in self.actions]

    def thresholds(self, config: GuardConfig) -> str:
        """Where it fires, in words."""
        if self.fires is not None:
            return self.fires(config)
        shares = ", ".join(f"{100 * bound:g}%" for _, bound in self.bounds(config))
        return f"{', '.join(self.actions)} above {shares}"

    def highest(self, config: GuardConfig, share: float, said: str) -> list[Finding]:
        """The most severe action beyond whose threshold the share lies, with that threshold in the reason."""
        reached = [(action, bound) for action, bound in self.bounds(config) if share > bound]
        return [
            Finding(action, self.name, f"{said} ({action} above {100 * bound:g}%)") for action, bound in reached[-1:]
        ]


def _nonfinite(guard: Guard, rule: Rule, numbers: dict[str, float]) -> list[Finding]:
    count, bound = guard._nonfinite, guard.config.nonfinite_in_a_row
    numbers[rule.figure] = count
    if count == 0:
        return []
    plural = "loss is" if count == 1 else "losses are"
    why = f"the last {count} {plural} not finite ({rule.thresholds(guard.config)})"
    return [Finding("fall back" if count >= bound else "warn", rule.name, why)]


def _overflow(guard: Guard, rule: Rule, numbers: dict[str, float]) -> list[Finding]:
    found = guard._share("overflowed")
    if found is None:
        return []
    rate, steps = found
    numbers[rule.figure] = rate
    return rule.highest(guard.config, rate, f"{rate:.1%} of {steps} steps overflowed")


def _against_reference(guard: Guard, rule: Rule, numbers: dict[str, float]) -> list[Finding]:
    found, config = guard._means("loss"), guard.config
    if found is None or guard.reference is None:
        return []
    ours, theirs, steps = found
    unit = max(abs(theirs), config.loss_floor * guard.reference.first_magnitude(config.enough))
    excess = _excess(ours, theirs, unit)
    numbers |= {"compared_loss_mean": ours, "reference_loss_mean": theirs, rule.figure: excess}
    return rule.highest(
        config, excess, f"{ours:.4g} over {steps} steps, {excess:.1%} above the reference's {theirs:.4g}"
    )


def _divergence(guard: Guard, rule: Rule, numbers: dict[str, float]) -> list[Finding]:
    losses, config = guard._values("loss"), guard.config
    if not losses:
        return []
    now = numbers["loss_mean"] = mean(losses)
    if config.divergence is None:
        return []
    if guard._magnitude is None:
        guard._magnitude = mean([abs(loss) for loss in losses])
    best = guard._best = now if guard._best is None else min(now, guard._best)
    numbers[rule.figure] = best
    excess = _excess(now, best, max(abs(best), config.loss_floor * guard._magnitude))
    if excess <= config.divergence - 1:
        return []
    why = f"mean loss {now:.4g}, the best was {best:.4g} ({rule.thresholds(config)})"
    return [Finding("fall back", rule.name, why)]


def _drop(guard: Guard, rule: Rule, numbers: dict[str, float]) -> list[Finding]:
    known = guard._values(rule.name)
    if not known:
        return []
    now = numbers[f"{rule.name}_mean"] = mean(known)
    base = guard._tops[rule.name] = max(now, guard._tops.get(rule.name, now))
    steps, whose = len(known), "the best window's"
    compared = guard._means(rule.name)
    if compared:
        now, base, steps = compared
        whose = "the reference's"
    low, high = (0.0, 1.0) if rule.name == "accuracy" else guard._rewards or (0.0, 0.0)
    drop = numbers[rule.figure] = (base - now) / (high - low) if high > low else 0.0
    return rule.highest(guard.config, drop, f"{now:.4g} over {steps} steps, {drop:.1%} below {whose} {base:.4g}")


def _speed(guard: Guard, rule: Rule, numbers: dict[str, float]) -> list[Finding]:
    known, reference = guard._values("seconds"), guard.reference
    if not known or reference is None or reference.seconds is None:
        return []
    ours, theirs = statistics.median(known), reference.seconds
    speed = numbers[rule.figure] = theirs / ours
    if speed >= guard.config.slow_warn:
        return []
    name = f"the reference's ({reference.format})" if reference.format else "the reference's"
    bound = f"warn below {guard.config.slow_warn:g}"
    return [Finding("warn", rule.name, f"{speed:.2f} x {name}, {ours:.3g} s a step against {theirs:.3g} s ({bound})")]


def _gates(guard: Guard, rule: Rule, numbers: dict[str, float]) -> list[Finding]:
    found: list[Finding] = []
    for name, (low, high) in guard.config.gates.items():
        outside_of = guard._share(f"outside/{name}")
        if outside_of is None:
            continue
        share, steps = outside_of
        numbers[rule.figure.format(name)] = share
        if not share:
            continue
        ends = f"{'-inf' if low is None else f'{low:g}'} to {'inf' if high is None else f'{high:g}'}"
        found += rule.highest(guard.config, share, f"{name} outside {ends} on {share:.0%} of {steps} steps")
    return found


def _points(name: str) -> Callable[[GuardConfig], str]:
    def fires(config: GuardConfig) -> str:
        warn, back = (100 * getattr(config, f"{name}_{level}") for level in ("warn", "fall_back"))
        return f"warn, fall back for a fall of more than {warn:g}, {back:g} points"

    return fires


_FALLS: tuple[Action, ...] = ("warn", "fall back")
GATE = Rule("gate", _gates, "outside/{}", "{}", "outside on {:.0%}", ("warn", "alert"))  # of each metric with a gate
RULES = (
    Rule("nonfinite", _nonfinite, "nonfinite_in_a_row", "train/loss", "{:.0f} in a row",
         fires=lambda config: f"fall back at {config.nonfinite_in_a_row} in a row"),
    Rule("overflow", _overflow, "overflowed_rate", "precision/overflows", "{:.1%} of steps",
         ("warn", "alert", "fall back")),
    Rule("loss", _against_reference, "loss_excess", "train/loss", "{:+.1%}", _FALLS),
    Rule("divergence", _divergence, "best_loss_mean", "train/loss", "{:.4g}",
         fires=lambda config: f"fall back above {config.divergence:g} times" if config.divergence else ""),
    *(Rule(name, _drop, f"{name}_drop", metric, "{:+.1%}", _FALLS, _points(name)) for name, metric in DROPS.items()),
    Rule("speed", _speed, "speed", "time/step", "{:.2f} x", fires=lambda config: f"warn below {config.slow_warn:g} x",
         worst=min),
    GATE,
)  # fmt: skip


def _excess(value: float, base: float, unit: float) -> float:
    """How far ``value`` lies above ``base``, in units that may be 0 (a base of 0 with no floor): then 0 or infinite."""
    above = value - base
    if unit > 0:
        return above / unit
    return math.copysign(math.inf, above) if above else 0.0
