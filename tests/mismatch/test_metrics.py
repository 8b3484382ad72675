"""The gap's metrics against numpy and plain Python, in float64, one token and one sequence at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mantissa.mismatch.estimates import gap_estimates
from mantissa.mismatch.metrics import gap_metrics
from mantissa.mismatch.tables import GAP_METRICS, Metric

INF, NAN = float("inf"), float("nan")
NAMES = [metric.name for metric in GAP_METRICS]


def clamp(x: float) -> float:
    return min(max(x, -20.0), 20.0)


def mean(x: list[float], default: float = 0.0) -> float:
    return math.fsum(x) / len(x) if x else default


def slope_per_1k(lengths: list[int], sums: list[float]) -> float:
    if len(set(lengths)) < 2:
        return 0.0
    return 1000 * float(np.polyfit(lengths, sums, 1)[0])


def pearson(p: list[float], q: list[float]) -> float:
    if p == q:
        return 1.0
    if len(set(p)) < 2 or len(set(q)) < 2:
        return 0.0
    return float(np.corrcoef(p, q)[0, 1])


def oracle(rollout_BT: Tensor, learner_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """Every metric from its declared formula."""
    pairs, sequences, bad = [], [], 0
    for row_rollout, row_learner, row_mask in zip(
        rollout_BT.tolist(), learner_BT.tolist(), mask_BT.tolist(), strict=True
    ):
        row = [(a, b) for a, b, m in zip(row_rollout, row_learner, row_mask, strict=True) if m]
        good = [(a, b) for a, b in row if math.isfinite(a) and math.isfinite(b)]
        bad += len(row) - len(good)
        pairs += good
        if good and len(good) == len(row):
            sequences.append([b - a for a, b in good])
    log_r = [b - a for a, b in pairs]
    r = [math.exp(clamp(x)) for x in log_r]
    p, q = [math.exp(min(a, 20.0)) for a, _ in pairs], [math.exp(min(b, 20.0)) for _, b in pairs]
    sums, lengths = [math.fsum(s) for s in sequences], [len(s) for s in sequences]
    return {
        "gap/kl": mean([a - b for a, b in pairs]),
        "gap/k3_kl": mean([math.expm1(clamp(x)) - clamp(x) for x in log_r]),
        "gap/abs_logp_diff_mean": mean([abs(x) for x in log_r]),
        "gap/abs_logp_diff_max": max(map(abs, log_r), default=0.0),
        "gap/prob_diff_mean": mean([abs(a - b) for a, b in zip(p, q, strict=True)]),
        "gap/prob_diff_max": max((abs(a - b) for a, b in zip(p, q, strict=True)), default=0.0),
        "gap/pearson": pearson(p, q),
        "gap/ppl_ratio": mean([math.exp(clamp(-s / n)) for s, n in zip(sums, lengths, strict=True)], 1.0),
        "gap/chi2_token": mean([math.expm1(2 * clamp(x)) for x in log_r]),
        "gap/chi2_seq": mean([math.expm1(2 * clamp(s)) for s in sums]),
        "gap/ess": 1 / mean([(x / mean(r)) ** 2 for x in r]) if r else 1.0,
        "gap/seq_log_ratio_min": min(sums, default=0.0),
        "gap/seq_log_ratio_mean": mean(sums),
        "gap/seq_log_ratio_max": max(sums, default=0.0),
        "gap/seq_log_ratio_std": float(np.std(sums)) if sums else 0.0,
        "gap/seq_log_ratio_slope": slope_per_1k(lengths, sums),
        "gap/fraction_outside": mean([float(not 0.9 <= x <= 1.1) for x in r]),
        "gap/equal_fraction": mean([float(a == b) for a, b in pairs], 1.0),
        "gap/nonfinite": float(bad),
        "gap/tokens": float(len(pairs)),
    }


def random_case(seed: int, spread: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    rollout_BT = -3 * torch.rand(7, 9, generator=random)
    learner_BT = rollout_BT + spread * torch.randn(7, 9, generator=random)
    learner_BT[3] = rollout_BT[3]
    mask_BT = torch.rand(7, 9, generator=random) > 0.3
    mask_BT[seed % 7] = False
    rollout_BT[0, 1], learner_BT[1, 2], learner_BT[1, 3] = -INF, NAN, INF
    return rollout_BT.to(dtype), learner_BT.to(dtype), mask_BT


def measure(rollout_BT: Tensor, learner_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    metrics = gap_metrics(rollout_BT, learner_BT, mask_BT)
    assert all(value.dtype == torch.float64 and value.dim() == 0 for value in metrics.values())
    return {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.0, 1e-7, 1e-3, 0.3, 30.0]))
def test_every_metric_is_its_formula(dtype: torch.dtype, seed: int, spread: float) -> None:
    case = random_case(seed, spread, dtype)
    got, expected = measure(*case), oracle(*case)
    assert got.keys() == set(NAMES)
    for name in NAMES:
        # Sums that cancel (kl, slope) are good to float64's 1e-16 of their terms, which are at most 30 x 9 here; the
        # correlation of numpy is good to about 1e-13.
        assert got[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-12 * max(1.0, spread)), name


def test_gaps_of_fp32_rounding_are_measured_not_drowned() -> None:
    """Every token off by one unit in the last place: k3 is 4e-15 where fp32 arithmetic gives 0 or 1e-8."""
    rollout_BT = -torch.linspace(0.51, 0.99, 400).reshape(4, 100)
    learner_BT = torch.nextafter(rollout_BT, torch.zeros(()))
    gap = 2.0**-24  # the spacing of fp32 in [0.5, 1)
    mask_BT = torch.arange(100) < torch.tensor([[100], [70], [40], [10]])
    got = measure(rollout_BT, learner_BT, mask_BT)
    assert got["gap/kl"] == pytest.approx(-gap, rel=1e-12, abs=0)
    assert got["gap/k3_kl"] == pytest.approx(gap**2 / 2, rel=1e-6, abs=0)
    assert got["gap/chi2_token"] == pytest.approx(2 * gap, rel=1e-6, abs=0)
    assert got["gap/ppl_ratio"] - 1 == pytest.approx(-gap, rel=1e-6, abs=0)
    assert got["gap/seq_log_ratio_slope"] == pytest.approx(1000 * gap, rel=1e-6, abs=0)
    assert got["gap/equal_fraction"] == 0.0
    naive = (learner_BT - rollout_BT).exp() - 1 - (learner_BT - rollout_BT)
    assert not 0.1 < naive.mean().item() / (gap**2 / 2) < 10  # what fp32 would have reported


def test_one_broken_token_leaves_its_sequence_out_of_the_sums() -> None:
    rollout_BT = torch.full((2, 4), -1.0)
    learner_BT = torch.tensor([[-1.5, NAN, -1.5, -1.5], [-1.25, -1.25, -1.25, -1.25]])
    got = measure(rollout_BT, learner_BT, torch.ones(2, 4, dtype=torch.bool))
    assert (got["gap/nonfinite"], got["gap/tokens"]) == (1.0, 7.0)
    assert got["gap/seq_log_ratio_min"] == got["gap/seq_log_ratio_max"] == -1.0
    assert got["gap/abs_logp_diff_max"] == 0.5  # its other tokens are still tokens


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        ([0.3, 0.3, 0.3], [0.3, 0.3, 0.3], 1.0),  # constant, and equal
        ([0.3, 0.3, 0.3], [0.2, 0.2, 0.2], 0.0),  # constant, and not equal: no correlation to speak of
        ([0.3, 0.3, 0.3], [0.1, 0.2, 0.3], 0.0),
        ([0.1, 0.2, 0.3], [0.2, 0.4, 0.6], 1.0),
        ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1], -1.0),
        ([1e-200, 2e-200, 3e-200], [2e-200, 4e-200, 6e-200], 1.0),  # variances underflow even float64
    ],
)
def test_correlation_where_numpy_would_divide_zero_by_zero(p: list[float], q: list[float], expected: float) -> None:
    logs = [torch.tensor([x], dtype=torch.float64).log() for x in (p, q)]
    got = measure(*logs, torch.ones(1, 3, dtype=torch.bool))
    assert got["gap/pearson"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("count", range(2, 12))
def test_constants_that_differ_from_their_rounded_mean_do_not_correlate(count: int) -> None:
    """x - mean(x) of ten times 0.1 is 1.4e-17 each, which scaled up correlates perfectly with any other such noise."""
    for p, q in ((0.1, 0.7), (0.3, 0.9), (0.2, 0.6)):
        logs = [torch.full((1, count), x, dtype=torch.float64).log() for x in (p, q)]
        assert measure(*logs, torch.ones(1, count, dtype=torch.bool))["gap/pearson"] == 0.0


def test_equal_means_equal_bits() -> None:
    rollout_BT, learner_BT = torch.tensor([[0.0, -1.0, -2.0]]), torch.tensor([[-0.0, -1.0, -2.0]])
    got = measure(rollout_BT, learner_BT, torch.ones(1, 3, dtype=torch.bool))
    assert got["gap/equal_fraction"] == pytest.approx(2 / 3)  # 0.0 == -0.0, but not to the last bit
    transposed = measure(rollout_BT.T, learner_BT.T, torch.ones(3, 1, dtype=torch.bool))
    assert transposed["gap/equal_fraction"] == pytest.approx(2 / 3)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), garbage=st.sampled_from([NAN, INF, -INF, 3e38, -3e38]), padding=st.integers(0, 4))
def test_padding_is_never_seen(seed: int, garbage: float, padding: int) -> None:
    rollout_BT, learner_BT, mask_BT = random_case(seed, 0.2)
    clean = measure(rollout_BT, learner_BT, mask_BT)

    def pad(x: Tensor, fill: Any) -> Tensor:
        return torch.nn.functional.pad(x, (padding, 0, 0, padding), value=fill)

    dirty = measure(
        pad(torch.where(mask_BT, rollout_BT, garbage), garbage),
        pad(torch.where(mask_BT, learner_BT, -garbage), -garbage),
        pad(mask_BT, False),
    )
    for name in NAMES:
        assert dirty[name] == pytest.approx(clean[name], rel=1e-12, abs=1e-14), name


@settings(deadline=None, max_examples=50)
@given(
    values=st.lists(
        st.tuples(
            st.floats(width=32, allow_nan=True, allow_infinity=True),
            st.floats(width=32, allow_nan=True, allow_infinity=True),
            st.booleans(),
        ),
        min_size=6,
        max_size=6,
    )
)
def test_never_nan_or_infinite_whatever_the_input(values: list[tuple[float, float, bool]]) -> None:
    rollout_BT, learner_BT = (torch.tensor([v[i] for v in values]).reshape(2, 3) for i in (0, 1))
    got = measure(rollout_BT, learner_BT, torch.tensor([v[2] for v in values]).reshape(2, 3))
    assert all(math.isfinite(value) for value in got.values()), got


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 3)])
def test_nothing_measured_is_said(shape: tuple[int, int]) -> None:
    junk = torch.full(shape, NAN)
    got = measure(junk, junk, torch.zeros(shape, dtype=torch.bool))
    no_gap = {"gap/ess": 1.0, "gap/pearson": 1.0, "gap/ppl_ratio": 1.0, "gap/equal_fraction": 1.0}
    assert got == dict.fromkeys(NAMES, 0.0) | no_gap


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float64), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)]
)
def test_a_cast_that_would_invent_equality_is_refused(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    logps = [torch.zeros(1, 1, dtype=dtype) for dtype in dtypes]
    for measured in (gap_metrics, lambda *scored: gap_estimates(*scored, torch.zeros(1))):
        with pytest.raises(TypeError, match="fp32"):
            measured(*logps, mask)


@pytest.mark.parametrize(
    ("healthy", "inside", "outside", "text"),
    [
        ((-0.1, 0.1), [-0.1, 0.0, 0.1], [-0.11, 0.11, NAN, INF], "-0.1 to 0.1"),
        ((0.3, None), [0.3], [0.29, NAN, INF], "0.3 or more"),
        ((None, 1.0), [1.0], [1.01, NAN, -INF], "1 or less"),
        ((0.0, 0.0), [0.0], [1.0, NAN], "0"),
        ((None, None), [0.0], [NAN, INF, -INF], ""),
    ],
)
def test_healthy_ranges(healthy: Any, inside: list[float], outside: list[float], text: str) -> None:
    metric = Metric("m", "f", "u", healthy)
    assert all(metric.is_healthy(x) for x in inside)
    assert not any(metric.is_healthy(x) for x in outside)
    assert metric.healthy_text == text
    assert metric.gated is bool(text)
