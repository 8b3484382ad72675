"""The run's configuration: one frozen value made from a recipe."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from mantissa.algorithms import AlgorithmConfig
from mantissa.base.bounds import LARGEST_SEED
from mantissa.base.config import Config
from mantissa.doctor.diagnosis import DoctorConfig
from mantissa.dropin import GuardConfig
from mantissa.precision import PrecisionPolicy
from mantissa.rl.config.refusals import check_together
from mantissa.rl.config.sections import (
    CheckpointConfig,
    EvaluationConfig,
    GradingConfig,
    LossScalingConfig,
    ModelSource,
    OptimizerConfig,
    PerfectibleConfig,
    RolloutConfig,
    WarmStartConfig,
)
from mantissa.rl.config.waltz import WaltzConfig, check_feedback, feedback_config, published
from mantissa.tasks import TaskConfig


class RunConfig(Config):
    """A whole run."""

    name: str = Field("run", min_length=1, description="Names the run's folder.")
    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="Every random draw is a function of this and a position.")
    steps: int = Field(ge=1, description="RL steps.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one.")
    run_dir: str | None = Field(None, description="The run's folder; runs/<name>-<time> where not given.")
    nproc: int = Field(
        1,
        ge=1,
        le=4096,
        description="Processes, one a GPU; mantissa train starts them, under torchrun it is their number.",
    )
    parallel: Literal["ddp", "fsdp2"] | None = Field(
        None, description="ddp (what null stands for): every process holds the learner; fsdp2: each holds a slice."
    )
    precision: PrecisionPolicy = Field(
        PrecisionPolicy(preset="fp32"), description="A preset's name, or fields with a preset."
    )
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
    guard: GuardConfig | None = Field(
        None,
        description="{} or settings of docs/rollback.md, such as {to: fp32}: thresholds at which the run goes back to "
        "its last good checkpoint and on in a wider format. null: no guard.",
    )
    doctor: DoctorConfig | None = Field(None, description="{every: n}: diagnose one step of n. null: none.")
    waltz: WaltzConfig | None = Field(None, description="A second policy, which gives feedback and trains beside it.")
    grading: GradingConfig = GradingConfig()
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(("tensorboard",), description="tensorboard, wandb.")

    @property
    def steps_behind(self) -> int:
        """RL steps that sampling is behind: as many as ``rollout.max_policy_lag`` optimiser steps surely hold."""
        return self.rollout.max_policy_lag // self.optimizer.updates_per_batch

    @property
    def of_feedback(self) -> RunConfig:
        """The run of the feedback policy, of a recipe that has one."""
        return feedback_config(self)

    @model_validator(mode="before")
    @classmethod
    def _published(cls, values: Any) -> Any:
        return published(values) if isinstance(values, dict) and values.get("waltz") is not None else values

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        check_together(self)
        if self.waltz is not None:
            check_feedback(self)
        return self
