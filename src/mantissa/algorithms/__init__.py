"""Advantages, policy losses, rollout correction, aggregation: pure functions of tensors."""

from mantissa.algorithms.advantages import ADVANTAGES, AdvantageKind, advantage
from mantissa.algorithms.aggregation import (
    Accumulator,
    AggregationKind,
    aggregation_scale,
    merge,
    values,
)
from mantissa.algorithms.correction import CORRECTION_PRESETS, CorrectionConfig, correction, importance_weights
from mantissa.algorithms.losses import (
    CISPOConfig,
    DAPOConfig,
    FlowRLConfig,
    GSPOConfig,
    PolicyLoss,
    PPOClipConfig,
    ReinforceConfig,
    flowrl_loss,
    log_ratio_parts,
    policy_loss,
)
from mantissa.algorithms.reference import KLConfig, kl_loss, kl_reward, reference_drift

__all__ = [
    "ADVANTAGES", "CORRECTION_PRESETS", "Accumulator", "AdvantageKind", "AggregationKind", "CISPOConfig",
    "CorrectionConfig", "DAPOConfig", "FlowRLConfig", "GSPOConfig", "KLConfig", "PPOClipConfig", "PolicyLoss",
    "ReinforceConfig", "advantage", "aggregation_scale", "correction", "flowrl_loss", "importance_weights", "kl_loss",
    "kl_reward", "log_ratio_parts", "merge", "policy_loss", "reference_drift", "values",
]  # fmt: skip
