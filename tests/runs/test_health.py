from __future__ import annotations

import math
from typing import Any

import pytest

from mantissa.mismatch.tables import K3
from mantissa.mismatch.usual import usual
from mantissa.runs.health import check, judge, share_sentence, share_text

BF16 = usual(("bf16",))


def rows(name: str, values: list[float]) -> list[dict]:
    return [{"step": i, name: value} for i, value in enumerate(values, start=1)]


def test_a_good_run_has_no_excursion_and_a_brief_one_is_to_watch() -> None:
    good = [{"step": 1, K3: 0.0, "policy/loss": -3.0, "precision/skipped": 0, "note": "text", "time/eval": None}]
    assert check(good, BF16) == []
    assert judge([], [], {}).kind == "healthy"
    (found,) = check(rows(K3, [0.0] * 10 + [0.5, 0.7] + [0.0] * 10), BF16)
    assert (found.worst, found.worst_step, found.first_step, found.steps_out, found.steps) == (0.7, 12, 11, 2, 22)
    assert (found.last, found.serious, judge([], [found], {}).kind) == (0.0, False, "watch")


@pytest.mark.parametrize(
    "values",
    [
        [0.0] * 30 + [0.2],  # out at the end
        [0.2] * 4 + [0.0] * 30,  # out for more than a tenth
        [0.0] * 30 + [math.nan] + [0.0] * 30,  # not finite, once
    ],
)
def test_serious_excursions(values: list[float]) -> None:
    (found,) = check(rows(K3, values), BF16)
    assert found.serious
    assert judge([], [found], {}).kind == "unhealthy"


@pytest.mark.parametrize(
    ("overflows", "scales", "skipped", "kind"),
    [
        ([4, 0, 0, 1, 0], (), 0, "healthy"),  # a first loss scale that was too high
        ([4, 3, 0, 0, 0], (), 0, "healthy"),
        ([4, 0, 0, 3, 0], (), 0, "unhealthy"),  # again, later, in a run so short
        ([4, 0, 0, 3, 0], (8, 8, 8, 1, 1), 0, "healthy"),  # at the scale that it had come to: still the search
        ([4, 0, 0, 3, 0], (8, 8, 16, 2, 2), 0, "unhealthy"),  # at one that had grown
        ([4, *[0] * 9, 3, 0], (8,) * 12, 0, "watch"),  # too late
        ([4, 0, 0, 0, 0], (), 1, "unhealthy"),  # a batch was lost
        ([4, 4, 4, 4, 4], (), 0, "unhealthy"),  # none was found
    ],
)
def test_the_search_for_a_first_loss_scale_is_no_warning(
    overflows: list[int], scales: tuple[int, ...], skipped: int, kind: str
) -> None:
    logged = [{"step": i, "precision/overflows": n, "precision/retries": n, "precision/skipped": skipped * (i == 1)}
              for i, n in enumerate(overflows, start=1)]  # fmt: skip
    for row, scale in zip(logged, scales, strict=False):
        row["precision/loss_scale"] = scale
    judged = judge(logged, check(logged, BF16), {})
    assert judged.kind == kind
    searched = not skipped and overflows[-1] == 0
    assert bool(judged.remarks) == searched
    if overflows == [4, 3, 0, 0, 0]:
        assert judged.remarks[0].endswith("7 overflows in the first 2 steps, retried without a lost batch.")


def test_what_is_not_finite_is_worst_and_serious_comes_first() -> None:
    data = [{"step": i, "correction/ess": 0.1 if i == 1 else 0.9, "policy/loss": 1.0} for i in range(1, 24)]
    data[1]["policy/loss"] = math.inf
    first, second = check(data, BF16)
    assert (first.metric.name, first.worst, first.worst_step) == ("policy/loss", math.inf, 2)
    assert (second.metric.name, second.serious) == ("correction/ess", False)


@pytest.mark.parametrize(("best", "said"), [(0.0, "No completion was correct, on any"), (0.01, "1.0% on"), (0.02, "")])
def test_how_little_was_correct_is_said_where_a_verifier_decides(best: float, said: str) -> None:
    logged = rows("reward/accuracy", [0.0, best, 0.0])
    for environment in ({}, {"verdicts": True}):
        judged = judge(logged, [], environment)
        assert (judged.kind, judged.headline) == ("healthy", "Healthy: every metric is in its range")
        assert said in " ".join(judged.remarks)
        assert bool(judged.remarks) == (best < 0.02)
    assert judge(logged, [], {"verdicts": False}).remarks == ()


def test_a_reward_that_rises_is_learning_though_nothing_is_correct() -> None:
    logged = [
        {"step": i, "reward/accuracy": 0.0, "reward/mean": mean, "advantage/abs_max": 1.0}
        for i, mean in enumerate([0.36, 0.41, 0.5, 0.66, 0.7], start=1)
    ]
    judged = judge(logged, [], {"verdicts": False})
    assert judged.kind == "healthy"
    assert judged.headline.endswith("; mean reward 0.36 to 0.7 (spread 0.028 over the last 2 steps)")
    assert judged.remarks == ()


@pytest.mark.parametrize("verdicts", [True, False])
def test_there_was_nothing_to_learn_from_where_every_advantage_was_0(verdicts: bool) -> None:
    logged = [{"step": i, "reward/accuracy": 0, "reward/mean": 0.2, "advantage/abs_max": 0.0} for i in (1, 2)]
    judged = judge(logged, [], {"verdicts": verdicts})
    assert (judged.kind, judged.headline) == ("unhealthy", "Not learning: every advantage was 0")
    assert judged.remarks[-1].startswith("Within each group all rewards were equal, on every step")
    assert (judged.remarks[0] == "No completion was correct, on any step.") == verdicts


FACTS = {"engine": "vLLM 0.32.0", "format": "bf16", "every": 1, "measured": True, "kernels": "exact native kernels"}


def environment(learner: str = "bf16", **facts: Any) -> dict[str, Any]:
    precision = [{"role": "learner", "active": learner}, {"role": "rollout", "active": "bf16"}]
    return {"precision": precision, "engine_share": FACTS | facts}


def said(*measured: tuple[float | None, float, float] | None, learner: str = "bf16", **facts: Any) -> str:
    """The sentence of a run whose steps measured (share, the engine's part, the rest)."""
    rows: list[dict[str, Any]] = [{"step": step, "gap/k3_kl": 1e-5} for step in range(1, len(measured) + 1)]
    for row, values in zip(rows, measured, strict=True):
        if values is not None:
            share, row["gap/engine_abs_logp_diff_mean"], row["gap/other_abs_logp_diff_mean"] = values
            row |= {} if share is None else {"gap/engine_share": share}
    return share_sentence(rows, environment(learner, **facts))


def test_the_share_is_of_medians_over_the_measured_steps() -> None:
    assert said((0.9, 3e-3, 5e-6), None, (0.97, 2.6e-3, 4e-6), None, (0.99, 1e-3, 1e-6)) == (
        "97% of the gap is the engine's: vLLM 0.32.0 and this package's exact kernels, both in bf16, differ by 2.6e-03 "
        "nats a token in the mean. With those kernels in the rollout 4.0e-06 would be left, by the learner's fast "
        "kernels (medians of 3 measured steps)."
    )
    other = said((0.6, 2e-3, 1.5e-3), learner="fp16")
    assert other.startswith("60% of the gap is the engine's")
    assert other.endswith("1.5e-03 would be left, above all because the learner is in fp16 (one step was measured).")
    assert "in the rollout nothing would be left (one" in said((1.0, 2e-3, 0.0))


@pytest.mark.parametrize(("share", "begins"), [(1.07, "107% of the gap"), (-0.2, "-20% of the gap")])
def test_parts_that_cancel_are_said_to(share: float, begins: str) -> None:
    sentence = said((share, 2e-3, 1e-4))
    assert sentence.startswith(begins)
    assert sentence.endswith("(one step was measured; the two parts cancel in part).")


def test_without_a_gap_or_a_measurement() -> None:
    no_gap = "There was no gap of which vLLM 0.32.0 could have a share, at every step."
    assert said((None, 0.0, 0.0), (None, 0.0, 0.0)) == no_gap
    assert said(None, None) == said() == ""
    assert share_sentence([{"step": 1}], {}) == "", "a run on this package's own engine"
    why = "Which share of the gap is vLLM 0.32.0's was not measured: triton is not installed."
    assert said(None, measured=False, reason="triton is not installed") == why


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (1.0, "All"), (0.9996, "More than 99%"), (0.995, "More than 99%"), (0.99, "99%"), (0.5, "50%"),
        (0.004, "Less than 1%"), (0.0, "None"), (1.2, "120%"), (-0.1, "-10%"),
        (1.04, "About all"), (-0.02, "About none"),
    ],
)  # fmt: skip
def test_a_share_that_is_nearly_all_is_not_all(share: float, text: str) -> None:
    assert share_text(share) == text
