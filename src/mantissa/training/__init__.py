"""Loss scaling, the one optimiser step that everything uses, diagnosis of overflows, checkpoints."""

from mantissa.training.auto_scale import AutoRule, AutoScaler
from mantissa.training.checkpoint import Checkpoint, load_checkpoint, load_weights, save_checkpoint, saved_steps
from mantissa.training.clipping import adaptive_clip_
from mantissa.training.diagnosis import first_nonfinite, flushed_fraction, gradients_of
from mantissa.training.optimizer import adamw, learning_rate
from mantissa.training.scaler import FixedScaler, LossScaler, ScalerConfig, scaler_for
from mantissa.training.step import OptimizerStep, StepOutcome

__all__ = [
    "AutoRule",
    "AutoScaler",
    "Checkpoint",
    "FixedScaler",
    "LossScaler",
    "OptimizerStep",
    "ScalerConfig",
    "StepOutcome",
    "adamw",
    "adaptive_clip_",
    "first_nonfinite",
    "flushed_fraction",
    "gradients_of",
    "learning_rate",
    "load_checkpoint",
    "load_weights",
    "save_checkpoint",
    "saved_steps",
    "scaler_for",
]
