"""verl's FSDP2 engine: as it is, on a CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

from verl.utils.device import get_device_name
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from mantissa.base.errors import MantissaError


class CpuFsdp2(FSDPEngineWithLMHead):
    """verl's own engine on a CPU: a frozen model's weights are not pinned for a GPU that is not there."""

    engine_config: Any

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        if engine_config.strategy == "fsdp":
            raise MantissaError(
                "actor.strategy=fsdp on a CPU: FSDP1 sends its weights to a GPU; "
                "set actor_rollout_ref.actor.strategy=fsdp2"
            )
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _build_fsdp_module(self, module: Any) -> Any:
        mine = self.engine_config
        if get_device_name() == "cpu" and mine.forward_only:
            # CPUOffloadPolicy(pin_memory=True) is what verl gives a frozen model, and a CPU has nothing to pin for.
            self.engine_config = dataclasses.replace(mine, forward_only=False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config = mine


EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(CpuFsdp2)
