"""Causal attention by its formula, and the fast kernel families that are held against it."""

from __future__ import annotations

import torch
from torch import Tensor

from mantissa.kernels import Kernels, NativeKernels, SimulatedKernels
from mantissa.precision import BF16, FP16, FP32

FAMILIES: dict[str, Kernels] = {
    **{f"native {fmt}": NativeKernels(fmt) for fmt in (FP32, FP16, BF16)},
    **{f"simulated {fmt}": SimulatedKernels(fmt) for fmt in (FP16, BF16)},
}


def probabilities(q: Tensor, k: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) of queries that stand at the end of the keys, in the dtype given; no blocks."""
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
    return torch.softmax(scores.masked_fill(future, float("-inf")), -1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``probabilities`` of q and k, times v: differentiable; heads that share keys are not folded."""
    return probabilities(q, k) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
