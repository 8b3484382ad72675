"""Loss scaling, the one optimiser step that everything uses, diagnosis of overflows, checkpoints."""

from mantissa.training.checkpoint import Checkpoint, load_checkpoint, load_weights, save_checkpoint, saved_steps
from mantissa.training.diagnosis import first_nonfinite, flushed_fraction, gradients_of
from mantissa.training.optimizer import adamw, learning_rate
from mantissa.training.scaler import LossScaler, ScalerConfig
from mantissa.training.step import OptimizerStep, StepOutcome

__all__ = [
    "Checkpoint",
    "LossScaler",
    "OptimizerStep",
    "ScalerConfig",
    "StepOutcome",
    "adamw",
    "first_nonfinite",
    "flushed_fraction",
    "gradients_of",
    "learning_rate",
    "load_checkpoint",
    "load_weights",
    "save_checkpoint",
    "saved_steps",
]
