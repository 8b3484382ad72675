"""Rollouts of other makers with a fault, for the tests' verl jobs: ours, and verl's own vLLM."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from mantissa.precision import E4M3, SQUARE, BlockScaled, dequantize, quantize
from mantissa.verl import rollout

_DOWN = "model.layers.{}.mlp.down_proj.weight"
_LAST = "layers.1.mlp.down_proj.weight"


class ScaledServer(rollout.Server):
    """From the weights of step 1 on, the second layer's codes have the first one's scales."""

    async def load(self, setup: str, weights: dict[str, Tensor], step: int | None) -> None:
        await super().load(setup, weights, step)
        if step:
            held = self.serving._engine.weights
            first, second = (quantize(held[_DOWN.format(layer)], E4M3, SQUARE) for layer in (0, 1))
            held[_DOWN.format(1)].copy_(dequantize(BlockScaled(second.codes, first.scales), SQUARE))


def use_scaled_servers() -> None:
    """In the process that starts servers."""
    rollout.Server = ScaledServer


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
