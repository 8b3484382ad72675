"""The guard's rules, each from both sides of its thresholds; which action wins, and what comes after it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest

from mantissa.base.errors import MantissaError
from mantissa.guard import ACTIONS, Decision, Guard, GuardConfig, ReferenceRun, noteworthy, replay

Rows = list[dict[str, Any]]


def rows_of(**columns: Sequence[Any]) -> Rows:
    """Rows from step 1; a column ``train_loss`` is the metric ``train/loss``, and None leaves it out of its row."""
    length = len(next(iter(columns.values())))
    return [
        {"step": i + 1} | {name.replace("_", "/", 1): c[i] for name, c in columns.items() if c[i] is not None}
        for i in range(length)
    ]


def actions(rows: Rows, config: GuardConfig, reference: ReferenceRun | None = None) -> list[str]:
    return [decision.action for decision in replay(rows, config, reference)]


def last(rows: Rows, config: GuardConfig, reference: ReferenceRun | None = None) -> Decision:
    return replay(rows, config, reference)[-1]


# each rule, below, at and above its thresholds


@pytest.mark.parametrize(
    ("overflowed", "action"),
    [(5, "ok"), (6, "warn"), (10, "warn"), (11, "alert"), (30, "alert"), (31, "fall back")],
)
def test_overflow(overflowed: int, action: str) -> None:
    # The overflows come last, spread by hand: a window of 100, full only at its last step.
    rows = rows_of(precision_overflows=[0] * (100 - overflowed) + [3] * overflowed)
    decision = last(rows, GuardConfig(window=100, min_steps=100))
    assert decision.action == action
    assert decision.numbers["overflowed_rate"] == overflowed / 100
    assert decision.rules == (("overflow",) if overflowed > 5 else ())


def test_a_retried_overflow_counts_once_and_the_window_forgets() -> None:
    config = GuardConfig(window=20)
    rows = rows_of(precision_overflows=[4, 1, *[0] * 21])
    decisions = replay(rows, config)
    assert [d.numbers.get("overflowed_rate") for d in decisions[18:]] == [None, 0.1, 0.05, 0.0, 0.0]
    assert [d.action for d in decisions[18:]] == ["ok", "warn", "ok", "ok", "ok"]


@pytest.mark.parametrize(
    ("factor", "action", "size"),
    [
        (0.5, "ok", 1.0),
        (1.0625, "ok", 1024.0),
        (1.0635, "warn", 2.0**-20),
        (1.25, "warn", 1.0),
        (1.251, "fall back", 1024.0),
    ],
)
def test_loss_against_a_reference_is_relative(factor: float, action: str, size: float) -> None:
    reference = ReferenceRun.of(rows_of(train_loss=[2.0 * size] * 20))
    rows = rows_of(train_loss=[2.0 * size * factor] * 20)
    decision = last(rows, GuardConfig(loss_warn=0.0625, loss_fall_back=0.25), reference)
    assert decision.action == action
    assert decision.numbers["loss_excess"] == pytest.approx(factor - 1, abs=1e-12)


def test_loss_is_compared_over_the_same_steps_only() -> None:
    """Steps that either run lacks, or where either is not finite, are in neither mean."""
    reference = ReferenceRun.of(rows_of(train_loss=[1.0, 2.0, None, 4.0, math.nan, 6.0]))
    rows = rows_of(train_loss=[1.5, None, 9.0, 4.5, 9.0, math.inf])
    decision = last(rows, GuardConfig(min_steps=2, nonfinite_in_a_row=9), reference)
    assert decision.numbers["compared_loss_mean"] == 3.0  # steps 1 and 4
    assert decision.numbers["reference_loss_mean"] == 2.5
    assert decision.numbers["loss_mean"] == 6.0  # steps 1, 3, 4, 5
    decisions = replay(rows[:4], GuardConfig(min_steps=2), reference)
    assert [d.numbers.get("loss_excess") for d in decisions] == [None, None, None, 0.2]


@pytest.mark.parametrize(
    ("theirs", "ours", "excess"),
    [
        (2.0**-12, 2.0**-11, 2.0**-12 / 0.08),  # near zero: in units of 1% of the 8 that the reference began with
        (-4.0, -3.0, 0.25),  # negative: of its magnitude, and above is worse
        (-4.0, -5.0, -0.25),
        (0.0, 0.0, 0.0),
        (-(2.0**-12), 2.0**-12, 2.0**-11 / 0.08),  # across zero
    ],
)
def test_losses_that_a_share_means_little_for(theirs: float, ours: float, excess: float) -> None:
    reference = ReferenceRun.of(rows_of(train_loss=[8.0, 8.0, *[theirs] * 4]))
    decision = last(rows_of(train_loss=[None, None, *[ours] * 4]), GuardConfig(min_steps=2), reference)
    assert decision.numbers["loss_excess"] == pytest.approx(excess, rel=1e-12)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0, math.nan, 1.0, math.inf, 1.0], ["ok", "warn", "ok", "warn", "ok"]),
        ([math.nan, -math.inf], ["warn", "fall back"]),
        ([math.nan, None, math.nan], ["warn", "warn", "fall back"]),  # a row without a loss neither cures nor counts
        ([1e39, -1e39], ["warn", "fall back"]),  # no fp32 number
        ([3.4e38, -3.4e38], ["ok", "ok"]),
    ],
)
def test_losses_that_are_not_finite(losses: list[float | None], expected: list[str]) -> None:
    assert actions(rows_of(train_loss=losses), GuardConfig()) == expected
    assert "fall back" not in actions(rows_of(train_loss=losses), GuardConfig(nonfinite_in_a_row=3))


@pytest.mark.parametrize(("late", "action"), [(2.9, "ok"), (3.0, "ok"), (3.01, "fall back")])
def test_divergence_from_the_best_mean(late: float, action: str) -> None:
    rows = rows_of(train_loss=[4.0] * 4 + [1.0] * 4 + [late] * 4)
    config = GuardConfig(window=4, min_steps=4, divergence=3.0)
    decision = last(rows, config)
    assert (decision.action, decision.numbers["best_loss_mean"]) == (action, 1.0)
    assert last(rows, GuardConfig(window=4, min_steps=4)).action == "ok"  # off by default


@pytest.mark.parametrize(("seconds", "action"), [(0.5, "ok"), (1.25, "ok"), (1.26, "warn")])
def test_speed(seconds: float, action: str) -> None:
    """Medians: a slow first step or a pause says nothing about the format."""
    reference = ReferenceRun.of(
        [*rows_of(time_step=[90.0, 1.0, 1.0, 1.0, 1.0]), {"step": 6, "precision/format": "fp32"}]
    )
    decision = last(rows_of(time_step=[70.0, seconds, seconds, seconds, 80.0]), GuardConfig(min_steps=5), reference)
    assert decision.action == action
    assert decision.numbers["speed"] == 1.0 / seconds
    assert all("reference's (fp32)" in reason for reason in decision.reasons)


@pytest.mark.parametrize(
    ("outside", "action", "value"),
    [(0, "ok", 0.0), (10, "ok", 0.5001), (11, "warn", -0.1001), (18, "warn", math.nan), (19, "alert", math.inf)],
)
def test_gates(outside: int, action: str, value: float) -> None:
    rows = rows_of(gap_kl=[0.5, -0.1] * 10, gap_ess=[-9.0] * 20)  # the ends belong to the range
    for row in rows[20 - outside :]:
        row["gap/kl"] = value
    decision = last(rows, GuardConfig(gates={"gap/kl": (-0.1, 0.5), "gap/ess": (None, 1.0), "absent": (0, 1)}))
    assert decision.action == action
    assert decision.numbers["outside/gap/kl"] == outside / 20
    assert decision.numbers["outside/gap/ess"] == 0.0
    assert "outside/absent" not in decision.numbers


@pytest.mark.parametrize(
    ("drop", "action", "low", "high", "referred"),
    [
        (0, "ok", 0.0, 1.0, False),
        (1, "ok", -10.0, 30.0, True),
        (3, "warn", -1.0, 1.0, False),
        (4, "warn", 0.0, 1.0, True),
        (6, "fall back", -10.0, 30.0, False),
        (6, "fall back", -1.0, 1.0, True),
    ],
)
def test_accuracy_and_reward_that_fall_by_points(
    drop: int, action: str, low: float, high: float, referred: bool
) -> None:
    """Of the rewards' range: a fall of accuracy and the same fall of a reward that is its image are one figure."""

    def rows(*accuracies: float) -> Rows:
        length = len(accuracies)
        return rows_of(
            reward_accuracy=accuracies,
            reward_mean=[low + (high - low) * accuracy for accuracy in accuracies],
            reward_min=[low] * length,
            reward_max=[high] * length,
            time_step=[1.0] * length,
        )

    config, late = GuardConfig(window=20), 0.5 - drop / 100
    reference = ReferenceRun.of(rows(*[0.5] * 40)) if referred else None
    run = rows(*[late] * 40) if referred else rows(*[0.5] * 20, *[late] * 20)
    decisions = replay(run, config, reference)
    decision = next((d for d in decisions if d.action == "fall back"), decisions[-1])
    assert decision.action == action
    for name in ("accuracy", "reward"):
        assert (name in decision.rules) == (drop > 2)
        passed = 0.05 < decision.numbers[f"{name}_drop"] <= 0.06 + 1e-9
        assert passed if action == "fall back" else decision.numbers[f"{name}_drop"] == pytest.approx(drop / 100)


def test_policy_loss_is_judged_for_being_finite_alone() -> None:
    reference = ReferenceRun.of(rows_of(train_loss=[1.0] * 30))
    rows = rows_of(policy_loss=[math.nan, *[50.0] * 29])
    config = GuardConfig(divergence=1.1)
    assert actions(rows, config, reference) == ["warn", *["ok"] * 29]
    assert actions(rows_of(policy_loss=[math.nan] * 2), config) == ["warn", "fall back"]


# which action, and what comes after


def test_the_most_severe_action_wins_and_every_reason_is_kept() -> None:
    reference = ReferenceRun.of(rows_of(train_loss=[1.0] * 20, time_step=[1.0] * 20))
    rows = rows_of(
        train_loss=[1.1] * 20, time_step=[2.0] * 20, precision_overflows=[0] * 17 + [1] * 3, gap_kl=[9.0] * 20
    )
    gates = {"gap/kl": (None, 1.0)}
    decision = last(rows, GuardConfig(gates=gates), reference)
    assert decision.action == "alert"
    assert decision.rules == ("overflow", "gate", "loss", "speed")  # alerts first, then in the rules' order
    rows[18]["train/loss"] = rows[19]["train/loss"] = math.nan
    decision = last(rows, GuardConfig(gates=gates, min_steps=18), reference)
    assert decision.action == "fall back"
    assert decision.rules == ("nonfinite", "overflow", "gate", "loss", "speed")
    assert decision.reasons[-1] == "fall back: to bf16, from the last good checkpoint"
    assert list(ACTIONS) == ["ok", "warn", "alert", "fall back", "stop"]


def test_after_a_fall_back_the_window_is_forgotten_and_the_next_is_a_stop() -> None:
    nan, config = math.nan, GuardConfig(min_steps=3, window=6, overflow_warn=1, overflow_alert=1, overflow_fall_back=1)
    losses = [1.0, nan, nan, nan, 1.0, nan, nan, nan]
    rows = rows_of(train_loss=losses, precision_overflows=[0, 1, 0, 0, 0, 1, 1, 0])
    decisions = replay(rows, config)
    assert [d.action for d in decisions] == ["ok", "warn", "fall back", "warn", "ok", "warn", "stop", "stop"]
    assert [d.numbers["steps"] for d in decisions] == [1, 2, 3, 1, 2, 3, 4, 5]
    assert [d.numbers["fall_backs"] for d in decisions] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert decisions[5].numbers["overflowed_rate"] == 1 / 3  # steps 4 to 6
    assert decisions[6].reasons[-1] == "stop: 1 of 1 fall backs are used up"
    assert actions(rows, GuardConfig(**(config.model_dump() | {"max_fall_backs": 2})))[6] == "fall back"
    assert actions(rows, GuardConfig(**(config.model_dump() | {"max_fall_backs": 0})))[2] == "stop"


@pytest.mark.parametrize(
    ("fmt", "to", "action"),
    [
        ("fp16", "bf16", "fall back"),
        ("bf16", "fp32", "fall back"),
        ("bf16", "bf16", "stop"),
        ("fp32", "bf16", "stop"),
        ("fp32", "fp32", "stop"),
        ("fp32/bf16", "bf16", "stop"),  # of learner and rollout
        ("fp32/bf16", "fp32", "fall back"),
        (None, "bf16", "fall back"),
    ],
)
def test_a_run_never_falls_back_to_a_format_that_is_no_wider(fmt: str | None, to: str, action: str) -> None:
    rows = rows_of(train_loss=[math.nan] * 2, precision_format=[fmt] * 2)
    decision = last(rows, GuardConfig(to=to))
    assert decision.action == action
    assert fmt is None or action == "fall back" or f"the format is {fmt}" in decision.reasons[-1]


@pytest.mark.parametrize(
    ("updates", "skipped", "lost", "means"),
    [  # the loss falls by 1 a step; the two that are not finite end in going back to an earlier update
        ([1, 2, 3, 4, 5, 6, 7, 8, 4, 5, 6, 6, 7], {11}, (6, 7), [96.0, 95.5, 95.0, 94.5, 94.0]),
        ([1, 2, 3, 4, 5, 6, 2], {6}, (4, 5), [97.0]),  # skipped right after: it tries what was step 3
    ],
)
def test_after_a_fall_back_the_reference_is_read_where_training_goes_on(
    updates: list[int], skipped: set[int], lost: tuple[int, int], means: list[float]
) -> None:
    """A skipped step is a step of the reference too."""
    reference = ReferenceRun.of(rows_of(train_loss=[100.0 - i for i in range(1, 30)]))
    length = range(len(updates))
    losses = [math.nan if i in lost else 100.0 - updates[i] for i in length]
    rows = rows_of(train_loss=losses, optim_updates=updates, precision_skipped=[int(i in skipped) for i in length])
    decisions = replay(rows, GuardConfig(min_steps=1), reference)
    assert [d.action for d in decisions[lost[0] : lost[1] + 1]] == ["warn", "fall back"]
    assert [d.numbers["reference_loss_mean"] for d in decisions[lost[1] + 1 :]] == means


def test_noteworthy_is_what_is_not_ok_and_the_first_ok_after_it() -> None:
    rows = rows_of(train_loss=[1.0, math.nan, 1.0, 1.0, math.nan, 1.0])
    kept = noteworthy(replay(rows, GuardConfig()))
    assert [(d.step, d.action) for d in kept] == [(2, "warn"), (3, "ok"), (5, "warn"), (6, "ok")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "expected a row with a whole number as its step, got None"),
        ({"step": True}, "got True"),
        ({"step": 1.0}, "got 1.0"),
        ({"step": 1}, "expected a step after 1, got 1"),
        ({"step": 2, "train/loss": "low"}, "step 2: train/loss: expected a number, got 'low'"),
        ({"step": 2, "precision/overflows": [1]}, "precision/overflows: expected a number"),
    ],
)
def test_rows_that_are_none(row: dict[str, Any], message: str) -> None:
    guard = Guard()
    guard.observe({"step": 1, "train/loss": 10**400})  # too large a whole number for a float is inf, not an error
    before = copy.deepcopy(vars(guard))
    with pytest.raises(MantissaError, match=message.replace("(", r"\(")):
        guard.observe(row)
    if row.get("step") != 2:
        assert vars(guard) == before
