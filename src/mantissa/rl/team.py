"""The processes of one run: what each of them does, and how it becomes the work of one.

Every process (rank) samples and grades its share of the prompts, scores its share of the completions, and computes the
gradient of its share. All that is *decided* is decided by every rank alike, from the whole batch: after sampling, each
rank gets everybody's completions and rewards, and after scoring everybody's log-probs. They are small beside the work
that made them. So advantages, normalisations, dynamic sampling, correction, rejection and the weight of each token in
the loss are computed as in one process, by the same lines, and a rank's gradient is a *part of the sum* that one
process would have taken: gradients are added over ranks, never averaged, and do not depend on their number but for the
order of a sum. Which completions a step samples does not depend on it at all: each is a function of the seed, the step
and the prompt's place.

Two ways to hold the learner. ``ddp``: every rank holds all masters and moments, and adds gradients once a backward (all
micro-batches of it). ``fsdp2``: every rank holds a slice of each tensor, and a layer is whole only while it is used;
16 bytes a parameter divide by the number of ranks, and the weights travel once in each forward and each backward. The
rollout's copy of the policy, and the reference's, are whole on every rank in both.

Rank 0 writes the run's folder. What it writes is whole tensors, so a run goes on with any number of ranks.

Legend: B completions, R response tokens right-padded.
"""

from __future__ import annotations

import heapq
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mantissa.errors import MantissaError
from mantissa.model import Decoder
from mantissa.ranks import ALONE as ONE
from mantissa.ranks import Ranks, is_dtensor
from mantissa.rl.config import RunConfig
from mantissa.rl.experience import Sequences
from mantissa.training.distributed import join

T = TypeVar("T")
_BUCKET = 1 << 24  # gradients that are added over ranks in one message: 64 MiB
_PATIENCE = timedelta(minutes=30)  # that a rank waits for another: one may have sampled much longer responses


@dataclass(frozen=True)
class Team:
    """The ranks of a run, and how they hold the learner. One process is a team too: its methods do nothing then."""

    ranks: Ranks = ONE
    kind: Literal["ddp", "fsdp2"] = "ddp"

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.ranks.world == 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and talks."""
        return self.ranks.rank == 0

    @property
    def sharded(self) -> bool:
        """Whether the learner's tensors are slices."""
        return self.kind == "fsdp2" and not self.alone

    # what each does

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's share of things that come in a list: every n-th."""
        return items if self.alone else items[self.ranks.rank :: self.ranks.world]

    def everybodys(self, done: Sequence[T]) -> list[T]:
        """The inverse of ``mine``: what every rank made of its share, in the order of the list."""
        gathered = self.ranks.gather(list(done))
        return [gathered[i % len(gathered)][i // len(gathered)] for i in range(sum(map(len, gathered)))]

    def micro_batches(self, sequences: Sequences, rows: Tensor, tokens: int) -> list[Tensor]:
        """The parts of ``rows`` that this rank computes, of at most ``tokens`` padded tokens each.

        Ranks get equal numbers of tokens, as nearly as whole sequences allow, and equal numbers of parts, for each
        part is an exchange with the others where the learner is sharded. A part without rows is one only in number:
        its rank computes what it likes, and nothing of it may count.
        """
        if self.alone:
            return sequences.micro_batches(rows, tokens)
        lengths = sequences.length_B[rows].tolist()
        parts = [
            sequences.micro_batches(rows[torch.tensor(share, dtype=torch.int64, device=rows.device)], tokens)
            for share in balanced(lengths, self.ranks.world)
        ]
        mine = parts[self.ranks.rank]
        return mine + [rows[:0]] * (max(map(len, parts)) - len(mine))

    def scored_by(self, sequences: Sequences, rows: Tensor, tokens: int, row: int) -> Tensor:
        """The part, on whatever rank, in which ``row`` is computed."""
        for rank in range(self.ranks.world):
            other = Team(Ranks(rank, self.ranks.world), self.kind)
            for part in other.micro_batches(sequences, rows, tokens):
                if bool((part == row).any()):
                    return part
        raise ValueError(f"row {row} is not among the rows")

    # how it becomes one

    def join_rows(self, *values_BR: Tensor) -> None:
        """Fill in, in place, the rows that other ranks computed. Rows that this rank did not compute must hold zeros.

        To the last bit: 32-bit patterns are added as integers, so neither a NaN nor a -0.0 changes.
        """
        if not self.alone:
            for values in values_BR:
                self.ranks.sum_(values.view(torch.int32))

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the gradients of whole parameters over ranks, in fp32; those of sharded ones are added by the backward.

        A parameter without a gradient takes part with zeros. All ranks get the same bits.
        """
        if self.alone:
            return
        for bucket in _buckets(p for p in parameters if p.requires_grad and not is_dtensor(p)):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            self.ranks.sum_(flat)
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
            if self.first:
                kept[name] = full.detach().cpu()
        return kept

    def check_alike(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise where ranks that should hold the same fp32 tensors do not: their sums of bits, as integers, differ.

        They can only go apart through a fault, such as a product that is not the same twice; and then silently.
        """
        if self.alone or self.sharded:
            return
        sums = [tensor.detach().view(torch.int32).sum(dtype=torch.int64) for tensor in tensors.values()]
        everybodys = self.ranks.gather(torch.stack(sums).tolist())
        for name, *found in zip(tensors, *everybodys, strict=True):
            if len(set(found)) > 1:
                raise MantissaError(
                    f"ranks that learn alike hold different weights: {name} differs on rank "
                    f"{next(rank for rank, value in enumerate(found) if value != found[0])}; a device or a kernel does "
                    "not repeat its results; resume from the last checkpoint, and look at that device"
                )

    def decided(self, value: T) -> T:
        """Rank 0's ``value``: what the others found may be newer or older."""
        found: T = self.ranks.gather(value)[0]
        return found

    def said(self, text: str | None) -> str | None:
        """The first text that any rank has; None where none has one."""
        return next((other for other in self.ranks.gather(text) if other is not None), None)

    def prepare(self, model: Decoder, device: torch.device) -> Decoder:
        """The learner's model, whole on ``device`` or with a slice of each tensor there. Before its optimiser is made.

        A layer is gathered for its forward and again for its backward; what belongs to no layer (embedding, last norm,
        head) likewise around ``Decoder.within``.
        """
        if not self.sharded:
            return model.to(device)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        mesh = init_device_mesh(device.type, (self.ranks.world,))
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)  # a sum: each rank's loss is a part of the batch's
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        register_fsdp_forward_method(model, "within")
        # Exact kernels' logits are a view of a larger tensor. FSDP2 fears in-place changes of it; nobody makes any.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view tensor")
        return model


ALONE = Team()


def balanced(lengths: Sequence[int], shares: int) -> list[list[int]]:
    """Indices into ``lengths`` in ``shares`` shares of nearly equal sums: the longest first, to whoever has least.

    A function of its arguments alone. Each share is ascending.
    """
    heap = [(0, share) for share in range(shares)]
    result: list[list[int]] = [[] for _ in range(shares)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        total, share = heapq.heappop(heap)
        result[share].append(index)
        heapq.heappush(heap, (total + lengths[index], share))
    return [sorted(share) for share in result]


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


def world_size() -> int | None:
    """How many processes torchrun (or ``mantissa train``) started this one with; None where neither did."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


@contextmanager
def joined(config: RunConfig, device: torch.device) -> Iterator[Team]:
    """This process's team, for as long as the run takes; ``device`` is this rank's own.

    Joins the process group (gloo, and on GPUs nccl beside it) unless the caller has.
    """
    world = world_size() or 1
    if world != config.nproc:
        raise MantissaError(
            f"nproc={config.nproc}, but this is one of {world} processes: start them with mantissa train RECIPE "
            f"nproc={config.nproc}, or with torchrun --nproc-per-node {config.nproc} -m mantissa train RECIPE"
        )
    if world == 1:
        yield ALONE
        return
    if not dist.is_initialized():
        join("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), "cpu")
    yield Team(ranks, config.parallel or "ddp")
    ranks.gather(None)  # the others wait for the report: a rank that ends early looks like one that died
