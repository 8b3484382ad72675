"""A recipe's section ``algorithm``: what is maximised, how the gap is corrected, and what does not go together."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from mantissa.algorithms.advantages import AdvantageKind
from mantissa.algorithms.aggregation import AggregationKind
from mantissa.algorithms.correction import CorrectionConfig
from mantissa.algorithms.losses import LOSSES, LossConfig, PPOClipConfig
from mantissa.algorithms.reference import KLConfig
from mantissa.base.config import Config, Refusals


class ReferenceConfig(Config):
    """A frozen copy of the policy as RL begins, scored on every batch; ``precision.reference`` is its format."""

    refresh_every: int | None = Field(
        None, ge=1, description="Optimiser steps after which it becomes the policy as it then is; null: never."
    )


class AlgorithmConfig(Config):
    """What is maximised, and how the gap between rollout and learner is corrected."""

    advantage: AdvantageKind = Field(
        "dr_grpo", description="grpo, dr_grpo, rloo or reinforce_pp; grpo where flowrl is given none."
    )
    loss: LossConfig = Field(PPOClipConfig(), description="The policy loss and its parameters.")
    aggregation: AggregationKind = Field(
        "token_mean",
        description="How token losses become one number; seq_mean_token_mean where gspo or flowrl is given none.",
    )
    aggregation_length: float | None = Field(
        None, gt=0, description="Length that seq_mean_token_sum_norm divides by; rollout.max_tokens where not given."
    )
    correction: CorrectionConfig = Field(
        CorrectionConfig(), description="A preset's name (none, token_tis, icepop, sequence_mis, ...) or its fields."
    )
    reference: ReferenceConfig | None = Field(
        None, description="{} for a frozen one; by itself it is measured only. null: there is none."
    )
    kl: KLConfig | None = Field(None, description="A penalty on the distance from the reference; null: none.")

    @field_validator("loss", mode="before")
    @classmethod
    def _loss_by_name(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {"kind": "ppo_clip"} | value
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _what_the_loss_stands_for(cls, values: Any) -> Any:
        """What a loss is by its definition where the recipe gives none: a mean over sequences, an advantage."""
        if not isinstance(values, dict):
            return values
        loss = values.get("loss")
        kind = loss.get("kind") if isinstance(loss, dict) else getattr(loss, "kind", loss)
        implied = LOSSES[kind].implies if isinstance(kind, str) and kind in LOSSES else {}
        return {**implied, **values}

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        for refused, why in self._refusals():
            if refused:
                raise ValueError(why)
        return self

    def _refusals(self) -> Refusals:
        yield (
            self.aggregation_length is not None and self.aggregation != "seq_mean_token_sum_norm",
            f"aggregation_length does nothing with aggregation={self.aggregation}; leave it out",
        )
        yield from self.loss.refusals(self)
        yield (
            self.kl is not None and self.reference is None,
            "algorithm.kl is the distance from a reference policy, and there is none; set algorithm.reference={}",
        )

    @property
    def every_completion(self) -> bool:
        """Whether a completion whose advantage is zero has a gradient all the same: the reference pulls at it."""
        return self.loss.every_completion or (self.kl is not None and self.kl.where == "loss")
