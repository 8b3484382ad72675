"""The reward of the tests' verl jobs: it tells answers of a random policy apart, so that every group has a signal."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """The fraction of the answer's characters that are digits."""
    return sum(character.isdigit() for character in solution_str) / max(len(solution_str), 1)
