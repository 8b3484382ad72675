"""The declared ranges pass what is healthy and fail what is not."""

from __future__ import annotations

import torch

from mantissa.mismatch import CORRECTION_METRICS, GAP_METRICS, gap_metrics


def unhealthy(rollout: torch.Tensor, learner: torch.Tensor) -> set[str]:
    measured = gap_metrics(rollout, learner, torch.ones_like(rollout, dtype=torch.bool))
    return {
        metric.name for metric in GAP_METRICS if metric.gated and not metric.is_healthy(float(measured[metric.name]))
    }


def test_rounding_noise_is_healthy() -> None:
    rollout = -3 * torch.rand(8, 50)
    assert not unhealthy(rollout, rollout + 1e-6 * torch.randn(8, 50))


def test_a_collapsed_run_is_not() -> None:
    rollout = -3 * torch.rand(8, 50)
    found = unhealthy(rollout, rollout - 0.5 + 2 * torch.randn(8, 50))
    assert found >= {"gap/kl", "gap/k3_kl", "gap/abs_logp_diff_mean", "gap/chi2_token", "gap/ess"}
    assert not found & {"gap/nonfinite", "gap/tokens"}


def test_an_empty_measurement_is_not() -> None:
    assert unhealthy(torch.zeros(0, 4), torch.zeros(0, 4)) == {"gap/tokens"}


def test_a_broken_token_is_not() -> None:
    assert "gap/nonfinite" in unhealthy(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, float("nan")]]))


def test_corrections_have_ranges_too() -> None:
    healthy = {"correction/weight_mean": 1.0, "correction/weight_std": 0.1, "correction/ess": 0.9,
               "correction/dropped_tokens": 0.0}  # fmt: skip
    gated = {metric.name: metric for metric in CORRECTION_METRICS if metric.gated}
    assert gated.keys() == healthy.keys()
    collapsed = healthy | {"correction/ess": 0.1, "correction/dropped_tokens": 2.0}
    for values, expected in ((healthy, set()), (collapsed, {"correction/ess", "correction/dropped_tokens"})):
        assert {name for name, metric in gated.items() if not metric.is_healthy(values[name])} == expected
