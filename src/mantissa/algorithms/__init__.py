"""Advantages, policy losses, rollout correction, aggregation: pure functions of tensors."""

from mantissa.algorithms.advantages import ADVANTAGES, AdvantageKind, advantage
from mantissa.algorithms.aggregation import AggregationKind, aggregation_scale, batch_counts
from mantissa.algorithms.correction import CORRECTION_PRESETS, CorrectionConfig, correction
from mantissa.algorithms.losses import PolicyLossConfig, PPOClipConfig, ReinforceConfig, policy_loss
from mantissa.algorithms.tally import Tally, TallyKind, merge, values

__all__ = [
    "ADVANTAGES",
    "CORRECTION_PRESETS",
    "AdvantageKind",
    "AggregationKind",
    "CorrectionConfig",
    "PPOClipConfig",
    "PolicyLossConfig",
    "ReinforceConfig",
    "Tally",
    "TallyKind",
    "advantage",
    "aggregation_scale",
    "batch_counts",
    "correction",
    "merge",
    "policy_loss",
    "values",
]
