"""Overlong reward shaping: a response that nears the longest allowed loses reward, before truncation takes it all.

    penalty = min(-(length - (max_length - buffer)) / buffer * factor, 0)

0 up to ``max_length - buffer`` tokens, then linear, ``-factor`` at ``max_length`` (arXiv 2503.14476, section 3.4;
there buffer 4096 of 20480, factor 1). It is added to the reward, so it is one term of a group's baseline too.
"""

from __future__ import annotations

from torch import Tensor

from mantissa.errors import MantissaError


def overlong_penalty(length_B: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """What to add to each response's reward, fp32, from 0 down to ``-factor``.

    ``length_B``: int64, response tokens, none above ``max_length``. Raises ``MantissaError`` for a buffer that is not
    between 1 and ``max_length``, or a factor that is not positive.
    """
    if not 1 <= buffer <= max_length:
        raise MantissaError(f"overlong buffer: expected 1 to {max_length} tokens (the longest response), got {buffer}")
    if not 0 < factor < float("inf"):
        raise MantissaError(f"overlong factor: expected a positive number, got {factor}")
    excess_B = (length_B - (max_length - buffer)).clamp(min=0)  # integers: exact
    if bool((excess_B > buffer).any()):
        raise ValueError(f"a response of {int(length_B.max())} tokens, of {max_length} allowed")
    return -(excess_B.float() / buffer * factor)  # a length is exact in fp32 up to 2^24
