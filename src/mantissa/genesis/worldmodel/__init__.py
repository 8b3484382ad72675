"""A world model: predicts how an action ends before it is carried out; and the replay buffer that it learns from."""

from mantissa.genesis.worldmodel.buffer import ReplayBuffer, SQLiteBuffer, open_buffer
from mantissa.genesis.worldmodel.model import (
    HistoryRow,
    Prediction,
    TrainingHistory,
    Validation,
    WorldModel,
    cross_validate,
)
from mantissa.genesis.worldmodel.scores import Scores, scored
from mantissa.genesis.worldmodel.trajectory import SCENARIOS, Trajectory, by_task, synthetic, trajectory

__all__ = [
    "SCENARIOS",
    "HistoryRow",
    "Prediction",
    "ReplayBuffer",
    "SQLiteBuffer",
    "Scores",
    "TrainingHistory",
    "Trajectory",
    "Validation",
    "WorldModel",
    "by_task",
    "cross_validate",
    "open_buffer",
    "scored",
    "synthetic",
    "trajectory",
]
