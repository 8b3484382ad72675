"""What one optimiser step adds to the counts that every integration reports."""

from __future__ import annotations

from mantissa.training import StepOutcome


def counts_of(outcome: StepOutcome) -> dict[str, int]:
    """Backward passes that overflowed, those redone at a lower scale, and whether the step was given up (0 or 1)."""
    return {
        "precision/overflows": outcome.overflows,
        "precision/retries": outcome.retries,
        "precision/skipped": int(not outcome.applied),
    }
