"""The run's configuration: one frozen value made from a recipe.

Unknown keys are errors, and so are keys that would do nothing. Fields say what they do and what follows from it.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mantissa.algorithms import AdvantageKind, AggregationKind, CorrectionConfig, PolicyLossConfig, PPOClipConfig
from mantissa.errors import MantissaError
from mantissa.model import FreshModelConfig, LoraConfig
from mantissa.precision import PrecisionPolicy, format_named
from mantissa.tasks import TaskConfig
from mantissa.training import ScalerConfig


class Config(BaseModel):
    """Base of every section: frozen, and unknown keys are fatal."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSource(Config):
    """Where the policy comes from: exactly one of ``path`` and ``fresh``."""

    path: str | None = Field(
        None, description="Hugging Face folder, a run's folder, a hub name, or an adapter's folder."
    )
    fresh: FreshModelConfig | None = Field(None, description="A new policy of this shape with random weights.")
    tokenizer: Literal["bytes", "characters"] | None = Field(
        None, description="A fresh policy's: every byte (the default), or the characters of a generated task."
    )
    lora: LoraConfig | None = Field(None, description="None: every weight trains, and there are no adapters.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.fresh is None):
            raise ValueError("expected exactly one of model.path and model.fresh; set the other to null")
        if self.path is not None and self.tokenizer is not None:
            raise ValueError("model.tokenizer does nothing beside model.path, which brings its own; leave it out")
        if self.fresh is not None and self.lora is not None and self.lora.path is not None:
            raise ValueError("model.lora.path belongs to a base: give that as model.path, not model.fresh")
        return self


class WarmStartConfig(Config):
    """Supervised steps on the task's own solutions before RL, in the learner's precision."""

    steps: int = Field(400, ge=1, description="Optimiser steps at most.")
    batch: int = Field(64, ge=1, description="Solved problems a step.")
    lr: float = Field(1e-3, gt=0, description="Learning rate after a warm-up of 20 steps.")
    target_accuracy: float = Field(
        1.0, gt=0, le=1, description="Stop once sampled accuracy on held-out problems reaches this."
    )
    evaluate_every: int = Field(20, ge=1, description="Steps between evaluations of that accuracy.")
    problems: int = Field(64, ge=1, description="Held-out problems in each evaluation, sampled once each.")


class PerfectibleConfig(Config):
    """Keep only prompts on which the starting policy sometimes succeeds (arXiv 2510.26788, the sanity test)."""

    samples: int = Field(40, ge=2, description="Samples of each training prompt.")
    low: float = Field(0.2, ge=0, le=1, description="Smallest success rate that is kept.")
    high: float = Field(0.8, ge=0, le=1, description="Largest success rate that is kept.")


class RolloutConfig(Config):
    """How each step samples. Log-probs are under softmax(logits / temperature), on both sides.

    There is no top-k or top-p here: the learner cannot renormalise over a set that only the sampler knows, so its
    log-probs would be of another distribution. ``mantissa sample`` and evaluation have no learner and may filter.
    """

    prompts: int = Field(64, ge=1, description="Prompts a step.")
    samples: int = Field(8, ge=1, description="Completions of each prompt: its group.")
    max_tokens: int = Field(ge=1, description="Longest response, the stop token included.")
    temperature: float = Field(1.0, gt=0, description="Divides the logits, for the rollout and the learner alike.")
    stop: tuple[str, ...] = Field((), description="Strings that end a completion, besides the end token.")
    slots: int = Field(256, ge=1, description="Rows decoded together; a finished row is refilled from the queue.")


class AlgorithmConfig(Config):
    """What is maximised, and how the gap between rollout and learner is corrected."""

    advantage: AdvantageKind = Field("dr_grpo", description="grpo, dr_grpo or rloo.")
    loss: PolicyLossConfig = Field(PPOClipConfig(), description="The policy loss and its parameters.")
    aggregation: AggregationKind = Field("token_mean", description="How token losses become one number.")
    aggregation_length: float | None = Field(
        None, gt=0, description="Length that seq_mean_token_sum_norm divides by; rollout.max_tokens where not given."
    )
    correction: CorrectionConfig = Field(
        CorrectionConfig(), description="A preset's name (none, token_tis, icepop, sequence_mis, ...) or its fields."
    )

    @field_validator("loss", mode="before")
    @classmethod
    def _loss_by_name(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {"kind": "ppo_clip"} | value
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _length_is_used(self) -> Self:
        if self.aggregation_length is not None and self.aggregation != "seq_mean_token_sum_norm":
            raise ValueError(f"aggregation_length does nothing with aggregation={self.aggregation}; leave it out")
        return self


class OptimizerConfig(Config):
    """AdamW on fp32 masters; moments fp32 too."""

    lr: float = Field(gt=0, description="Learning rate after the warm-up.")
    warmup: int = Field(0, ge=0, description="Updates over which the rate rises linearly.")
    decay: Literal["none", "linear"] = Field("none", description="linear: the rate falls to zero at the last step.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Adam's decay rates.")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon, in fp32 (1e-8 is 0 in fp16).")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled decay of matrices; norms and biases have none.")
    max_grad_norm: float = Field(1.0, gt=0, description="Clip bound on the unscaled gradient; .inf never clips.")
    updates_per_batch: int = Field(1, ge=1, description="Optimiser steps on each batch; 1 is on-policy.")
    micro_batch_tokens: int = Field(
        16384, ge=1, description="Padded tokens a forward holds; memory only, the gradient does not depend on it."
    )


class LossScalingConfig(Config):
    """Dynamic loss scaling of an fp16 learner; see ``ScalerConfig``."""

    initial: float = Field(65536.0, gt=0, description="First scale.")
    growth_factor: float = Field(2.0, ge=1, description="Factor after growth_interval clean steps.")
    backoff_factor: float = Field(0.5, gt=0, lt=1, description="Factor on overflow.")
    growth_interval: int = Field(400, ge=1, description="Clean steps before the scale grows.")
    floor: float = Field(1.0, gt=0, description="Smallest scale; a non-finite gradient there stops the run.")
    retries: int = Field(4, ge=0, description="Backward passes repeated on one batch before it is given up.")

    def scaler(self) -> ScalerConfig:
        return ScalerConfig(**self.model_dump())


class EvaluationConfig(Config):
    """Held-out problems, greedy and by the mean of k samples."""

    every: int = Field(20, ge=1, description="Steps between evaluations; the last step is always evaluated.")
    problems: int = Field(128, ge=1, description="Held-out problems.")
    samples: int = Field(4, ge=0, description="k of avg@k, at rollout.temperature; 0 evaluates greedily only.")


class CheckpointConfig(Config):
    """All-or-nothing checkpoints, from which a killed run continues bit for bit."""

    every: int = Field(10, ge=1, description="Steps between checkpoints; the last step always has one.")
    keep: int = Field(2, ge=1, description="Newest checkpoints kept.")


class GradingConfig(Config):
    """Limits on verifiers."""

    timeout_s: float = Field(10.0, gt=0, description="Wall clock for one sample, which loses its reward beyond it.")
    workers: int = Field(2, ge=1, description="Processes for verifiers that may hang.")


class RunConfig(Config):
    """A whole run."""

    name: str = Field("run", min_length=1, description="Names the run's folder.")
    seed: int = Field(0, ge=0, description="Every random draw is a function of this and a position.")
    steps: int = Field(ge=1, description="RL steps.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one.")
    run_dir: str | None = Field(None, description="The run's folder; runs/<name>-<time> where not given.")
    precision: dict[str, Any] = Field({"preset": "fp32"}, description="A preset's name, or fields with a preset.")
    model: ModelSource
    task: TaskConfig
    warm_start: WarmStartConfig | None = Field(None, description="None: RL starts from the model as it is.")
    perfectible: PerfectibleConfig | None = Field(None, description="None: every training prompt is used.")
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig
    loss_scaling: LossScalingConfig | None = Field(None, description="Only for an fp16 learner; has defaults.")
    evaluation: EvaluationConfig | None = Field(EvaluationConfig(), description="None: never evaluate.")
    checkpoint: CheckpointConfig = CheckpointConfig()
    grading: GradingConfig = GradingConfig()
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(("tensorboard",), description="tensorboard, wandb.")

    @field_validator("precision", mode="before")
    @classmethod
    def _precision_by_name(cls, value: Any) -> Any:
        fields = {"preset": value} if isinstance(value, str) else value
        PrecisionPolicy.parse(fields)  # a mistake is found here, before anything is built on it
        return fields

    @property
    def policy(self) -> PrecisionPolicy:
        return PrecisionPolicy.parse(self.precision)

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> Self:
        if self.loss_scaling is not None and not format_named(self.policy.train).needs_loss_scaling:
            raise MantissaError(
                f"loss_scaling does nothing for a {self.policy.train} learner (its exponent range is that of fp32); "
                "leave it out, or set loss_scaling=null"
            )
        if self.optimizer.updates_per_batch > self.rollout.prompts * self.rollout.samples:
            raise MantissaError("optimizer.updates_per_batch: expected at most one update a completion")
        if self.algorithm.advantage != "dr_grpo" and self.rollout.samples < 2:
            raise MantissaError(f"algorithm.advantage={self.algorithm.advantage} needs rollout.samples of 2 or more")
        return self
