"""Log-probs in files that are nobody's: columns by their names."""

from __future__ import annotations

from mantissa.base.errors import MantissaError


def parse_mapping(text: str) -> dict[str, str]:
    """``SIDE=NAME,...`` as a dictionary; ``MantissaError`` for anything else."""
    found: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        side, equals, name = (each.strip() for each in part.partition("="))
        if not (equals and side and name) or side in found:
            raise MantissaError(f"--map {part}: expected SIDE=NAME, each side once, as learner=old_logprobs")
        found[side] = name
    return found


def has_sides(names: list[str]) -> bool:
    """Whether a table's columns are log-probs rather than figures of steps."""
    return False
