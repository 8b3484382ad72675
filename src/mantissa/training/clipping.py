"""Adaptive clipping: each unit of a tensor has a bound of its own, where a global one cuts every layer because one
exploded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.base.ranks import is_dtensor, local


@torch.no_grad()
def adaptive_clip_(parameters: Iterable[Tensor], factor: float, eps: float = 1e-3) -> Tensor:
    """Clip each unit's gradient in place to ``factor * max(||W_i||, eps)``; return the fraction of units clipped.

    ``parameters``: any shapes, with finite unscaled gradients in ``.grad``; those without one are passed over.
    A matrix or convolution of shape (N, ...) has N units, a vector or scalar one. Returns a 0-dim fp32 tensor on the
    first gradient's device (0 where there are no gradients).

    DTensors sharded on dimension 0 (FSDP2) or replicated are clipped in place, their rows being whole on one rank; the
    norms of sharded vectors and the count are reduced over the mesh, so that every rank must call this, with the same
    parameters in the same order, and gets the same fraction. Other placements: ``MantissaError``.

    Of a sparse gradient the rows that it has are units, and the others, whose gradient is 0, are none that is clipped.

    Each unit i (a row of a matrix: the weights into one output; for a convolution all weights into one output channel;
    for a vector or a scalar the whole tensor) has its own bound,

        G_i <- G_i * min(1, factor * max(||W_i||, eps) / ||G_i||)        (Euclidean norms)

    so one step of SGD at rate lr changes W_i by at most lr * factor of its norm. ``eps`` lets units that are zero
    move. Norms are of unscaled gradients: clipping a scaled gradient clips by the scale.

    Source: A. Brock, S. De, S. L. Smith, K. Simonyan, "High-performance large-scale image recognition without
    normalization" (2021), arXiv:2102.06171, section 4.1, equation 3. The paper leaves the last linear layer unclipped,
    and finds factors of 0.01 to 0.16 to suit SGD: which parameters to pass is the caller's choice.
    """
    if not (math.isfinite(factor) and factor > 0 and math.isfinite(eps) and eps > 0):
        raise MantissaError(
            f"adaptive clipping: factor={factor}, eps={eps}: expected positive numbers (0.01 and 1e-3 are usual)"
        )
    with_grad = [p for p in parameters if p.grad is not None]
    if not with_grad:
        return torch.zeros((), dtype=torch.float32)
    for parameter in with_grad:
        _check_placements(parameter, parameter.grad)
    weights, grads = map(list, zip(*map(_units, with_grad), strict=True))
    shared = _shared_norms(weights), _shared_norms(grads)  # every rank's turn, whatever the others find
    bounds, norms = _unit_norms(weights, shared[0]), _unit_norms(grads, shared[1])
    sums = [total.to(norms[0].device) for total in torch._foreach_norm([*bounds, *norms], 1)]
    wide = not bool(torch.stack(sums).isfinite().all())
    if wide:  # squares beyond fp32
        bounds, norms = (_unit_norms(*each, torch.float64) for each in ((weights, shared[0]), (grads, shared[1])))
    torch._foreach_clamp_min_(bounds, eps)
    torch._foreach_mul_(bounds, factor)
    clipped = [norm > bound for norm, bound in zip(norms, bounds, strict=True)]
    # A gradient of zero has no direction to keep: its factor is bound / tiny, which the clamp makes 1.
    torch._foreach_clamp_min_(norms, torch.finfo(torch.float32).tiny)
    torch._foreach_div_(bounds, norms)
    torch._foreach_clamp_max_(bounds, 1.0)
    steps = [[bound.sqrt().float() for bound in bounds]] * 2 if wide else [bounds]  # fp32 may not hold one at once
    for multipliers in steps:
        for grad, multiplier in zip(grads, multipliers, strict=True):
            local(grad).mul_(multiplier)
    units = sum(p.shape[0] if p.ndim > 1 else 1 for p in with_grad)  # a DTensor's shape is the global one
    return _total(grads, clipped) / max(units, 1)


def _units(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and gradient; of a sparse one, whose entries for one row are added up, those of its rows."""
    grad, weights = parameter.grad, parameter.detach()
    assert grad is not None
    if not grad.is_sparse:
        return weights, grad
    parameter.grad = grad = grad.coalesce()
    return weights.index_select(0, grad.indices()[0]) if weights.ndim > 1 else weights, grad.values()


def _shared_norms(tensors: list[Tensor]) -> dict[int, Tensor]:
    """The norms of the vectors that ranks hold parts of, fp64, by their place. Collective."""
    return {
        i: _reduce(local(tensor).to(torch.float64).square().sum(), tensor).sqrt()
        for i, tensor in enumerate(tensors)
        if tensor.ndim < 2 and is_dtensor(tensor)
    }


def _unit_norms(tensors: list[Tensor], shared: dict[int, Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The norm of each unit, in order: (rows on this rank, 1, ...) for matrices, 0-dim otherwise."""
    norms: list[Tensor] = [torch.empty(0)] * len(tensors)
    whole = [i for i, t in enumerate(tensors) if t.ndim < 2 and i not in shared]
    if whole:
        for i, norm in zip(whole, torch._foreach_norm([tensors[i] for i in whole], 2, dtype), strict=True):
            norms[i] = norm
    for i, tensor in enumerate(tensors):
        if tensor.ndim > 1:
            dims = tuple(range(1, tensor.ndim))
            norms[i] = torch.linalg.vector_norm(local(tensor), 2, dims, keepdim=True, dtype=dtype)
        elif i in shared:
            norms[i] = shared[i].to(dtype)
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
    if grad.is_sparse and grad.sparse_dim() != 1:
        raise MantissaError(
            f"adaptive clipping: a gradient of shape {tuple(grad.shape)} is sparse in {grad.sparse_dim()} dimensions: "
            "expected one, as an embedding's, whose rows are whole; clip by the global norm (max_grad_norm)"
        )
    for placement in placements or ():
        if not (placement.is_shard(0) or placement.is_replicate()):
            raise MantissaError(
                f"adaptive clipping: a parameter is placed {placements}: expected shards of dimension 0, whose rows "
                "are whole; shard on dimension 0, or clip by the global norm (max_grad_norm)"
            )
