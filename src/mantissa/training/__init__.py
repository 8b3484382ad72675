"""The one optimiser step that everything uses (loss scaling, retry, clipping, masters, moments), and the one
checkpoint."""

from mantissa.base.ranks import Ranks, distribute
from mantissa.training.audit import Audit, audit
from mantissa.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    saved_state,
    saved_steps,
)
from mantissa.training.clipping import adaptive_clip_
from mantissa.training.nonfinite import first_nonfinite, where_nonfinite
from mantissa.training.optimizer import (
    Masters,
    MasterWeights,
    Moments,
    adamw,
    check_masters,
    learning_rate,
    master_weights,
)
from mantissa.training.scaler import (
    AutoRule,
    AutoScaler,
    FixedScaler,
    LossScaler,
    ScalerConfig,
    flushed_fraction,
    gradients_of,
    scaler_for,
)
from mantissa.training.step import Backward, OptimizerStep, StepOutcome

__all__ = [
    "Audit",
    "AutoRule",
    "AutoScaler",
    "Backward",
    "Checkpoint",
    "FixedScaler",
    "LossScaler",
    "MasterWeights",
    "Masters",
    "Moments",
    "OptimizerStep",
    "Ranks",
    "ScalerConfig",
    "StepOutcome",
    "adamw",
    "adaptive_clip_",
    "audit",
    "check_masters",
    "distribute",
    "first_nonfinite",
    "flushed_fraction",
    "gradients_of",
    "learning_rate",
    "load_checkpoint",
    "load_weights",
    "master_weights",
    "save_checkpoint",
    "saved_state",
    "saved_steps",
    "scaler_for",
    "where_nonfinite",
]
