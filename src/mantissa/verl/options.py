"""What a job may say to the plugin's engines, beyond verl's own keys.

verl's section of an engine has one free dictionary, ``actor.fsdp_config.mixed_precision``, of which its own FSDP engine
reads three keys and ignores any other. Here an unknown key is an error, and so is one that would do nothing.

``strategy=mantissa_fsdp2`` reads ``Fsdp2Options`` there, ``strategy=mantissa`` ``EngineOptions``. Formats that the
latter do not name are those of verl's keys: ``actor.fsdp_config.dtype`` of the learner and, until the options say
another, of the rollout too, and ``ref.fsdp_config.dtype`` of a reference. Of verl's own section ``actor.optim`` comes
the learning rate (``Schedule``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mantissa.algorithms.losses.flowrl import FlowRLConfig
from mantissa.base.config import Refusals, Section
from mantissa.base.errors import MantissaError
from mantissa.precision import BF16, FP16, FP32, NumberFormat, PrecisionPolicy
from mantissa.rl.config.sections import LossScalingConfig
from mantissa.training import Masters, Moments

WHERE = "actor_rollout_ref.actor.fsdp_config.mixed_precision"
_OF_REFERENCE = {"precision", "shard", "length", "rows"}
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


class EngineOptions(Section):
    """The keys of ``mixed_precision`` for ``strategy=mantissa``."""

    called: ClassVar[str] = WHERE

    precision: str | dict[str, Any] | None = Field(
        None,
        description="A preset's name, or fields of a policy (docs/precision.md); null: verl's dtype for learner and "
        "rollout, with exact kernels. A rollout that is not named is as the learner.",
    )
    loss_scaling: LossScalingConfig | None = Field(None, description="Of an fp16 learner; null: the defaults.")
    on_nonfinite: Literal["skip", "stop"] = Field(
        "skip",
        description="A gradient that no lower scale makes finite: skip and count the batch, as verl does, or stop.",
    )
    shard: Literal["fsdp2", "ddp"] = Field(
        "fsdp2", description="Over verl's ranks: a slice of each tensor on each, or whole copies."
    )
    flowrl: FlowRLConfig | None = Field(
        None, description="FlowRL's numbers, with actor.policy_loss.loss_mode=flowrl: a recipe's algorithm.loss."
    )
    moments: Moments = Field("fp32", description="Adam's; 8bit: in blocks of 256, by torchao.")
    masters: Masters = Field("fp32", description="bf16_stochastic, bf16_kahan: bf16 weights.")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon, in fp32.")
    length: int | None = Field(
        None,
        ge=2,
        description="Tokens of the longest prompt and response together, which exact kernels are proven for; null: "
        "the model's positions, which takes longer to prove.",
    )
    rows: int | None = Field(
        None, ge=1, description="Positions of the largest product; null: those of the largest micro-batch."
    )

    @classmethod
    def of(cls, given: Mapping[str, Any] | None, learns: bool = True) -> EngineOptions:
        """From verl's dictionary, or what stands for none. ``learns``: not of a reference, of which most options would
        do nothing."""
        values = plain(given or {})
        if "param_dtype" in values or "reduce_dtype" in values or "buffer_dtype" in values:
            raise MantissaError(
                f"{WHERE}: param_dtype, reduce_dtype and buffer_dtype are FSDP's; with strategy=mantissa the learner's "
                "format is precision.train, and masters and sums of gradients are fp32; leave them out"
            )
        if not learns and (idle := sorted(values.keys() & cls.model_fields.keys() - _OF_REFERENCE)):
            raise MantissaError(
                f"actor_rollout_ref.ref.fsdp_config.mixed_precision.{idle[0]}: a reference takes no step; expected "
                f"{', '.join(sorted(_OF_REFERENCE))}; leave it out"
            )
        return cls(**values)

    def by_transformers(self, policy: PrecisionPolicy, why: str) -> Refusals:
        """What ends a job whose model runs by transformers' own code; ``why``: what our decoder does not know of it."""
        given, own = f"{WHERE}.precision", f"the model runs by transformers' own code ({why})"
        yield self.flowrl is not None, f"{WHERE}.flowrl: {own}, whose hidden states are not told; leave it out"
        yield policy.logits != "fp32", f"{given}.logits={policy.logits}: {own}, its head too; leave it out"
        yield policy.kv_cache is not None, f"{given}.kv_cache={policy.kv_cache}: {own}, its cache too; leave it out"
        yield policy.backend != "auto", f"{given}.backend={policy.backend}: {own}; leave it out"
        rows = f"{WHERE}.rows={self.rows}: {own}, whose products are proven for any number; leave it out"
        yield self.rows is not None, rows

    def policy(self, dtype: str) -> PrecisionPolicy:
        """The formats of the job's roles. ``dtype``: what verl's key says of the learner, where the options do not."""
        if self.precision is None:
            return PrecisionPolicy(train=dtype, rollout=dtype, kernels="exact")
        if isinstance(self.precision, str) or "preset" in self.precision:
            return PrecisionPolicy.parse(self.precision)
        given = {"train": dtype, **self.precision}
        return PrecisionPolicy.parse({"rollout": given["train"], **given})


@dataclass(frozen=True)
class Schedule:
    """verl's learning rates, as functions of its own count of steps: ``lr`` times a factor that ``factor`` gives.

    ``total``: steps of the job, of which ``warmup`` rise. verl moves the schedule once a step of its trainer, whatever
    the number of updates in it, and whether they were applied or not; so a rate is a function of that count. Rates rise
    linearly from 0 in ``warmup`` steps: the rate of a warm-up's first step is 0. Formulas of verl's
    ``get_constant_schedule_with_warmup`` and ``get_cosine_schedule_with_warmup`` (0.9.1), with which a test compares.
    """

    lr: float
    kind: Literal["constant", "cosine"] = "constant"
    warmup: int = 0
    total: int = -1
    least: float = 0.0
    cycles: float = 0.5
    from_zero: bool = True

    @classmethod
    def of(cls, optim: Any) -> Schedule:
        """From verl's section ``actor.optim``. ``MantissaError``: a cosine without an end, or an unknown kind."""
        kind, total, warmup = optim.lr_scheduler_type, int(optim.total_training_steps), optim.lr_warmup_steps
        if kind not in ("constant", "cosine"):
            raise MantissaError(f"actor.optim.lr_scheduler_type={kind}: expected constant or cosine")
        if warmup is None or warmup <= 0:
            warmup = int(optim.lr_warmup_steps_ratio * total)
        if kind == "cosine" and total < 1:
            raise MantissaError(
                f"actor.optim.lr_scheduler_type=cosine with total_training_steps={total}: a cosine needs its end; set "
                "trainer.total_training_steps"
            )
        least = optim.min_lr_ratio or 0.0
        if not 0 <= least <= 1:
            raise MantissaError(f"actor.optim.min_lr_ratio={least}: expected 0 to 1")
        return cls(optim.lr, kind, max(int(warmup), 0), total, least, optim.num_cycles, optim.zero_indexed_step)

    def factor(self, step: int) -> float:
        """What the rate of trainer step ``step`` (0 for the first) is multiplied by."""
        if self.kind == "constant":
            return step / max(1.0, self.warmup) if step < self.warmup else 1.0
        if not self.from_zero:
            step += 1
        if step < self.warmup:
            return step / max(1, self.warmup)
        progress = (step - self.warmup) / max(1, self.total - self.warmup)
        wave = math.cos(math.pi * self.cycles * 2.0 * progress)
        return max(self.least, wave * (1 - self.least) * 0.5 + (1 + self.least) * 0.5)

    def rate(self, step: int) -> float:
        """The learning rate of trainer step ``step``."""
        return self.lr * self.factor(step)
