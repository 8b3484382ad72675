"""Loss scaling, the one optimiser step that everything uses, the drop-in trainer and its guard, checkpoints."""

from mantissa.ranks import Ranks
from mantissa.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    saved_state,
    saved_steps,
)
from mantissa.training.distributed import distribute
from mantissa.training.guard import Decision, Guard, GuardLog, GuardSettings, Judge, open_guard, replay
from mantissa.training.guard_config import GuardConfig, Reference
from mantissa.training.masters import Masters, MasterWeights, check_masters, master_weights
from mantissa.training.optimizer import Moments, adamw, learning_rate
from mantissa.training.scaler import AutoRule, AutoScaler, FixedScaler, LossScaler, ScalerConfig, scaler_for
from mantissa.training.step import Backward, OptimizerStep, StepOutcome, adaptive_clip_
from mantissa.training.trainer import PrecisionTrainer
from mantissa.training.window import first_nonfinite, flushed_fraction, gradients_of

__all__ = [
    "AutoRule",
    "AutoScaler",
    "Backward",
    "Checkpoint",
    "Decision",
    "FixedScaler",
    "Guard",
    "GuardConfig",
    "GuardLog",
    "GuardSettings",
    "Judge",
    "LossScaler",
    "MasterWeights",
    "Masters",
    "Moments",
    "OptimizerStep",
    "PrecisionTrainer",
    "Ranks",
    "Reference",
    "ScalerConfig",
    "StepOutcome",
    "adamw",
    "adaptive_clip_",
    "check_masters",
    "distribute",
    "first_nonfinite",
    "flushed_fraction",
    "gradients_of",
    "learning_rate",
    "load_checkpoint",
    "load_weights",
    "master_weights",
    "open_guard",
    "replay",
    "save_checkpoint",
    "saved_state",
    "saved_steps",
    "scaler_for",
]
