"""The gap between the policy that samples and the policy that learns: metrics, their healthy ranges.

``tables.py`` and ``intervals.py`` are numbers alone; ``metrics.py`` and ``estimates.py`` compute, with torch."""
