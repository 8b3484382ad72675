"""The gap between the policy that samples and the policy that learns: metrics, their healthy ranges, gates."""

from mantissa.mismatch.catalogue import (
    ADVANTAGE_METRICS,
    ALL_METRICS,
    CORRECTION_METRICS,
    FLOWRL_METRICS,
    POLICY_METRICS,
    REFERENCE_METRICS,
)
from mantissa.mismatch.engine_share import ENGINE_METRICS, engine_share
from mantissa.mismatch.gates import GATES, Finding, check_gates
from mantissa.mismatch.metrics import GAP_METRICS, Metric, gap_metrics

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
