"""Recurrences of an adopted model: one form for a whole sequence and for a step, the one that steps.

Transformers computes a gated delta rule in chunks for a whole sequence, and step by step when it decodes: two orders of
the same sums. While the model runs, the form in chunks is replaced by the form in steps of the same file, whose
operations are routed like all others. It takes longer over a whole sequence: one pass of the loop a position.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

_CHUNKED, _STEPPED = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"


def homes(model: nn.Module) -> dict[Any, Any]:
    """Modules (of Python) whose code computes in chunks, and modules (of the model) that keep that function."""
    found: dict[Any, Any] = {}
    for module in model.modules():
        home = sys.modules[type(module).__module__]
        if hasattr(home, _CHUNKED) and hasattr(home, _STEPPED):
            found[home] = getattr(home, _STEPPED)
    return found


@contextlib.contextmanager
def recurrent(found: dict[Any, Any]) -> Iterator[None]:
    """Within this, what is computed in chunks is computed in steps."""
    before = {home: getattr(home, _CHUNKED) for home in found}
    try:
        for home, stepped in found.items():
            setattr(home, _CHUNKED, stepped)
        yield
    finally:
        for home, chunked in before.items():
            setattr(home, _CHUNKED, chunked)
