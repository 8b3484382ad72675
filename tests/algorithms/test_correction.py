"""Correction weights against scalar math in Python, one sequence at a time."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from mantissa.algorithms import (
    CORRECTION_PRESETS,
    CorrectionConfig,
    correction,
    importance_weights,
    off_policy_mask,
)
from mantissa.algorithms.correction import RejectUnit
from mantissa.base.errors import MantissaError
from mantissa.precision import KLEstimator, values

INF, NAN = float("inf"), float("nan")


# Beside the presets, bounds that exclude 1: what was dropped must not count as masked.
CONFIGS = CORRECTION_PRESETS | {
    "above_one": CorrectionConfig(mode="mask", level="token", mask_low=1.5),
    "sequence_band": CorrectionConfig(mode="mask", level="sequence", mask_low=1.01),
    "never_above_one": CorrectionConfig(mode="truncate", level="token", truncate_at=1.0),
    "sequence_normalized": CorrectionConfig(mode="mask", level="sequence", mask_high=3.0, normalize=True),
    "tokens_out_of_sequences": CorrectionConfig(
        mode="truncate", level="sequence", truncate_at=9.0, normalize=True,
        reject_unit="token", reject_by="k1", reject_low=0.5, veto_below=1e-2,
    ),
    "nothing_kept": CorrectionConfig(reject_unit="token", reject_by="k1", reject_high=1e-12),
}  # fmt: skip
for unit, kind in itertools.product(get_args(RejectUnit), get_args(KLEstimator)):
    # Bounds of the size that spreads of 0.01 and 1 reach, one-sided and two-sided.
    bounds = {"reject_low": 0.8, "reject_high": 1.1} if kind == "k1" else {"reject_high": 0.02}
    CONFIGS[f"{unit}_{kind}"] = CorrectionConfig(reject_unit=unit, reject_by=kind, **bounds)


def estimate(kind: str, log_r: float) -> float:
    """k1 as the log of what is bounded; k2, k3 in nats. expm1: the test's spreads go down to 1e-7."""
    x = min(max(log_r, -20.0), 20.0)
    return {"k1": log_r, "k2": x * x / 2, "k3": math.expm1(x) - x}[kind]


def is_far(value: float, config: CorrectionConfig) -> bool:
    if config.reject_by == "k1":
        value = math.exp(min(max(value, -20.0), 20.0))
    low, high = config.reject_low, config.reject_high
    return (low is not None and value < low) or (high is not None and value > high)


def rejected(log_r: list[float], good: list[bool], config: CorrectionConfig) -> list[bool]:
    """Which tokens of a sequence rejection and veto drop, by loops and the definitions."""
    here = [x for x, g in zip(log_r, good, strict=True) if g]
    far = [False] * len(good)
    if config.reject_unit == "token":
        far = [g and is_far(estimate(config.reject_by, x), config) for x, g in zip(log_r, good, strict=True)]
    elif config.reject_unit is not None and here:
        each = [estimate(config.reject_by, x) for x in here]
        total = math.fsum(each)
        whole = {
            "sequence_sum": is_far(total, config),
            "sequence_mean": is_far(total / len(each), config),
            "sequence_max": any(is_far(value, config) for value in each),
        }[config.reject_unit]
        far = [whole] * len(good)
    if config.veto_below is not None and any(math.exp(max(min(x, 20.0), -20.0)) < config.veto_below for x in here):
        far = [True] * len(good)
    return far


def oracle(
    logp: list[list[float]],
    rollout: list[list[float]],
    mask: list[list[bool]],
    config: CorrectionConfig,
    whole: bool = False,
) -> tuple[list[list[float]], list[list[bool]]]:
    weights, valid = [], []
    by_sequence = (config.reject_unit or "token") != "token" or config.level == "sequence" or config.veto_below or whole
    for row, other, keep in zip(logp, rollout, mask, strict=True):
        good = [m and math.isfinite(a) and math.isfinite(b) for a, b, m in zip(row, other, keep, strict=True)]
        if by_sequence:
            good = good if good == keep else [False] * len(row)
        log_r = [a - b if g else 0.0 for a, b, g in zip(row, other, good, strict=True)]
        far = rejected(log_r, good, config)
        if config.level == "sequence":
            log_r = [math.fsum(log_r) if any(good) else 0.0] * len(row)
        good = [g and not f for g, f in zip(good, far, strict=True)]
        ratios = [math.exp(min(max(x, -20.0), 20.0)) for x in log_r]
        if config.mode == "none":
            ratios = [1.0] * len(row)
        elif config.mode == "truncate":
            ratios = [min(r, config.truncate_at) for r in ratios]
        else:
            low, high = config.mask_low or 0.0, INF if config.mask_high is None else config.mask_high
            ratios = [r if low <= r <= high else 0.0 for r in ratios]
        weights.append([r if g else 0.0 for r, g in zip(ratios, good, strict=True)])
        valid.append(good)
    if config.normalize:
        units = [
            [w for w, v in zip(row, good, strict=True) if v][: 1 if config.level == "sequence" else None]
            for row, good in zip(weights, valid, strict=True)
        ]
        every = [w for row in units for w in row]
        mean = math.fsum(every) / len(every) if every else 0.0
        weights = [[w / mean if mean > 0 else w for w in row] for row in weights]
    return weights, valid


def random_case(seed: int, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    logp_BT = -3 * torch.rand(5, 6, generator=random)
    rollout_BT = logp_BT + spread * torch.randn(5, 6, generator=random)
    mask_BT = torch.rand(5, 6, generator=random) > 0.3
    mask_BT[int(seed % 5)] = False
    logp_BT[0, 1], rollout_BT[1, 2], rollout_BT[3, 0] = -INF, NAN, INF
    return logp_BT, rollout_BT, mask_BT


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([1e-7, 0.01, 0.1, 1.0, 30.0]))
def test_weights_are_those_of_scalar_math(name: str, whole: bool, seed: int, spread: float) -> None:
    logp_BT, rollout_BT, mask_BT = random_case(seed, spread)
    weight_BT, valid_BT, _ = correction(logp_BT, rollout_BT, mask_BT, CONFIGS[name], whole=whole)
    weights, valid = oracle(logp_BT.tolist(), rollout_BT.tolist(), mask_BT.tolist(), CONFIGS[name], whole)
    assert valid_BT.tolist() == valid
    assert weight_BT.dtype == torch.float32
    torch.testing.assert_close(weight_BT, torch.tensor(weights), rtol=1.2e-7, atol=0)  # one rounding to fp32


@pytest.mark.parametrize("name", CONFIGS)
@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([1e-7, 0.1, 30.0]))
def test_tallies_are_statistics_of_the_weights_as_applied(name: str, seed: int, spread: float) -> None:
    logp_BT, rollout_BT, mask_BT = (x.double() if x.is_floating_point() else x for x in random_case(seed, spread))
    config = CONFIGS[name]
    weight_BT, valid_BT, metrics = correction(logp_BT, rollout_BT, mask_BT, config)
    got = {key.removeprefix("correction/"): value.item() for key, value in values(metrics).items()}
    whole = valid_BT.any(-1)
    w = weight_BT.amax(-1)[whole] if config.level == "sequence" else weight_BT[valid_BT]
    if w.numel() == 0:
        assert (got["weight_mean"], got["ess"]) == (0.0, 0.0)
        return
    close = pytest.approx
    assert got["weight_mean"] == close(w.mean().item(), rel=1e-12)
    # A difference of squares about 1: the error is 1e-8 of the distance from 1.
    assert got["weight_std"] == close(w.std(correction=0).item(), rel=1e-6, abs=3e-8 * max(1, w.max().item()))
    assert (got["weight_min"], got["weight_max"]) == (w.min().item(), w.max().item())
    share = w / w.mean() if w.mean() > 0 else w
    ess = 1 / share.square().mean().item() if w.mean() > 0 else 0.0
    assert got["ess"] == close(ess, rel=1e-9)
    zeroed = (weight_BT == 0) & valid_BT if config.mode == "mask" else torch.zeros_like(valid_BT)
    assert got["masked_token_fraction"] == close(zeroed.sum().item() / valid_BT.sum().item())
    assert got["masked_sequence_fraction"] == close(zeroed.any(-1).sum().item() / whole.sum().item())
    exceeds = 0.0
    if config.truncate_at is not None:
        free = config.model_copy(update={"truncate_at": INF, "normalize": False})
        r = correction(logp_BT, rollout_BT, mask_BT, free)[0][valid_BT]
        exceeds = (r > config.truncate_at).double().mean().item()
    assert got["truncated_token_fraction"] == close(exceeds)
    judged = config.model_copy(update={"reject_unit": None, "veto_below": None})
    whole_only = judged.model_copy(update={"mode": "none", "level": "sequence" if config.whole_sequences else None})
    finite_BT = correction(logp_BT, rollout_BT, mask_BT, whole_only)[1]
    assert got["dropped_tokens"] == (mask_BT & ~finite_BT).sum().item()
    assert got["rejected_token_fraction"] == close(1 - valid_BT.sum().item() / finite_BT.sum().item(), abs=1e-12)
    log_r_BT = torch.where(finite_BT, logp_BT - rollout_BT, 0.0).clamp(-20, 20)
    vetoed_B = (log_r_BT.exp() < (config.veto_below or 0)).any(-1)
    sequences = finite_BT.any(-1).sum().item()
    assert got["vetoed_sequence_fraction"] == close(vetoed_B.sum().item() / sequences)
    assert got["rejected_sequence_fraction"] == close(1 - whole.sum().item() / sequences, abs=1e-12)


Case = tuple[Tensor, Tensor, Tensor]


def case(*ratios: list[float]) -> Case:
    """Sequences of equal length with these r = learner / rollout; float64."""
    r = torch.tensor(ratios, dtype=torch.float64)
    return r.log() - 3, torch.full_like(r, -3.0), torch.ones_like(r, dtype=torch.bool)


# By preset: a sequence of r = learner / rollout, and its weights; None: the sequence is dropped. Each published bound
# has an r on either side of it, and one published on rollout / learner would be on the wrong one.
PUBLISHED: dict[str, list[tuple[list[float], list[float] | None]]] = {
    "none": [([9, 1 / 9], [1, 1])],
    "token_tis": [([1.99, 2.01, 0.1], [1.99, 2, 0.1])],
    "sequence_tis": [([1.9, 1.5], [2.85, 2.85]), ([2, 1.6], [3, 3])],
    "sequence_is": [([9, 9], [81, 81])],
    "icepop": [([4.99, 5.01, 0.501, 0.499], [4.99, 0, 0.501, 0])],
    "token_mis": [([1.99, 2.01, 0.01], [1.99, 0, 0.01])],
    "sequence_mis": [([2, 1.49], [2.98, 2.98]), ([2, 1.51], [0, 0]), ([0.01, 1], [0.01, 0.01])],
    "token_tis_normalized": [([3, 1], [4 / 3, 2 / 3])],
    "token_tis_veto": [([1, 1.01e-4, 3], [1, 1.01e-4, 2]), ([1, 0.99e-4], None)],
    "sequence_mis_veto": [([1.01e-4, 1], [1.01e-4, 1.01e-4]), ([0.99e-4, 1], None), ([2, 1.51], [0, 0])],
    "sequence_rejection": [([1.5, 1.33], [1.995] * 2), ([1.5, 1.34], None), ([0.51], [0.51]), ([0.49], None)],
    "geometric": [([1.0014, 1.0005], [1, 1]), ([1.0016, 1.0005], None), ([0.9991], [1]), ([0.9989], None)],
    "geometric_token_tis": [([3, 1 / 3], [2, 1 / 3]), ([1.0011], None)],
    "geometric_veto": [([1.01e-4, 1 / 1.01e-4], [1, 1]), ([0.99e-4, 1 / 0.99e-4], None), ([1.0011], None)],
    "k3_rejection": [([1.14], [1]), ([1.15], None)],
    "k3_rejection_token_tis": [([2.1] + [1] * 40, [2] + [1] * 40), ([1.14], [1.14]), ([1.15], None)],
    "bypass": [([9], [1])],
    "bypass_geometric": [([1.0009], [1]), ([1.0011], None)],
    "bypass_k3_rejection": [([1.14], [1]), ([1.15], None)],
}


@pytest.mark.parametrize("name", CORRECTION_PRESETS)
def test_presets_bound_learner_over_rollout_where_they_were_published_to(name: str) -> None:
    config = CORRECTION_PRESETS[name]
    assert config.bypass == name.startswith("bypass")
    for ratios, expected in PUBLISHED[name]:
        weight, valid, _ = correction(*case(ratios), config)
        assert valid.tolist() == [[expected is not None] * len(ratios)]
        if expected is not None:
            assert weight[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_bounds_are_inclusive() -> None:
    """On r = 1, which is exact; the one before and the one after it are out."""
    for bounds, below, above in (({"mask_low": 1.0}, 0.0, 1.01), ({"mask_high": 1.0}, 0.99, 0.0)):
        config = CorrectionConfig(mode="mask", level="token", **bounds)
        assert correction(*case([0.99, 1.0, 1.01]), config)[0].tolist()[0] == pytest.approx([below, 1.0, above])


def test_a_long_sequence_of_fp32_gaps_sums_without_loss() -> None:
    """4,096 gaps of one unit in the last place: an fp32 ratio of each token would be exactly 1, and so the product."""
    rollout_BT = torch.full((1, 4096), -0.0001)
    logp_BT = torch.nextafter(rollout_BT, torch.zeros(()))
    gap = (logp_BT.double() - rollout_BT.double()).sum().item()
    assert 1e-9 < gap < 1e-7
    weight = correction(logp_BT.double(), rollout_BT.double(), logp_BT < 0, CORRECTION_PRESETS["sequence_is"])[0]
    assert weight[0, 0].item() - 1 == pytest.approx(gap, rel=1e-6, abs=0)


def test_gaps_of_both_signs_beyond_fp32_cancel_rather_than_become_nan() -> None:
    logp_BT = torch.tensor([[3e38, 3e38, -3e38, -3e38]])
    weight, _, _ = correction(
        logp_BT, torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool), CORRECTION_PRESETS["sequence_is"]
    )
    assert weight.tolist() == [[1.0] * 4]


def test_missing_rollout_log_probs_are_an_error_not_a_weight_of_one() -> None:
    for config in CORRECTION_PRESETS.values():
        with pytest.raises(MantissaError, match="rollout's log-probs and got none"):
            correction(torch.zeros(1, 1), None, torch.ones(1, 1, dtype=torch.bool), config)


def test_other_dtypes_are_a_programmers_error() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    for a, b in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float64)):
        with pytest.raises(TypeError, match="fp32"):
            correction(torch.zeros(1, 1, dtype=a), torch.zeros(1, 1, dtype=b), mask, CORRECTION_PRESETS["none"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "truncate", "truncate_at": 2.0}, "needs correction.level"),
        ({"mode": "truncate", "level": "token"}, "needs correction.truncate_at"),
        ({"mode": "mask", "level": "token"}, "mask_low, correction.mask_high or both"),
        ({"mode": "mask", "level": "token", "mask_low": 2.0, "mask_high": 1.0}, "must be below"),
        ({"mode": "none", "level": "token"}, "level does nothing"),
        ({"mode": "truncate", "level": "token", "truncate_at": 2, "mask_low": 0.5}, "mask_low does nothing"),
        ({"mode": "truncate", "level": "token", "truncate_at": 0}, "greater than 0"),
        ({"mode": "truncate", "level": "token", "truncate_at": NAN}, "greater than 0"),
        ({"truncate": 2}, "Extra inputs"),
        ({"reject_by": "k1"}, "reject_by does nothing without correction.reject_unit"),
        ({"reject_high": 2.0}, "reject_high does nothing without"),
        ({"reject_unit": "token"}, "needs correction.reject_by"),
        ({"reject_unit": "token", "reject_by": "k3"}, "needs correction.reject_high"),
        ({"reject_unit": "token", "reject_by": "k3", "reject_low": 0.1}, "reject_low does nothing with reject_by=k3"),
        ({"reject_unit": "token", "reject_by": "k1", "reject_low": 2, "reject_high": 1}, "must be below"),
        ({"reject_unit": "sequence", "reject_by": "k1", "reject_high": 1}, "'token', 'sequence_sum'"),
        ({"reject_unit": "token", "reject_by": "k4", "reject_high": 1}, "'k1', 'k2' or 'k3'"),
        ({"veto_below": 1.0}, "less than 1"),
        ({"veto_below": 0.0}, "greater than 0"),
        ({"normalize": True}, "normalize does nothing with mode=none"),
        ({"bypass": True, "mode": "truncate", "level": "token", "truncate_at": 2}, "bypass takes no weights"),
        ("geometrik", "did you mean 'geometric'"),
        ("token_tsi", "did you mean 'token_tis'"),
    ],
)
def test_bad_configurations_say_what_to_do(fields: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CorrectionConfig.model_validate(fields)


@pytest.mark.parametrize("name", CORRECTION_PRESETS)
def test_a_preset_survives_a_file(name: str) -> None:
    config = CorrectionConfig.model_validate(name)
    assert config == CORRECTION_PRESETS[name]
    assert CorrectionConfig.model_validate(config.model_dump(mode="python")) == config


@pytest.mark.parametrize("name", ["token_tis", "sequence_mis", "sequence_is", "sequence_rejection", "none"])
@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 10_000))
def test_weights_made_apart_are_those_of_the_correction(name: str, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    logp, rollout = (-torch.rand(4, 5, generator=random) for _ in range(2))
    mask = torch.rand(4, 5, generator=random) > 0.2
    config = CORRECTION_PRESETS[name]
    weight, valid, metrics = correction(logp, rollout, mask, config)
    apart, weights = importance_weights(logp, rollout, mask, valid, config)
    assert torch.equal(apart, weight)
    assert weights.keys() < metrics.keys()
    for key, tally in weights.items():
        assert torch.equal(tally.parts, metrics[key].parts), key


def test_weights_made_apart_cannot_be_normalised() -> None:
    logp, rollout, mask = case([1.0])
    with pytest.raises(ValueError, match="from a part of it"):
        importance_weights(logp, rollout, mask, mask, CORRECTION_PRESETS["token_tis_normalized"])


@pytest.mark.parametrize("seed", range(5))
def test_what_was_bad_and_is_left_behind_already_is_masked(seed: int) -> None:
    """A loop over sequences; one log-prob is not a number, and one row is empty."""
    draw = torch.Generator().manual_seed(seed)
    logp, rollout = (-torch.randn(8, 5, generator=draw, dtype=torch.float64).abs() for _ in range(2))
    advantage, mask = torch.randn(8, generator=draw, dtype=torch.float64), torch.rand(8, 5, generator=draw) > 0.3
    rollout[2, 1], mask[3] = float("nan"), False
    kept, tallies = off_policy_mask(logp.requires_grad_(), rollout, advantage, mask, 0.1)
    expected = []
    for i in range(8):
        gaps = [(rollout[i, t] - logp[i, t]).item() for t in range(5) if mask[i, t] and rollout[i, t].isfinite()]
        expected.append(not (advantage[i] < 0 and gaps and sum(gaps) / len(gaps) > 0.1))
    assert kept.tolist() == expected
    assert not kept.requires_grad
    share = (7 - sum(expected) + 1) / max(int(mask.any(-1).sum()), 1)
    assert values(tallies)["correction/off_policy_masked_fraction"].item() == pytest.approx(share)


def test_the_cases_above_mask_some() -> None:
    draw = torch.Generator().manual_seed(0)
    logp, rollout = (-torch.randn(64, 5, generator=draw).abs() for _ in range(2))
    kept, _ = off_policy_mask(logp, rollout, torch.randn(64, generator=draw), torch.ones(64, 5, dtype=torch.bool), 0.1)
    assert 0.5 < kept.float().mean() < 0.95


BAD = pytest.mark.parametrize("bad", [INF, -INF, NAN])
WHOSE = pytest.mark.parametrize("whose", ["current", "rollout"])


@BAD
@WHOSE
@pytest.mark.parametrize("name", ["token_tis", "sequence_tis", "sequence_mis", "icepop", "token_tis_veto", "none"])
def test_what_became_unknown_within_an_update_has_no_weight(name: str, whose: str, bad: float) -> None:
    """Every log-prob was known when the batch was corrected; now one of a sequence is not, and all of another's.

    By definition: it weighs 0, by sequence with all of its sequence, and is in no statistic; the rest is as it was.
    """
    config = CORRECTION_PRESETS[name]
    logp, rollout, mask = case([1.3, 0.7, 1.1], [0.9, 1.2, 0.8], [1.05, 0.95, 2.5], [1.6, 0.6, 1.4])
    mask[0, 2] = False
    _, valid, _ = correction(logp, rollout, mask, config)
    before, statistics = importance_weights(logp, rollout, mask, valid, config)
    assert bool(before[valid].all())
    now = {"current": logp.clone(), "rollout": rollout.clone()}
    now[whose][1, 1] = bad
    now[whose][3] = bad
    now[whose][0, 2] = bad  # under the mask, where it is nothing
    weight, tallies = importance_weights(now["current"], now["rollout"], mask, valid, config)
    unknown = torch.zeros_like(mask)
    unknown[1, 1], unknown[3] = True, True
    if config.whole_sequences:
        unknown[1] = True
    assert torch.equal(weight, torch.where(unknown, 0.0, before))
    expected = importance_weights(logp, rollout, mask, valid & ~unknown, config)[1]
    for key, tally in values(tallies).items():
        assert tally.item() == pytest.approx(values(expected)[key].item(), rel=1e-12), key
    assert values(tallies)["correction/weight_min"].item() > 0
    assert values(statistics)["correction/weight_mean"].item() > 0


@BAD
@WHOSE
def test_the_mean_that_masks_is_of_the_tokens_that_are_known(whose: str, bad: float) -> None:
    """Bounds of 0.1 nats on log(rollout / current); sequences that a count or a sum of others would put elsewhere."""
    gaps = torch.tensor(
        [
            [0.15, 0.15, 0.15, bad],  # 0.15 of three, and 0.11 of four
            [0.12, 0.12, bad, bad],  # 0.12 of two, and 0.06 of four
            [0.09, 0.09, 0.09, bad],
            [0.297, -0.3, 0.3, bad],  # 0.099
            [0.9, bad, bad, bad],
            [bad, bad, bad, bad],  # nothing is known, and nothing is masked
            [0.15, 0.15, 0.15, bad],  # masked were it not for its advantage
            [-0.9, -0.9, -0.9, bad],  # far on the other side
        ],
        dtype=torch.float64,
    )
    rollout = torch.full_like(gaps, -2.0)
    known = gaps.isfinite()
    logp = torch.where(known, rollout - gaps, -2.0)
    (logp if whose == "current" else rollout)[~known] = bad
    advantage = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    kept, tallies = off_policy_mask(logp, rollout, advantage, torch.ones_like(known), 0.1)
    assert kept.tolist() == [False, False, True, True, False, True, True, True]
    assert values(tallies)["correction/off_policy_masked_fraction"].item() == pytest.approx(3 / 8)


def test_a_product_made_apart_is_of_rejected_tokens_too() -> None:
    """All that were sampled: a token that was rejected is a factor, and one that became unknown leaves none."""
    config = CorrectionConfig(
        mode="truncate", level="sequence", truncate_at=9.0, reject_unit="token", reject_by="k1", reject_low=0.5
    )
    logp, rollout, mask = case([2.0, 0.25, 3.0], [0.4, 2.0, 1.5])
    whole, valid, _ = correction(logp, rollout, mask, config)
    assert valid.tolist() == [[True, False, True], [False, True, True]]
    assert whole[valid].tolist() == pytest.approx([1.5, 1.5, 1.2, 1.2])
    weight, _ = importance_weights(logp, rollout, mask, valid, config)
    assert torch.equal(weight, whole)
    logp[0, 1] = NAN  # of the rejected one
    weight, _ = importance_weights(logp, rollout, mask, valid, config)
    assert weight.tolist() == [[0.0] * 3, whole[1].tolist()]
