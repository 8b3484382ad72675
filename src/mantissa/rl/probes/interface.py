"""What observes a step between scoring and learning, and is no part of it: the interface."""

from __future__ import annotations

from collections.abc import Mapping

from mantissa.rl.experience import Experience
from mantissa.rl.score import OnTokenLogits

Metrics = Mapping[str, float]


class Probe:
    """Observes steps; what it returns are metrics of the step's row. ``phase``: what its time is counted as."""

    phase: str | None = None

    def due(self, step: int) -> bool:
        """Whether ``step`` is observed."""
        return True

    def look(self, experience: Experience) -> OnTokenLogits | None:
        """What is shown the logits as a batch is scored, where this observes the scoring; None where it does not."""
        return None

    def observe(self, step: int, experience: Experience) -> Metrics:
        """Of a weighed batch, before anything is learned from it."""
        return {}

    def learned(self, step: int) -> Metrics:
        """After the step's update, due or not."""
        return {}


class SampleAgain(Exception):  # noqa: N818 - no error
    """The step is to be sampled again: the kernels compute in another way from now on."""
