"""The gap between the policy that samples and the policy that learns: metrics, their healthy ranges."""

from mantissa.mismatch.metrics import (
    ADVANTAGE_METRICS,
    ALL_METRICS,
    CORRECTION_METRICS,
    ENGINE_METRICS,
    FLOWRL_METRICS,
    GAP_METRICS,
    OBJECTIVE_METRICS,
    POLICY_METRICS,
    REFERENCE_METRICS,
    Metric,
    engine_share,
    gap_metrics,
)

__all__ = [
    "ADVANTAGE_METRICS", "ALL_METRICS", "CORRECTION_METRICS", "ENGINE_METRICS", "FLOWRL_METRICS", "GAP_METRICS",
    "OBJECTIVE_METRICS", "POLICY_METRICS", "REFERENCE_METRICS", "Metric", "engine_share", "gap_metrics",
]  # fmt: skip
