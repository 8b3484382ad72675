"""Loss scaling, the one optimiser step that everything uses, diagnosis of overflows, checkpoints."""

from mantissa.training.auto_scale import AutoRule, AutoScaler
from mantissa.training.checkpoint import Checkpoint, load_checkpoint, load_weights, save_checkpoint, saved_steps
from mantissa.training.clipping import adaptive_clip_
from mantissa.training.diagnosis import first_nonfinite, flushed_fraction, gradients_of
from mantissa.training.distributed import distribute
from mantissa.training.optimizer import adamw, learning_rate
from mantissa.training.scaler import FixedScaler, LossScaler, ScalerConfig, scaler_for
from mantissa.training.step import Backward, OptimizerStep, StepOutcome
from mantissa.training.trainer import PrecisionTrainer

__all__ = [
    "AutoRule",
    "AutoScaler",
    "Backward",
    "Checkpoint",
    "FixedScaler",
    "LossScaler",
    "OptimizerStep",
    "PrecisionTrainer",
    "ScalerConfig",
    "StepOutcome",
    "adamw",
    "adaptive_clip_",
    "distribute",
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
