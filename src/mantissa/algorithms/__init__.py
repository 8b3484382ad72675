"""Advantages, policy losses, rollout correction, aggregation: pure functions of tensors."""

from mantissa.algorithms.advantages import ADVANTAGES, AdvantageKind, advantage, distillation, of_rewards
from mantissa.algorithms.aggregation import (
    Accumulator,
    AggregationKind,
    aggregation_scale,
    merge,
    values,
)
from mantissa.algorithms.centering import centre
from mantissa.algorithms.config import AlgorithmConfig, EntropyConfig, ReferenceConfig
from mantissa.algorithms.correction import (
    CORRECTION_PRESETS,
    CorrectionConfig,
    correction,
    importance_weights,
    off_policy_mask,
)
from mantissa.algorithms.gae import CriticConfig, gae, value_loss
from mantissa.algorithms.losses import (
    LOSSES,
    CISPOConfig,
    ClipCovConfig,
    CustomLossConfig,
    DAPOConfig,
    DPPOConfig,
    FlowRLConfig,
    GMPOConfig,
    GSPOConfig,
    KLCovConfig,
    Loss,
    LossConfig,
    PartitionSettings,
    PPOClipConfig,
    ReinforceConfig,
    SAPOConfig,
)
from mantissa.algorithms.reference import KLConfig, kl_loss, kl_reward, reference_drift

__all__ = [
    "ADVANTAGES",
    "CORRECTION_PRESETS",
    "LOSSES",
    "Accumulator",
    "AdvantageKind",
    "AggregationKind",
    "AlgorithmConfig",
    "CISPOConfig",
    "ClipCovConfig",
    "CorrectionConfig",
    "CriticConfig",
    "CustomLossConfig",
    "DAPOConfig",
    "DPPOConfig",
    "EntropyConfig",
    "FlowRLConfig",
    "GMPOConfig",
    "GSPOConfig",
    "KLConfig",
    "KLCovConfig",
    "Loss",
    "LossConfig",
    "PPOClipConfig",
    "PartitionSettings",
    "ReferenceConfig",
    "ReinforceConfig",
    "SAPOConfig",
    "advantage",
    "aggregation_scale",
    "centre",
    "correction",
    "distillation",
    "gae",
    "importance_weights",
    "kl_loss",
    "kl_reward",
    "merge",
    "of_rewards",
    "off_policy_mask",
    "reference_drift",
    "value_loss",
    "values",
]  # fmt: skip
