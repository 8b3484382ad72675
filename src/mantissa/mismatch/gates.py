"""Gates: is each measured figure in its healthy range? A gate whose metric was not measured is not passed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mantissa.mismatch.metrics import GAP_METRICS, Metric

GATES: tuple[Metric, ...] = tuple(metric for metric in GAP_METRICS if metric.gated)


@dataclass(frozen=True)
class Finding:
    """What one gate found. ``value`` is None where the metric was not measured, and ``healthy`` then False."""

    metric: Metric
    value: float | None
    healthy: bool

    def __str__(self) -> str:
        measured = "not measured" if self.value is None else f"{self.value:.4g}"
        verdict = "healthy" if self.healthy else "not healthy"
        return f"{self.metric.name} = {measured}: {verdict} (expected {self.metric.healthy_text}; {self.metric.source})"


def check_gates(values: Mapping[str, Tensor | float], metrics: Iterable[Metric] = GATES) -> list[Finding]:
    """One finding for each of ``metrics`` that has a healthy range, in their order.

    ``values``: by metric name, as ``gap_metrics`` or a row of a metrics file has them. NaN is never healthy. This is an
    edge, where tensors become numbers: on an accelerator it waits for them.
    """
    findings = []
    for metric in metrics:
        if metric.gated:
            value = float(values[metric.name]) if metric.name in values else None
            findings.append(Finding(metric, value, value is not None and metric.is_healthy(value)))
    return findings
