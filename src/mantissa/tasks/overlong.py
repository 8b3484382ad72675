"""DAPO's soft punishment of long completions (arXiv 2503.14476, section 3.4)."""

from __future__ import annotations

from mantissa.errors import MantissaError


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """What is added to the reward of a completion of ``length`` tokens; 0 or negative.

    penalty = min(-(length - (max_length - buffer)) / buffer * factor, 0)

    So it is 0 up to ``max_length - buffer`` tokens and falls linearly to ``-factor`` at ``max_length``, beyond which no
    completion goes. The paper's values: ``max_length`` 20480, ``buffer`` 4096, ``factor`` 1. Raises ``MantissaError``
    where the buffer is not within 1..``max_length`` or the factor is negative.
    """
    if not 1 <= buffer <= max_length:
        raise MantissaError(f"overlong buffer={buffer}: expected 1 to the longest completion, {max_length} tokens")
    if not factor >= 0:
        raise MantissaError(f"overlong factor={factor}: expected 0 or more; it is a penalty")
    return min(-(length - (max_length - buffer)) / buffer * factor, 0.0)
