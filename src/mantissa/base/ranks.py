"""The processes (ranks) that work on one model: who they are, what each does, how it becomes the work of one.

With one process every method is the identity, so there is no branch elsewhere. Methods (but properties, ``shard``
and ``whole`` of unsharded tensors) are collective: every rank calls them, in one order.

All that is *decided* in a run is decided by every rank alike, from values that all of them have; numbers that are
computed in shares (log-probs of rows, gradients of rows) are put together here: rows to the last bit, gradients as a
sum and never as a mean, so that they do not depend on the number of ranks but for the order of that sum.

Two ways to hold what learns. ``ddp``: every rank holds all masters and moments. ``fsdp2``: every rank holds a slice of
each tensor, and a layer is whole only while it is used; 16 bytes a parameter divide by the number of ranks.

Legend: B completions, R response tokens right-padded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mantissa.base.errors import MantissaError

T = TypeVar("T")
_BUCKET = 1 << 24  # gradients that are added over ranks in one message: 64 MiB


def world_size() -> int | None:
    """How many processes torchrun (or ``mantissa train``) started this one with; None where neither did."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def is_dtensor(value: Any) -> bool:
    """Whether ``value`` is a DTensor; costs no import where none can exist."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_fsdp(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to this module."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(model, module.FSDPModule)


@dataclass(frozen=True)
class Ranks:
    """The processes that train one model together, as one of them sees them.

    ``device``: where small messages are made (gloo: ``cpu``). ``kind``: how a run of RL holds its learner.
    """

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    kind: Literal["ddp", "fsdp2"] = "ddp"

    @classmethod
    def of(cls, model: nn.Module) -> Ranks:
        """The ranks of a model that ``distribute`` (or the caller) wrapped; ``ALONE`` in one process.

        Raises ``MantissaError`` where there are several processes but nothing would synchronise the model.
        """
        ranks = cls.here()
        if ranks.world > 1 and not isinstance(model, nn.parallel.DistributedDataParallel) and not is_fsdp(model):
            raise MantissaError(
                f"{ranks.world} processes, but the model is neither DDP nor FSDP2: each would train a copy of its own; "
                'wrap it first, as in model = distribute(model, "ddp")'
            )
        return ranks

    @classmethod
    def here(cls) -> Ranks:
        """The processes of the group that this one has joined; ``ALONE`` where it has joined none, or has it alone."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return ALONE
        device = f"cuda:{torch.cuda.current_device()}" if dist.get_backend() == "nccl" else "cpu"
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.world == 1

    @property
    def rank0(self) -> bool:
        """Whether this is the rank that writes and talks."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """Whether the learner's tensors are slices."""
        return self.kind == "fsdp2" and not self.alone

    # numbers and values

    def max(self, value: Tensor) -> Tensor:
        """Largest of a 0-dim tensor over ranks (NaN is not ordered: map it to inf first)."""
        return self._reduce(value, dist.ReduceOp.MAX) if self.world > 1 else value

    def max_of(self, value: float) -> float:
        """Largest of a number over ranks."""
        return float(self.max(torch.tensor(value, dtype=torch.float64))) if self.world > 1 else value

    def sum_of(self, value: float) -> float:
        """Sum of a number over ranks."""
        if self.world == 1:
            return value
        return float(self._reduce(torch.tensor(value, dtype=torch.float64), dist.ReduceOp.SUM))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in the order of ranks, on every rank. Values are pickled: no tensors on a GPU."""
        if self.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast(self, value: T) -> T:
        """Rank 0's ``value``: what the others found may be newer or older."""
        found: T = self.gather(value)[0]
        return found

    def first_of(self, value: T | None) -> T | None:
        """The first ``value`` that is not None, in the order of ranks; None where none has one."""
        return next((other for other in self.gather(value) if other is not None), None)

    def agreed(self, work: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
        """What ``work`` gives here, once it has succeeded in every process.

        Where it raised ``MantissaError`` in one, it raises the first one's message in all, for the rest would go on
        with what that one does not have, or wait for it; what it gave here goes to ``undo`` first. Other exceptions are
        faults: they end their process, and the others lose it.
        """
        problem: MantissaError | None = None
        result: list[T] = []
        try:
            result.append(work())
        except MantissaError as error:
            problem = error
        message = self.first_of(None if problem is None else str(problem))
        if message is None:
            return result[0]
        for made in result:
            if undo is not None:
                undo(made)
        if problem is not None and str(problem) == message:
            raise problem
        raise MantissaError(message) from problem

    # work in shares

    def shard(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's share of things that come in a list: every n-th."""
        return items if self.alone else items[self.rank :: self.world]

    def gather_shards(self, done: Sequence[T]) -> list[T]:
        """The inverse of ``shard``: what every rank made of its share, in the order of the list."""
        gathered = self.gather(list(done))
        return [gathered[i % len(gathered)][i // len(gathered)] for i in range(sum(map(len, gathered)))]

    def sum_(self, tensor: Tensor) -> None:
        """Sum a tensor over ranks, in place, on its own device; every rank gets the same bits."""
        if self.world > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)

    def join_rows(self, *values_BR: Tensor) -> None:
        """Fill in, in place, the rows that other ranks computed. Rows that this rank did not compute must hold zeros.

        To the last bit: 32-bit patterns are added as integers, so neither a NaN nor a -0.0 changes.
        """
        if not self.alone:
            for values in values_BR:
                self.sum_(values.view(torch.int32))

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the gradients of whole parameters over ranks, in fp32; those of sharded ones are added by the backward.

        A parameter without a gradient takes part with zeros. All ranks get the same bits.
        """
        if self.alone:
            return
        for bucket in _buckets(p for p in parameters if p.requires_grad and not is_dtensor(p)):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            self.sum_(flat)
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors as they are written: slices made whole one at a time, and kept (on the CPU) by rank 0 alone.

        Collective where they are sharded; then other ranks get nothing.
        """
        if not self.sharded:
            return dict(tensors)
        kept = {}
        for name, tensor in tensors.items():
            full = tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
            if self.rank0:
                kept[name] = full.detach().cpu()
        return kept

    def check_alike(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise where ranks that should hold the same fp32 tensors do not: their sums of bits, as integers, differ.

        They can only go apart through a fault, such as a product that is not the same twice; and then silently.
        """
        if self.alone or self.sharded:
            return
        sums = [tensor.detach().view(torch.int32).sum(dtype=torch.int64) for tensor in tensors.values()]
        gathered = self.gather(torch.stack(sums).tolist())
        for name, *found in zip(tensors, *gathered, strict=True):
            if len(set(found)) > 1:
                raise MantissaError(
                    f"ranks that learn alike hold different weights: {name} differs on rank "
                    f"{next(rank for rank, value in enumerate(found) if value != found[0])}; a device or a kernel does "
                    "not repeat its results; resume from the last checkpoint, and look at that device"
                )

    def _reduce(self, value: Tensor, op: Any) -> Tensor:
        message = value.detach().to(self.device, copy=True)
        dist.all_reduce(message, op=op)
        return message


ALONE = Ranks()


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        bucket.append(parameter)
        size += parameter.numel()
        if size >= _BUCKET:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
