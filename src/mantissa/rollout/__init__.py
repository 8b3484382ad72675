"""Sampling from the policy: the contract, the native continuous-batching engine, its naive reference, and vLLM."""

from mantissa.rollout.engine import Call, CopiedPolicy, NativeEngine, RolloutEngine
from mantissa.rollout.sampling import Completion, FinishReason, Request, SamplingParams
from mantissa.rollout.vllm.engine import LEAST_TEMPERATURE, VllmEngine, untold_support
from mantissa.rollout.vllm.server import MOST_TOLD, VllmStart, require_vllm, serve_vllm

__all__ = [
    "LEAST_TEMPERATURE", "MOST_TOLD", "Call", "Completion", "CopiedPolicy", "FinishReason", "NativeEngine", "Request",
    "RolloutEngine", "SamplingParams", "VllmEngine", "VllmStart", "require_vllm", "serve_vllm",
    "untold_support",
]  # fmt: skip
