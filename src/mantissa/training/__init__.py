"""Loss scaling, the one optimiser step that everything uses, diagnosis of overflows, checkpoints."""

from mantissa.training.checkpoint import Checkpoint, load_checkpoint, load_weights, save_checkpoint, saved_steps
from mantissa.training.diagnosis import first_nonfinite, flushed_fraction, gradients_of
from mantissa.training.distributed import distribute
from mantissa.training.guard import Decision, Guard, replay
from mantissa.training.guard_config import GuardConfig, Reference
from mantissa.training.guard_log import GuardLog, GuardSettings, open_guard
from mantissa.training.optimizer import adamw, learning_rate
from mantissa.training.scaler import LossScaler, ScalerConfig
from mantissa.training.step import Backward, OptimizerStep, StepOutcome
from mantissa.training.trainer import PrecisionTrainer

__all__ = [
    "Backward",
    "Checkpoint",
    "Decision",
    "Guard",
    "GuardConfig",
    "GuardLog",
    "GuardSettings",
    "LossScaler",
    "OptimizerStep",
    "PrecisionTrainer",
    "Reference",
    "ScalerConfig",
    "StepOutcome",
    "adamw",
    "distribute",
    "first_nonfinite",
    "flushed_fraction",
    "gradients_of",
    "learning_rate",
    "load_checkpoint",
    "load_weights",
    "open_guard",
    "replay",
    "save_checkpoint",
    "saved_steps",
]
