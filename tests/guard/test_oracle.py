"""The guard against its rules in their slowest form, in exact fractions; and each decision as a row and back."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mantissa.base.files import decode, encode
from mantissa.guard import ACTIONS, Decision, Guard, GuardConfig, ReferenceRun

Rows = list[dict[str, Any]]

LOSSES = st.sampled_from([None, math.nan, math.inf, 0.0, 0.25, 0.5, 0.5, 1.0, 1.0, 1.0, 1.125, 1.5, 3.0, -1.0])
ROW = st.fixed_dictionaries(
    {
        "train/loss": LOSSES,
        "precision/overflows": st.sampled_from([None, 0, 0, 0, 1, 4]),
        "time/step": st.sampled_from([None, 1.0, 1.0, 1.5, 8.0]),
        "gap/kl": st.sampled_from([None, 0.0, 0.0, 0.0, 2.0, math.nan]),
        "policy/loss": st.sampled_from([None, None, 0.5, math.nan]),
        "reward/accuracy": st.sampled_from([None, 0.25, 0.5, 0.5, 0.5, 0.53, math.nan]),
        "reward/mean": st.sampled_from([None, 0.0, 1.0, 1.0, 1.0, 1.0625, math.inf]),
        "reward/min": st.sampled_from([None, 0.0, 0.0, -2.0]),
        "reward/max": st.sampled_from([None, 1.0, 2.0, math.nan]),
        "precision/format": st.sampled_from([None, "fp16", "fp16", "bf16/fp16", "bf16", "fp32/bf16"]),
    }
)
CONFIG = st.builds(
    GuardConfig,
    window=st.integers(1, 7),
    min_steps=st.integers(1, 7),
    overflow_warn=st.just(0.2),
    overflow_alert=st.sampled_from([0.25, 0.5]),
    overflow_fall_back=st.sampled_from([0.6, 1.0]),
    accuracy_fall_back=st.sampled_from([0.05, 0.3, 1.0]),
    reward_warn=st.sampled_from([0.0, 0.02]),
    reward_fall_back=st.sampled_from([0.1, 1.0]),
    nonfinite_in_a_row=st.integers(1, 4),
    divergence=st.sampled_from([None, 1.3, 2.1]),
    gates=st.just({"gap/kl": (None, 1.0)}),
    max_fall_backs=st.integers(0, 2),
    good_after=st.integers(0, 4),
)
REFERENCE = st.one_of(st.none(), st.lists(ROW, min_size=1, max_size=20))


def numbered(rows: Rows) -> Rows:
    return [{"step": i + 1} | {k: v for k, v in row.items() if v is not None} for i, row in enumerate(rows)]


def exact(value: float) -> Fraction:
    """A threshold as it is written: 0.2 is a fifth."""
    return Fraction(str(value))


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def median(values: list[float]) -> Fraction:
    ordered = [Fraction(v) for v in sorted(values)]
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def slow_loss_actions(recent: Rows, past: list[Rows], config: GuardConfig, reference: Rows) -> list[str]:
    """The two rules for the mean loss. ``past``: every window since the last fall back, this one last."""
    enough, found = min(config.min_steps, config.window), []
    theirs = {row["step"]: row["train/loss"] for row in reference if finite(row.get("train/loss"))}
    pairs = [
        (Fraction(row["train/loss"]), Fraction(theirs[row["step"]]))
        for row in recent
        if finite(row.get("train/loss")) and row["step"] in theirs
    ]
    if len(pairs) >= enough:
        ours, base = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        first = [abs(Fraction(loss)) for _, loss in sorted(theirs.items())[:enough]]
        unit = max(abs(base), exact(config.loss_floor) * sum(first) / len(first))
        excess = (ours - base) / unit if unit else (ours > base) - (ours < base)
        for action, bound in (("warn", config.loss_warn), ("fall back", config.loss_fall_back)):
            assume(abs(excess - exact(bound)) > 1e-9)  # on the threshold itself, rounding may decide
            found += [action] if excess > exact(bound) else []
    known = [[Fraction(r["train/loss"]) for r in window if finite(r.get("train/loss"))] for window in past]
    if config.divergence is not None and len(known[-1]) >= enough:
        judged = [losses for losses in known if len(losses) >= enough]
        means = [sum(losses) / len(losses) for losses in judged]
        floor = exact(config.loss_floor) * sum(map(abs, judged[0])) / len(judged[0])
        unit, rise = max(abs(min(means)), floor), means[-1] - min(means)
        excess = rise / unit if unit else Fraction(rise > 0) * 10**9
        assume(abs(excess - (exact(config.divergence) - 1)) > 1e-9)
        found += ["fall back"] if excess > exact(config.divergence) - 1 else []
    return found


def slow_drop_actions(past: list[Rows], seen: Rows, config: GuardConfig, reference: Rows) -> list[str]:
    """The rules for accuracy and reward. ``past``: as above; ``seen``: every row of the run so far."""
    enough, found = min(config.min_steps, config.window), []
    ends = [row[key] for row in seen for key in ("reward/min", "reward/max") if finite(row.get(key))]
    for name, key, span in (
        ("accuracy", "reward/accuracy", Fraction(1)),
        ("reward", "reward/mean", Fraction(max(ends, default=0.0)) - Fraction(min(ends, default=0.0))),
    ):
        theirs = {row["step"]: Fraction(row[key]) for row in reference if finite(row.get(key))}
        known = [[Fraction(row[key]) for row in window if finite(row.get(key))] for window in past]
        if len(known[-1]) < enough:
            continue
        means = [sum(values) / len(values) for values in known if len(values) >= enough]
        now, base = means[-1], max(means)
        both = [row for row in past[-1] if finite(row.get(key)) and row["step"] in theirs]
        if len(both) >= enough:
            now = sum(Fraction(row[key]) for row in both) / len(both)
            base = sum(theirs[row["step"]] for row in both) / len(both)
        drop = (base - now) / span if span else Fraction(0)
        for action in ("warn", "fall back"):
            bound = exact(getattr(config, f"{name}_{action.replace(' ', '_')}"))
            assume(drop == bound == 0 or abs(drop - bound) > 1e-9)
            found += [action] if drop > bound else []
    return found


def slow_actions(recent: Rows, config: GuardConfig, reference: Rows) -> list[str]:
    """The rules for overflow, gates and speed."""
    enough, found = min(config.min_steps, config.window), []
    overflowed = [row["precision/overflows"] > 0 for row in recent if "precision/overflows" in row]
    outside = [not row["gap/kl"] <= 1.0 for row in recent if "gap/kl" in row]
    overflow = (
        ("warn", config.overflow_warn),
        ("alert", config.overflow_alert),
        ("fall back", config.overflow_fall_back),
    )
    for events, levels in (
        (overflowed, overflow),
        (outside, (("warn", config.gate_warn), ("alert", config.gate_alert))),
    ):
        if len(events) >= enough:
            found += [action for action, bound in levels if Fraction(sum(events), len(events)) > exact(bound)]
    times, theirs = ([row["time/step"] for row in rows if "time/step" in row] for rows in (recent, reference))
    if len(times) >= enough and theirs:
        found += ["warn"] if median(theirs) / median(times) < exact(config.slow_warn) else []
    return found


def slow_guard(rows: Rows, config: GuardConfig, reference: Rows) -> list[tuple[str, bool]]:
    """(action, good) after each row, every time from the rows themselves."""
    decided: list[tuple[str, bool]] = []
    begin, fall_backs, trouble = 0, 0, None
    for now, row in enumerate(rows):
        windows = [rows[max(begin, end - config.window + 1) : end + 1] for end in range(begin, now + 1)]
        losses = [r.get("train/loss", r.get("policy/loss")) for r in rows[begin : now + 1]]
        since = [loss for loss in losses if loss is not None]
        bad = next((i for i, loss in enumerate(reversed(since)) if math.isfinite(loss)), len(since))
        by_loss = slow_loss_actions(windows[-1], windows, config, reference)
        by_loss += slow_drop_actions(windows, rows[: now + 1], config, reference)
        found = [*by_loss, *slow_actions(windows[-1], config, reference)]
        if bad:
            found.append("fall back" if bad >= config.nonfinite_in_a_row else "warn")
        action = max(found, key=ACTIONS.index, default="ok")
        if bad or "warn" in by_loss or action in ("alert", "fall back"):
            trouble = now
        if action == "fall back" and (
            fall_backs >= config.max_fall_backs or row.get("precision/format") in ("bf16", "fp32/bf16")
        ):
            action = "stop"
        if action == "fall back":
            begin, fall_backs = now + 1, fall_backs + 1
        decided.append((action, trouble is None or now - trouble >= config.good_after))
    return decided


@given(st.lists(ROW, max_size=25), CONFIG, REFERENCE)
@settings(max_examples=250, deadline=None)
def test_every_decision_is_that_of_the_slow_guard(rows: Rows, config: GuardConfig, reference: Rows | None) -> None:
    rows, theirs = numbered(rows), numbered(reference or [])
    guard, decided = Guard(config, ReferenceRun.of(theirs) if reference else None), []
    for row in rows:
        decision = guard.observe(row)
        decided.append((decision.action, guard.good))
        assert Decision.from_row(decode(encode(decision.row()).encode())) == decision
    assert decided == slow_guard(rows, config, theirs)
