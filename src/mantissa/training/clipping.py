"""Adaptive gradient clipping: bound each unit's gradient by its weights, not the whole gradient by a number.

A global bound cuts every layer because one exploded. Here each unit i (a row of a matrix: the weights into one output;
for a convolution all weights into one output channel; for a vector or a scalar the whole tensor) has its own bound,

    G_i <- G_i * min(1, factor * max(||W_i||, eps) / ||G_i||)        (Euclidean norms)

so one step of SGD at rate lr changes W_i by at most lr * factor of its norm. ``eps`` lets units that are zero move.
Norms are fp32, of unscaled gradients: clipping a scaled gradient clips by the scale.

Source: A. Brock, S. De, S. L. Smith, K. Simonyan, "High-performance large-scale image recognition without
normalization" (2021), arXiv:2102.06171, section 4.1, equation 3. The paper leaves the last linear layer unclipped, and
finds factors of 0.01 to 0.16 to suit SGD: which parameters to pass is the caller's choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mantissa.errors import MantissaError
from mantissa.training.distributed import is_dtensor, local


@torch.no_grad()
def adaptive_clip_(parameters: Iterable[Tensor], factor: float, eps: float = 1e-3) -> Tensor:
    """Clip each unit's gradient in place to ``factor * max(||W_i||, eps)``; return the fraction of units clipped.

    ``parameters``: any shapes, with finite unscaled gradients in ``.grad``; those without one are passed over.
    A matrix or convolution of shape (N, ...) has N units, a vector or scalar one. Returns a 0-dim fp32 tensor on the
    first gradient's device, without waiting for it (0 where there are no gradients).

    DTensors sharded on dimension 0 (FSDP2) or replicated are clipped in place, their rows being whole on one rank; the
    norms of sharded vectors and the count are reduced over the mesh, so that every rank must call this, with the same
    parameters in the same order, and gets the same fraction. Other placements: ``MantissaError``.
    """
    if not (math.isfinite(factor) and factor > 0 and math.isfinite(eps) and eps > 0):
        raise MantissaError(
            f"adaptive clipping: factor={factor}, eps={eps}: expected positive numbers (0.01 and 1e-3 are usual)"
        )
    with_grad = [p for p in parameters if p.grad is not None]
    grads = [p.grad for p in with_grad if p.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float32)
    for parameter, grad in zip(with_grad, grads, strict=True):
        _check_placements(parameter, grad)
    bounds = _unit_norms(with_grad)
    torch._foreach_clamp_min_(bounds, eps)
    torch._foreach_mul_(bounds, factor)
    norms = _unit_norms(grads)
    clipped = [norm > bound for norm, bound in zip(norms, bounds, strict=True)]
    # A gradient of zero has no direction to keep: its factor is bound / tiny, which the clamp makes 1.
    torch._foreach_clamp_min_(norms, torch.finfo(torch.float32).tiny)
    torch._foreach_div_(bounds, norms)
    torch._foreach_clamp_max_(bounds, 1.0)
    for grad, multiplier in zip(grads, bounds, strict=True):
        local(grad).mul_(multiplier)
    units = sum(p.shape[0] if p.ndim > 1 else 1 for p in with_grad)  # a DTensor's shape is the global one
    return _total(grads, clipped) / max(units, 1)


def _unit_norms(tensors: list[Tensor]) -> list[Tensor]:
    """The norm of each unit, in order, fp32: (rows on this rank, 1, ...) for matrices, 0-dim otherwise."""
    norms: list[Tensor] = [torch.empty(0)] * len(tensors)
    whole = [i for i, t in enumerate(tensors) if t.ndim < 2 and not is_dtensor(t)]
    if whole:
        for i, norm in zip(whole, torch._foreach_norm([tensors[i] for i in whole], 2, torch.float32), strict=True):
            norms[i] = norm
    for i, tensor in enumerate(tensors):
        if tensor.ndim > 1:
            dims = tuple(range(1, tensor.ndim))
            norms[i] = torch.linalg.vector_norm(local(tensor), 2, dims, keepdim=True, dtype=torch.float32)
        elif is_dtensor(tensor):
            squares = local(tensor).to(torch.float32).square().sum()
            norms[i] = _reduce(squares, tensor).sqrt()
    return norms


def _total(grads: list[Tensor], clipped: list[Tensor]) -> Tensor:
    """Units clipped, over all ranks: one reduction for each way of sharding. 0-dim fp32 on the first's device."""
    device = local(grads[0]).device
    groups: dict[Any, tuple[Tensor, Tensor]] = {}
    placed: Any
    for placed, over in zip(grads, clipped, strict=True):
        sharded = is_dtensor(placed) and placed.ndim > 1  # a vector's norm is reduced: every rank counts it alike
        key = (placed.device_mesh, placed.placements) if sharded else None
        count, _ = groups.get(key, (torch.zeros((), dtype=torch.float32, device=device), placed))
        groups[key] = (count + over.sum(dtype=torch.float32).to(device, non_blocking=True), placed)
    counts = [count if key is None else _reduce(count, example) for key, (count, example) in groups.items()]
    return torch.stack(counts).sum()


def _reduce(value: Tensor, like: Tensor) -> Tensor:
    """The sum of ``value`` over the ranks that hold different parts of ``like``, a DTensor."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placed: Any = like
    placements = [Partial() if p.is_shard() else Replicate() for p in placed.placements]
    return DTensor.from_local(value, placed.device_mesh, placements, run_check=False).full_tensor()


def _check_placements(parameter: Any, grad: Any) -> None:
    placements = getattr(parameter, "placements", None)
    if getattr(grad, "placements", None) != placements:
        raise MantissaError(
            f"adaptive clipping: a parameter placed {placements} has a gradient placed "
            f"{getattr(grad, 'placements', None)}: expected the same; redistribute the gradient"
        )
    for placement in placements or ():
        if not (placement.is_shard(0) or placement.is_replicate()):
            raise MantissaError(
                f"adaptive clipping: a parameter is placed {placements}: expected shards of dimension 0, whose rows "
                "are whole; shard on dimension 0, or clip by the global norm (max_grad_norm)"
            )
