"""What an emulated engine's switches ask of a model."""

from __future__ import annotations

import pytest

from mantissa.base.errors import MantissaError
from mantissa.kernels import Emulation


@pytest.mark.parametrize(
    ("shards", "heads", "features", "fits"),
    [
        (2, 4, 12, True), (4, 4, 12, True), (None, 3, 7, True),
        (3, 4, 12, False), (4, 8, 30, False), (8, 4, 16, False), (5, 4, 12, False),
    ],
)  # fmt: skip
def test_a_shard_holds_an_equal_part_of_heads_and_of_features(
    shards: int | None, heads: int, features: int, fits: bool
) -> None:
    """The number of shards divides both, and one that divides only one of them is refused with both numbers."""
    emulation = Emulation(norm="fused", tensor_parallel=shards)
    if fits:
        emulation.check(heads, features)
        return
    with pytest.raises(MantissaError, match=f"tensor_parallel={shards}: the model has {heads} .* and {features} "):
        emulation.check(heads, features)
