"""What a job may set in ``actor.fsdp_config.mixed_precision``: the one free dictionary of verl's FSDP section.

verl itself reads three keys of it and ignores any other. Here another key is an error, and so is one that would do
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mantissa.algorithms.losses.flowrl import FlowRLConfig
from mantissa.base.config import Section
from mantissa.precision import BF16, FP16, FP32, NumberFormat
from mantissa.rl.config.sections import LossScalingConfig

_Float = Literal["fp32", "float32", "bf16", "bfloat16", "fp16", "float16"]


class JobScaling(LossScalingConfig):
    """A recipe's ``loss_scaling``, but that a batch of RL is repeated down to the floor before it is given up: it was
    sampled, and a backward pass is cheap beside that."""

    retries: int = Field(16, ge=0, description="Backward passes repeated on one batch before it is given up.")


class Fsdp2Options(Section):
    """``+actor_rollout_ref.actor.fsdp_config.mixed_precision.KEY=VALUE`` with ``strategy=mantissa_fsdp2``."""

    called: ClassVar = "fsdp_config.mixed_precision"

    param_dtype: _Float = Field("bf16", description="What matrices are multiplied in (autocast); the masters are fp32.")
    reduce_dtype: _Float = Field("fp32", description="What gradients are averaged over ranks in.")
    buffer_dtype: _Float = Field("fp32", description="Of buffers; read by FSDP1 alone.")
    loss_scaling: JobScaling = Field(
        default_factory=JobScaling, description="Loss scaling of fp16: the keys of a recipe's loss_scaling."
    )
    on_nonfinite: Literal["skip", "stop"] = Field(
        "skip",
        description="A gradient that no lower scale makes finite: skip and count the batch, as verl does, or stop.",
    )
    flowrl: FlowRLConfig | None = Field(
        None, description="FlowRL's numbers, with actor.policy_loss.loss_mode=flowrl: a recipe's algorithm.loss."
    )

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> Self:
        if "loss_scaling" in self.model_fields_set and self.format is not FP16:
            raise ValueError(
                f"loss_scaling does nothing with param_dtype={self.param_dtype}: only fp16 is scaled; leave it out, or "
                "set param_dtype=fp16"
            )
        return self

    @property
    def format(self) -> NumberFormat:
        """The format of ``param_dtype``."""
        if self.param_dtype.startswith("b"):
            return BF16
        return FP16 if self.param_dtype.endswith("16") else FP32


def fsdp2_options(mixed_precision: Mapping[str, Any] | None) -> Fsdp2Options:
    """The section as verl hands it over; ``MantissaError`` for its first mistake."""
    return Fsdp2Options(**plain(mixed_precision or {}))


def plain(value: Any) -> Any:
    """omegaconf's containers as Python's: pydantic takes no others."""
    if hasattr(value, "items"):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) or type(value).__name__ == "ListConfig":
        return [plain(each) for each in value]
    return value
