"""Advantages, policy losses, rollout correction, aggregation: pure functions of tensors."""

from mantissa.algorithms.advantages import ADVANTAGES, AdvantageKind, advantage
from mantissa.algorithms.aggregation import AggregationKind, aggregation_scale, batch_counts
from mantissa.algorithms.correction import correction, importance_weights
from mantissa.algorithms.correction_config import CORRECTION_PRESETS, CorrectionConfig
from mantissa.algorithms.losses import (
    CISPOConfig,
    DAPOConfig,
    GSPOConfig,
    PolicyLoss,
    PolicyLossConfig,
    PPOClipConfig,
    ReinforceConfig,
    policy_loss,
)
from mantissa.algorithms.tally import Tally, TallyKind, merge, values

__all__ = [
    "ADVANTAGES",
    "CORRECTION_PRESETS",
    "AdvantageKind",
    "AggregationKind",
    "CISPOConfig",
    "CorrectionConfig",
    "DAPOConfig",
    "GSPOConfig",
    "PPOClipConfig",
    "PolicyLoss",
    "PolicyLossConfig",
    "ReinforceConfig",
    "Tally",
    "TallyKind",
    "advantage",
    "aggregation_scale",
    "batch_counts",
    "correction",
    "importance_weights",
    "merge",
    "policy_loss",
    "values",
]
