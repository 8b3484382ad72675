"""Sampling from the policy: the contract, the native continuous-batching engine, its naive reference, and vLLM."""

from mantissa.rollout.engine import Call, NativeEngine
from mantissa.rollout.types import Completion, FinishReason, Request, RolloutEngine, SamplingParams
from mantissa.rollout.vllm.engine import LEAST_TEMPERATURE, VllmEngine
from mantissa.rollout.vllm.server import VllmStart, require_vllm, serve_vllm

__all__ = [
    "LEAST_TEMPERATURE", "Call", "Completion", "FinishReason", "NativeEngine", "Request",
    "RolloutEngine", "SamplingParams", "VllmEngine", "VllmStart", "require_vllm", "serve_vllm",
]  # fmt: skip
