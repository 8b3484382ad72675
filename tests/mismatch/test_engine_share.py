"""The engine's share of the gap against plain Python in float64, and on gaps whose parts are known."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mantissa.mismatch.metrics import engine_share, gap_metrics
from mantissa.mismatch.tables import ENGINE_METRICS

INF, NAN = float("inf"), float("nan")
SHARE, ENGINE, OTHER, NONFINITE = (metric.name for metric in ENGINE_METRICS)


def oracle(rollout_BT: Tensor, exact_BT: Tensor, learner_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """Every metric from its declared formula, one token at a time."""
    tokens = [
        scored
        for scored, kept in zip(
            zip(*(x.double().flatten().tolist() for x in (rollout_BT, exact_BT, learner_BT)), strict=True),
            mask_BT.flatten().tolist(),
            strict=True,
        )
        if kept
    ]
    good = [scored for scored in tokens if all(map(math.isfinite, scored))]
    d = [learner - rollout for rollout, _, learner in good]
    e = [exact - rollout for rollout, exact, _ in good]
    f = [learner - exact for _, exact, learner in good]
    found = {
        ENGINE: math.fsum(map(abs, e)) / max(len(good), 1),
        OTHER: math.fsum(map(abs, f)) / max(len(good), 1),
        NONFINITE: len(tokens) - len(good),
    }
    if any(d):
        share = math.fsum(a * b for a, b in zip(e, d, strict=True)) / math.fsum(x * x for x in d)
        return {SHARE: share} | found
    return found


def measured(*scored: Tensor) -> dict[str, float]:
    values = engine_share(*scored)
    assert all(value.dtype == torch.float64 and value.shape == () for value in values.values())
    return {name: float(value) for name, value in values.items()}


def drawn(seed: int, shape: tuple[int, int] = (6, 9)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A rollout's log-probs, two independent disturbances of them, and a ragged mask."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(shape, generator=generator) * 4
    e, f = (torch.randn(shape, generator=generator) for _ in range(2))
    length_B = torch.randint(1, shape[1] + 1, (shape[0], 1), generator=generator)
    return rollout, e, f, torch.arange(shape[1]) < length_B


logps = st.one_of(st.floats(-30, 0, width=32), st.sampled_from([0.0, -0.0, -1e-45, -INF, NAN, INF, -3e38]))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(logps, logps, logps, st.booleans()), min_size=1, max_size=12))
def test_every_metric_is_its_formula(tokens: list[tuple[float, float, float, bool]]) -> None:
    *scored, mask = (torch.tensor([column]) for column in zip(*tokens, strict=True))
    scored = [x.float() for x in scored]
    found, expected = measured(*scored, mask), oracle(*scored, mask)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert math.isfinite(value)
        assert value == pytest.approx(expected[name], rel=1e-12, abs=1e-300), name


def test_a_gap_of_one_part_only_is_all_of_it_or_nothing() -> None:
    rollout, e, _, mask = drawn(4)
    other = rollout + 1e-3 * e
    assert measured(rollout, other, other, mask) == {
        SHARE: 1.0,
        ENGINE: float(gap_metrics(rollout, other, mask)["gap/abs_logp_diff_mean"]),
        OTHER: 0.0,
        NONFINITE: 0.0,
    }
    assert measured(rollout, rollout, other, mask)[SHARE] == 0.0
    assert measured(rollout, rollout, other, mask)[ENGINE] == 0.0


@pytest.mark.parametrize("mask", [True, False])
def test_without_a_gap_there_is_no_share(mask: bool) -> None:
    rollout, e, _, _ = drawn(6)
    every = torch.full(rollout.shape, mask)
    found = measured(rollout, rollout + e, rollout, every)
    assert SHARE not in found
    assert found[ENGINE] == found[OTHER]
    assert (found[ENGINE] > 0) == mask


def test_masked_positions_may_hold_anything_and_what_is_not_finite_is_counted() -> None:
    rollout, e, f, mask = drawn(7)
    scored = [rollout, rollout + e, rollout + e + f]
    clean = measured(*scored, mask)
    dirty = [torch.where(mask, x, torch.tensor(bad)) for x, bad in zip(scored, (NAN, INF, -INF), strict=True)]
    assert measured(*dirty, mask) == clean
    for broken in range(3):
        bad = [x.clone() for x in scored]
        bad[broken][0, 0] = NAN
        without = mask.clone()
        without[0, 0] = False
        assert measured(*bad, mask) == measured(*scored, without) | {NONFINITE: 1.0}


def test_no_dtype_but_fp32_and_no_two_of_them() -> None:
    rollout, e, _, mask = drawn(8)
    with pytest.raises(TypeError, match=r"all log-probs in fp32, not torch\.float32 and torch\.float16"):
        engine_share(rollout, e.half(), rollout, mask)
    wide = [x.double() for x in (rollout, rollout + e, rollout - e)]
    assert measured(*wide, mask) == pytest.approx(oracle(*wide, mask), rel=1e-12)
