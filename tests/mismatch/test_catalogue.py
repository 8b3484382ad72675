"""What is declared is what is reported: nothing more, nothing less, nothing twice."""

from __future__ import annotations

import pytest
import torch

from mantissa.algorithms import (
    ADVANTAGES,
    CORRECTION_PRESETS,
    CISPOConfig,
    DAPOConfig,
    FlowRLConfig,
    GSPOConfig,
    KLConfig,
    Loss,
    PPOClipConfig,
    ReinforceConfig,
    advantage,
    correction,
    kl_loss,
    kl_reward,
    reference_drift,
)
from mantissa.mismatch.metrics import engine_share, gap_metrics
from mantissa.mismatch.tables import (
    ADVANTAGE_METRICS,
    ALL_METRICS,
    CORRECTION_METRICS,
    ENGINE_METRICS,
    FLOWRL_METRICS,
    GAP_METRICS,
    POLICY_METRICS,
    REFERENCE_METRICS,
    Metric,
)

ONE = torch.ones(2, 2)


def names(metrics: tuple[Metric, ...]) -> set[str]:
    return {metric.name for metric in metrics}


@pytest.mark.parametrize("preset", CORRECTION_PRESETS)
def test_correction(preset: str) -> None:
    assert set(correction(ONE, ONE, ONE.bool(), CORRECTION_PRESETS[preset])[2]) == names(CORRECTION_METRICS)


def test_engine_share() -> None:
    assert set(engine_share(0 * ONE, ONE, ONE, ONE.bool())) == names(ENGINE_METRICS)
    assert names(ENGINE_METRICS) < names(ALL_METRICS)


def parts(config: Loss) -> set[str]:
    return set(config.ratio_parts(ONE, ONE, ONE, ONE[0], ONE.bool(), ONE.bool()))


def test_policy() -> None:
    reported = {
        config.kind: config.loss(ONE, ONE, ONE[0], ONE.bool(), ONE, ONE)[1].keys() | parts(config)
        for config in (PPOClipConfig(), DAPOConfig(), GSPOConfig(), CISPOConfig(), ReinforceConfig())
    }
    clip = {"policy/clip_fraction", "policy/phantom_clip_fraction"}
    assert reported.pop("reinforce") == names(POLICY_METRICS) - clip
    assert all(metrics == names(POLICY_METRICS) for metrics in reported.values())


def test_flowrl_and_the_reference() -> None:
    every = ONE.bool()
    flowrl = FlowRLConfig().loss(ONE, ONE, ONE[0], every, ONE, ONE, ref_logp_BT=ONE, log_z_B=ONE[0])[1]
    assert flowrl.keys() | parts(FlowRLConfig()) == names(FLOWRL_METRICS) | (
        names(POLICY_METRICS) - {"policy/clip_fraction"}
    )
    config = KLConfig(coefficient=0.1)
    assert set(kl_loss(ONE, ONE, every, ONE, ONE, config)[1]) == names(REFERENCE_METRICS)
    assert set(reference_drift(ONE, ONE, every)) == names(REFERENCE_METRICS) - {"reference/penalty"}
    assert set(kl_reward(ONE[0], ONE, ONE, every, config)[1]) == names(REFERENCE_METRICS)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_advantage(kind: str) -> None:
    assert set(advantage(ONE[0], torch.tensor([0, 0]), kind)[1]) == names(ADVANTAGE_METRICS)


def test_each_is_declared_once_and_in_full() -> None:
    assert names(FLOWRL_METRICS) | names(REFERENCE_METRICS) < names(ALL_METRICS)
    assert len(names(ALL_METRICS)) == len(ALL_METRICS)
    for metric in ALL_METRICS:
        assert all((metric.formula, metric.unit)), metric.name
        assert metric.source or not metric.gated, f"{metric.name} has a gate and no source for it"


# ---- the declared ranges pass what is healthy and fail what is not


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
    assert found >= {"gap/k3_kl", "gap/ess"}
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
