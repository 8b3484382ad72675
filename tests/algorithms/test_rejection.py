"""Rejection, veto, normalisation and bypass: what they mean, in cases small enough to check by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from mantissa.algorithms import (
    CORRECTION_PRESETS,
    CorrectionConfig,
    aggregation_scale,
    correction,
    importance_weights,
    values,
)

Case = tuple[Tensor, Tensor, Tensor]


def case(*ratios: list[float]) -> Case:
    """Sequences of equal length with these r = learner / rollout; float64."""
    r = torch.tensor(ratios, dtype=torch.float64)
    return r.log() - 3, torch.full_like(r, -3.0), torch.ones_like(r, dtype=torch.bool)


def test_bounds_are_on_learner_over_rollout() -> None:
    """Published k1 bounds read the other way: [0.5, 4] on r keeps 3 and drops 1/3; theirs would do the reverse."""
    config = CorrectionConfig(reject_unit="token", reject_by="k1", reject_low=0.5, reject_high=4)
    assert correction(*case([3.0, 1 / 3, 1.0]), config)[1].tolist() == [[True, False, True]]


def test_what_is_rejected_leaves_the_denominator_and_what_is_masked_does_not() -> None:
    logp, rollout, mask = case([1.0, 9.0, 1.0, 1.0])
    band = {"reject_unit": "token", "reject_by": "k1", "reject_low": 0.5, "reject_high": 5.0}
    _, left, _ = correction(logp, rollout, mask, CorrectionConfig(**band))
    masked, kept, _ = correction(logp, rollout, mask, CORRECTION_PRESETS["icepop"])
    assert masked[0, 1].item() == 0.0
    share = [aggregation_scale(valid, "token_mean").sum(-1).item() for valid in (left, kept)]
    assert share == pytest.approx([1.0, 1.0])
    assert aggregation_scale(left, "token_mean")[0, 0].item() == pytest.approx(1 / 3)
    assert aggregation_scale(kept, "token_mean")[0, 0].item() == pytest.approx(1 / 4)


def test_the_geometric_band_is_on_the_mean_and_the_sum_on_the_product() -> None:
    drift = 1.0004
    batch = case([drift] * 8, [1.002, 1 / 1.002] * 4, [drift**3] * 8)
    kept = correction(*batch, CORRECTION_PRESETS["geometric"])[1].any(-1)
    assert kept.tolist() == [True, True, False]  # 1.0004 and 1 are in the band, 1.0012 is not
    product = CorrectionConfig(reject_unit="sequence_sum", reject_by="k1", reject_low=0.999, reject_high=1.001)
    assert correction(*batch, product)[1].any(-1).tolist() == [False, True, False]  # 1.0004^8 = 1.0032


def test_the_worst_token_decides_on_either_side() -> None:
    worst = CorrectionConfig(reject_unit="sequence_max", reject_by="k1", reject_low=0.5, reject_high=2.0)
    batch = case([1.0, 1.9, 0.6], [1.0, 2.1, 1.0], [0.4, 1.0, 1.0])
    assert correction(*batch, worst)[1].tolist() == [[True] * 3, [False] * 3, [False] * 3]


def test_veto_drops_the_sequence_of_one_token_that_the_learner_would_not_have_said() -> None:
    batch = case([1.0, 9e-5, 1.0], [1.0, 2e-4, 1e6])
    weight, valid, metrics = correction(*batch, CORRECTION_PRESETS["token_tis_veto"])
    assert valid.tolist() == [[False] * 3, [True] * 3]
    torch.testing.assert_close(weight, torch.tensor([[0, 0, 0], [1, 2e-4, 2.0]], dtype=torch.float64))
    measured = values(metrics)
    assert measured["correction/vetoed_sequence_fraction"].item() == 0.5
    assert measured["correction/rejected_sequence_fraction"].item() == 0.5
    assert measured["correction/dropped_tokens"].item() == 0.0  # those were finite


def test_a_rejected_token_still_counts_in_its_sequences_weight() -> None:
    config = CorrectionConfig(
        mode="truncate", level="sequence", truncate_at=100, reject_unit="token", reject_by="k1", reject_high=2.5
    )
    weight, valid, _ = correction(*case([2.0, 3.0]), config)
    assert valid.tolist() == [[True, False]]
    torch.testing.assert_close(weight, torch.tensor([[6.0, 0.0]], dtype=torch.float64))


def test_normalised_weights_have_mean_one_in_tokens_or_in_sequences() -> None:
    """Two tokens beside one: by the token the mean is over three, by the sequence over two."""
    logp, rollout, mask = case([2.0, 0.5], [4.0, 1.0])
    mask[1, 1] = False
    by_token = CorrectionConfig(mode="truncate", level="token", truncate_at=3, normalize=True)
    weight = correction(logp, rollout, mask, by_token)[0]
    torch.testing.assert_close(weight, torch.tensor([[2, 0.5], [3, 0]], dtype=torch.float64) * 3 / 5.5)
    by_sequence = CorrectionConfig(mode="truncate", level="sequence", truncate_at=3, normalize=True)
    weight = correction(logp, rollout, mask, by_sequence)[0]
    torch.testing.assert_close(weight, torch.tensor([[0.5, 0.5], [1.5, 0]], dtype=torch.float64))


def test_weights_that_are_all_zero_stay_zero() -> None:
    config = CorrectionConfig(mode="mask", level="token", mask_high=0.5, normalize=True)
    weight, _, metrics = correction(*case([2.0, 3.0]), config)
    assert weight.tolist() == [[0.0, 0.0]]
    assert values(metrics)["correction/ess"].item() == 0.0


@pytest.mark.parametrize("name", ["token_tis", "sequence_mis", "sequence_is", "sequence_rejection", "none"])
@settings(deadline=None, max_examples=20)
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


def test_k3_and_k2_agree_to_third_order_and_part_for_large_gaps() -> None:
    """r = 1.1: k2 = 0.004542, k3 = 0.004690; a bound between them tells the two apart."""
    batch = case([1.1])
    assert math.log(1.1) ** 2 / 2 < 0.0046 < 0.1 - math.log(1.1)
    kept = [
        correction(*batch, CorrectionConfig(reject_unit="token", reject_by=kind, reject_high=0.0046))[1].item()
        for kind in ("k2", "k3")
    ]
    assert kept == [True, False]


def test_bypass_weighs_nothing() -> None:
    weight, valid, _ = correction(*case([7.0, 0.1]), CORRECTION_PRESETS["bypass"])
    assert weight.tolist() == [[1.0, 1.0]]
    assert valid.all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
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
    ],
)
def test_bad_configurations_say_what_to_do(fields: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CorrectionConfig.model_validate(fields)
