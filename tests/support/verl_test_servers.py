"""verl's own vLLM rollout with a fault, for the tests' verl jobs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

_LAST = "layers.1.mlp.down_proj.weight"


def spoil_vllm(fault: str) -> None:
    """In a learner's process: what goes to verl's vLLM from step 1 on. ``layer``: but one layer; ``sign``: a layer's
    last matrix is negated."""
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

    update = ServerAdapter.update_weights

    def spoiled(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if fault == "layer" and ".layers.1." in name:
                continue
            yield name, -tensor if fault == "sign" and name.endswith(_LAST) else tensor

    @functools.wraps(update)
    async def sent(self: Any, weights: Any, global_steps: int | None = None, **more: Any) -> Any:
        return await update(self, spoiled(weights) if global_steps else weights, global_steps=global_steps, **more)

    ServerAdapter.update_weights = sent
