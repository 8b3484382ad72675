"""Gates pass what is healthy, fail what is not, and fail what was not measured."""

from __future__ import annotations

import pytest
import torch

from mantissa.mismatch import CORRECTION_METRICS, GAP_METRICS, GATES, Metric, check_gates, gap_metrics


def verdicts(rollout: torch.Tensor, learner: torch.Tensor) -> dict[str, bool]:
    measured = gap_metrics(rollout, learner, torch.ones_like(rollout, dtype=torch.bool))
    return {finding.metric.name: finding.healthy for finding in check_gates(measured)}


def test_rounding_noise_is_healthy() -> None:
    rollout = -3 * torch.rand(8, 50)
    found = verdicts(rollout, rollout + 1e-6 * torch.randn(8, 50))
    assert list(found) == [metric.name for metric in GATES]
    assert all(found.values()), found


def test_a_collapsed_run_is_not() -> None:
    rollout = -3 * torch.rand(8, 50)
    found = verdicts(rollout, rollout - 0.5 + 2 * torch.randn(8, 50))
    unhealthy = {name for name, healthy in found.items() if not healthy}
    assert unhealthy >= {"gap/kl", "gap/k3_kl", "gap/abs_logp_diff_mean", "gap/chi2_token", "gap/ess"}
    assert found["gap/nonfinite"]
    assert found["gap/tokens"]


def test_an_empty_measurement_does_not_pass() -> None:
    nothing = torch.zeros(0, 4)
    found = verdicts(nothing, nothing)
    assert [name for name, healthy in found.items() if not healthy] == ["gap/tokens"]


def test_a_broken_token_does_not_pass() -> None:
    learner = torch.tensor([[-1.0, float("nan")]])
    assert not verdicts(torch.tensor([[-1.0, -1.0]]), learner)["gap/nonfinite"]


def test_missing_and_nan_are_not_healthy() -> None:
    gates = [Metric("a", "f", "u", (None, 1.0), "s"), Metric("b", "f", "u", (0.0, None), "s"), Metric("c", "f", "u")]
    findings = check_gates({"b": float("nan"), "c": 3.0}, gates)
    assert [(f.metric.name, f.healthy) for f in findings] == [("a", False), ("b", False)]  # c has no gate
    assert findings[0].value is None
    assert str(findings[0]) == "a = not measured: not healthy (expected 1 or less; s)"


@pytest.mark.parametrize(("value", "healthy"), [(0.05, True), (-0.05, True), (0.2, False), (-0.2, False)])
def test_numbers_from_a_file_do_as_well_as_tensors(value: float, healthy: bool) -> None:
    kl = [metric for metric in GAP_METRICS if metric.name == "gap/kl"]
    for given in (value, torch.tensor(value)):
        (finding,) = check_gates({"gap/kl": given}, kl)
        assert finding.healthy is healthy
        assert str(finding).startswith(f"gap/kl = {value:.4g}: {'healthy' if healthy else 'not healthy'}")


def test_correction_gates_work_the_same_way() -> None:
    healthy = {"correction/weight_mean": 1.0, "correction/weight_std": 0.1, "correction/ess": 0.9}
    findings = check_gates(healthy | {"correction/dropped_tokens": 0.0}, CORRECTION_METRICS)
    assert len(findings) == 4
    assert all(finding.healthy for finding in findings)
    collapsed = check_gates(healthy | {"correction/ess": 0.1, "correction/dropped_tokens": 2}, CORRECTION_METRICS)
    assert [f.metric.name for f in collapsed if not f.healthy] == ["correction/ess", "correction/dropped_tokens"]
