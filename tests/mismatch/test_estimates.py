"""The gap's figures against plain loops, their intervals against leaving out by hand, and how often these hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mantissa.mismatch.estimates import FEWEST, gap_estimates
from mantissa.mismatch.intervals import student_interval
from mantissa.mismatch.metrics import gap_metrics
from mantissa.mismatch.tables import GAP_FIGURES

NAMES = [figure.name for figure in GAP_FIGURES]


def batch(rows: int, width: int, scale: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 log-probs of two policies ``scale`` apart, a tenth of them equal, and a ragged mask; padding is garbage."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -5 * torch.rand(rows, width, generator=generator)
    away = scale * torch.randn(rows, width, generator=generator)
    learner = torch.where(torch.rand(rows, width, generator=generator) < 0.1, rollout, rollout + away)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    mask = torch.arange(width) < lengths
    return rollout.masked_fill(~mask, math.nan), learner.masked_fill(~mask, math.inf), mask


def oracle(rollout: Tensor, learner: Tensor, mask: Tensor) -> dict[str, float]:
    """Every figure by its definition, in extended precision, a token at a time."""
    gaps, equal = [], []
    for r, q, m in zip(rollout.numpy(), learner.numpy(), mask.numpy(), strict=True):
        gaps.append(q[m].astype(np.longdouble) - r[m].astype(np.longdouble))
        equal += [a.tobytes() == b.tobytes() for a, b in zip(r[m], q[m], strict=True)]
    d = np.concatenate(gaps)
    total = np.array([gap.sum() for gap in gaps])
    t = np.concatenate([np.arange(1, gap.size + 1) for gap in gaps]).astype(np.longdouble)
    running = np.concatenate([np.cumsum(gap) for gap in gaps])
    slope = ((t - t.mean()) * (running - running.mean())).sum() / ((t - t.mean()) ** 2).sum()
    return {
        "abs_logp_diff_mean": float(np.abs(d).mean()),
        "k3_kl": float((np.expm1(d) - d).mean()),
        "seq_log_ratio_std": float(np.sqrt(((total - total.mean()) ** 2).mean())),
        "log_ratio_slope": float(1000 * slope),
        "equal_fraction": float(np.mean(equal)),
        "phantom_clip_fraction": float(np.mean(np.abs(np.exp(d) - 1) > 0.2)),
    }


@pytest.mark.parametrize("scale", [3e-7, 1e-3, 0.3])
@pytest.mark.parametrize(("rows", "width"), [(9, 40), (40, 7), (3, 300)])
def test_every_figure_is_its_definition(scale: float, rows: int, width: int) -> None:
    rollout, learner, mask = batch(rows, width, scale)
    measured = gap_estimates(rollout, learner, mask, torch.arange(rows))
    expected = oracle(rollout, learner, mask)
    assert expected.keys() == measured.figures.keys() == set(NAMES)
    for name, value in expected.items():
        assert measured.figures[name].value == pytest.approx(value, rel=1e-9, abs=1e-15), name
    assert measured.tokens == int(mask.sum())
    assert measured.differing == round(measured.tokens * (1 - expected["equal_fraction"]))
    assert measured.nonfinite == 0
    of_a_run = gap_metrics(rollout, learner, mask)
    for name in ("abs_logp_diff_mean", "k3_kl", "seq_log_ratio_std", "equal_fraction"):
        assert measured.figures[name].value == pytest.approx(float(of_a_run[f"gap/{name}"]), rel=1e-9, abs=1e-15)


def test_a_token_that_is_not_finite_leaves_with_its_sequences_sum() -> None:
    rollout, learner, mask = batch(12, 20, 0.1)
    long = int(mask.sum(1).argmax())
    kept = torch.arange(12) != long
    broken = learner.clone()
    broken[long, 1] = -math.inf
    measured = gap_estimates(rollout, broken, mask, torch.arange(12))
    without_row = oracle(rollout[kept], learner[kept], mask[kept])
    mask[long, 1] = False  # as a loop sees it: one token fewer
    without_token = oracle(rollout, learner, mask)
    assert (measured.nonfinite, measured.tokens) == (1, int(mask.sum()))
    for name in NAMES:
        of_sequences = name in ("seq_log_ratio_std", "log_ratio_slope")
        expected = (without_row if of_sequences else without_token)[name]
        assert measured.figures[name].value == pytest.approx(expected, rel=1e-9), name


@pytest.mark.parametrize(
    ("prompts", "samples", "unit"), [(FEWEST, 3, "prompts"), (2, 5, "completions"), (1, FEWEST - 1, "neither")]
)
def test_intervals_leave_out_prompts_or_completions(prompts: int, samples: int, unit: str) -> None:
    rows = prompts * samples
    rollout, learner, mask = batch(rows, 30, 0.2, seed=4)
    prompt_B = torch.arange(rows) // samples
    measured = gap_estimates(rollout, learner, mask, prompt_B)
    assert measured.unit == unit
    if unit == "neither":
        assert all(one.low is None and one.high is None for one in measured.figures.values())
        return
    group_B = prompt_B if unit == "prompts" else torch.arange(rows)
    units = int(group_B.max()) + 1
    parts = [oracle(*(x[group_B != unit] for x in (rollout, learner, mask))) for unit in range(units)]
    for name in NAMES:
        one = measured.figures[name]
        scale, back = (np.log, np.exp)
        if name.endswith("fraction"):
            scale, back = (lambda p: np.log(p / (1 - p))), (lambda x: 1 / (1 + np.exp(-x)))
        elif name == "log_ratio_slope":
            scale, back = (lambda x: x), (lambda x: x)
        left_out = scale(np.array([part[name] for part in parts]))
        error = np.sqrt((units - 1) / units * ((left_out - left_out.mean()) ** 2).sum())
        low, high = student_interval(scale(one.value), error, units - 1)
        assert (one.low, one.high) == pytest.approx((back(low), back(high)), rel=1e-7), name


def test_an_interval_is_of_students_t() -> None:
    assert student_interval(1.0, 2.0, 1) == pytest.approx((1 - 2 * 12.7062, 1 + 2 * 12.7062), rel=1e-5)  # tan(0.475 pi)
    assert student_interval(0.0, 1.0, 7)[1] == pytest.approx(2.364624, rel=1e-6)  # from tables


def test_none_and_all_have_the_interval_of_clopper_and_pearson() -> None:
    rollout, _, mask = batch(10, 20, 0.0)
    measured = gap_estimates(rollout, rollout, mask, torch.arange(10))
    n = measured.tokens
    equal, clipped = measured.figures["equal_fraction"], measured.figures["phantom_clip_fraction"]
    assert (measured.differing, equal.value, clipped.value) == (0, 1.0, 0.0)
    assert (1 - clipped.high) ** n == pytest.approx(0.025)  # none of n is as likely as that, were it the share
    assert equal.low**n == pytest.approx(0.025)
    assert (equal.high, clipped.low) == (1.0, 0.0)
    for name in ("abs_logp_diff_mean", "k3_kl", "seq_log_ratio_std", "log_ratio_slope"):
        one = measured.figures[name]
        assert (one.value, one.low, one.high) == (0.0, 0.0, 0.0)


def test_completions_of_one_token_have_no_slope_and_nothing_measured_no_figure() -> None:
    rollout, learner, mask = batch(9, 1, 0.1)
    assert gap_estimates(rollout, learner, mask, torch.arange(9)).figures["log_ratio_slope"].value == 0
    none = gap_estimates(rollout, learner.fill_(math.nan), mask, torch.arange(9))
    assert (none.tokens, none.nonfinite) == (0, 9)
    assert all(math.isfinite(one.value) for one in none.figures.values())
