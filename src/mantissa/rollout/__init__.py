"""Sampling from the policy: the contract, the native continuous-batching engine, and its naive reference."""

from mantissa.rollout.engine import Call, NativeEngine
from mantissa.rollout.generation import EngineStats
from mantissa.rollout.types import Completion, FinishReason, Request, RolloutEngine, SamplingParams

__all__ = [
    "Call",
    "Completion",
    "EngineStats",
    "FinishReason",
    "NativeEngine",
    "Request",
    "RolloutEngine",
    "SamplingParams",
]
