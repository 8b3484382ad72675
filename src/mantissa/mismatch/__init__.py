"""The gap between the policy that samples and the policy that learns: metrics, their healthy ranges, gates."""

from mantissa.mismatch.catalogue import (
    ADVANTAGE_METRICS,
    ALL_METRICS,
    CORRECTION_METRICS,
    FLOWRL_METRICS,
    GATES,
    POLICY_METRICS,
    REFERENCE_METRICS,
    Finding,
    check_gates,
)
from mantissa.mismatch.metrics import ENGINE_METRICS, GAP_METRICS, Metric, engine_share, gap_metrics

__all__ = [
    "ADVANTAGE_METRICS",
    "ALL_METRICS",
    "CORRECTION_METRICS",
    "ENGINE_METRICS",
    "FLOWRL_METRICS",
    "GAP_METRICS",
    "GATES",
    "POLICY_METRICS",
    "REFERENCE_METRICS",
    "Finding",
    "Metric",
    "check_gates",
    "engine_share",
    "gap_metrics",
]
