"""A recipe's section ``algorithm``: what is maximised, how the gap is corrected, and what does not go together."""

from __future__ import annotations

from typing import Any, Self, get_args

from pydantic import Field, field_validator, model_validator

from mantissa.algorithms.advantages import AdvantageKind, TokenAdvantageKind
from mantissa.algorithms.aggregation import AggregationKind
from mantissa.algorithms.correction import CorrectionConfig
from mantissa.algorithms.gae import CriticConfig
from mantissa.algorithms.losses import LOSSES, LossConfig, PPOClipConfig
from mantissa.algorithms.reference import KLConfig, ReferenceConfig
from mantissa.base.config import Config, Refusals


class EntropyConfig(Config):
    """A bonus on the policy's entropy, with its gradient: ``loss - coefficient * sum scale * H``.

    H in nats is that of the whole distribution after each prefix, at the temperature of the log-probs. Every token in
    the loss has it, whatever its advantage, unweighted by the correction, which is the published form (arXiv
    1602.01783).
    """

    coefficient: float = Field(gt=0, description="Loss that one nat takes off, 1e-3 for example.")


class AlgorithmConfig(Config):
    """What is maximised, and how the gap between rollout and learner is corrected."""

    advantage: AdvantageKind | TokenAdvantageKind = Field(
        "dr_grpo",
        description="grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline or gdpo; grpo where flowrl has none; "
        "of each token: distillation (log-prob of algorithm.reference less the policy's), gae.",
    )
    loss: LossConfig = Field(
        PPOClipConfig(),
        description="The policy loss and its parameters: a name, its fields, or package.module:function of one's own.",
    )
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

    critic: CriticConfig | None = Field(None, description="The value model of advantage=gae; null: there is none.")
    entropy: EntropyConfig | None = Field(None, description="A bonus on the policy's entropy; null: none.")

    @field_validator("loss", mode="before")
    @classmethod
    def _loss_by_name(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {"kind": "ppo_clip"} | value
        if isinstance(value, str) and ":" in value:
            return {"kind": "custom", "function": value}
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
            self.kl is not None and self.kl.ratio and self.loss.weighs_itself,
            f"algorithm.kl.ratio with loss={self.loss.kind}, whose weights are already of the current policy: the same "
            "ratio twice; set kl.ratio=false",
        )
        yield (
            self.correction.mask_negative_above is not None and self.loss.every_completion,
            f"correction.mask_negative_above goes by the advantage's sign, and loss={self.loss.kind} pulls whatever it "
            "is; leave it out",
        )
        yield (
            (self.advantage == "gae") != (self.critic is not None),
            "algorithm.critic is the value model of advantage=gae: "
            + ("set algorithm.critic={lr: 1.0e-5}" if self.critic is None else "leave it out, or set advantage=gae"),
        )
        yield (
            self.advantage == "distillation" and self.reference is None,
            "advantage=distillation needs a teacher; set algorithm.reference={path: FOLDER}",
        )
        if self.of_tokens:
            yield (
                not self.loss.by_token,
                f"advantage={self.advantage} is of each token, and loss={self.loss.kind} takes those of responses; "
                "use ppo_clip, dapo, reinforce, cispo, sapo, dppo or one of your own",
            )
            yield (
                self.kl is not None and self.kl.where == "reward",
                f"advantage={self.advantage} knows no reward of a response that kl.where=reward could lower; set "
                "kl.where=loss",
            )
            yield (
                self.correction.mask_negative_above is not None,
                f"correction.mask_negative_above goes by a response's advantage, and advantage={self.advantage} is of "
                "each token; leave it out",
            )
        yield (
            self.advantage == "gdpo" and self.kl is not None and self.kl.where == "reward",
            "advantage=gdpo with kl.where=reward: each reward is normalised by itself, and a penalty off their sum is "
            "none of them; set kl.where=loss",
        )
        yield (
            self.kl is not None and self.reference is None,
            "algorithm.kl is the distance from a reference policy, and there is none; set algorithm.reference={}",
        )

    @property
    def of_tokens(self) -> bool:
        """Whether each token has an advantage of its own."""
        return self.advantage in get_args(TokenAdvantageKind)

    @property
    def every_completion(self) -> bool:
        """Whether a completion whose advantage is zero has a gradient all the same: reference or entropy pulls."""
        pulled = self.entropy is not None or (self.kl is not None and self.kl.where == "loss")
        return self.loss.every_completion or pulled
