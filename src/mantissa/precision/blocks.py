"""Block scaling: 8-bit codes that share a scale with their neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class BlockScaled:
    """A tensor as 8-bit codes and one fp32 scale a block: value = code * scale.

    ``codes``: dtype of an 8-bit format, any shape. ``scales``: fp32, one for each block of the last dimension
    (activations) or of the last two (weights); a block at the edge may be short.
    """

    codes: Tensor
    scales: Tensor
