"""The gap between the policy that samples and the policy that learns: metrics, their healthy ranges, gates."""

from mantissa.mismatch.metrics import GAP_METRICS, Metric, gap_metrics

__all__ = ["GAP_METRICS", "Metric", "gap_metrics"]
