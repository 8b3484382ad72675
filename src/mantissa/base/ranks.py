"""Where a run is: the device that it is on, and the processes (ranks) that work on one model.

``distribute`` wraps a model for DDP (every rank holds all of it) or FSDP2 (every rank holds a slice of each tensor, and
a layer is whole only while it is used; 16 bytes a parameter divide by the number of ranks) under ``torchrun``. With one
process every function and every method is the identity, so there is no branch elsewhere. Methods of ``Ranks`` (but
properties, ``shard`` and ``whole`` of unsharded tensors) are collective: every rank calls them, in one order.

What must agree between ranks, and how: the largest gradient (MAX, hence found-inf), the weights of batches (SUM), the
end of the data (MAX of "have one"). A wrapped model's gradients are averaged by DDP and FSDP2 themselves, in fp32.

All that is *decided* in a run of RL is decided by every rank alike, from values that all of them have; numbers that are
computed in shares (log-probs of rows, gradients of rows) are put together here: rows to the last bit, gradients as a
sum and never as a mean, so that they do not depend on the number of ranks but for the order of that sum.

Legend: B completions, R response tokens right-padded.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mantissa.base.environ import STORE
from mantissa.base.errors import MantissaError

T = TypeVar("T")
_BUCKET = 1 << 24  # gradients that are added over ranks in one message: 64 MiB


def choose_device(name: str) -> torch.device:
    """``auto`` is cuda where there is one; cuda where there is none is an error, never a CPU.

    One of several processes gets a GPU to itself, by its number on this machine.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise MantissaError(f"device={name}: expected auto, cpu or cuda")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise MantissaError("device=cuda, but torch sees no CUDA device here; use device=cpu or device=auto")
    if name == "cpu" or world_size() is None:
        return torch.device(name)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if rank >= torch.cuda.device_count():
        raise MantissaError(
            f"nproc: process {rank + 1} of this machine has no GPU, for torch sees {torch.cuda.device_count()}; lower "
            "nproc, or set device=cpu"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def be_deterministic(device: torch.device) -> None:
    """Ask torch for kernels that give the same bits every time; an operation that has none raises when it is used.

    On CUDA also: half products are accumulated in fp32 throughout (torch lets cuBLAS combine partial sums in half).
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS makes its handle
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(True)
    else:  # the same without importing torch's compiler, which takes longer than all else at a command's start
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"  # read if it is imported later
        torch.set_deterministic_debug_mode("error")
    # That mode also fills every new tensor with NaN before the operation that made it writes it: a tenth of the time of
    # a simulated step, and no operation here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


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
        gathered = self.gather([int(total) for total in sums])
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


def local(tensor: Tensor) -> Tensor:
    """This rank's numbers of a tensor: a DTensor's shard, the values of a sparse gradient, any other tensor itself.

    They share the tensor's memory; not those of a sparse one whose entries for one place are still to be added up.
    """
    if tensor.is_sparse:
        return tensor.coalesce().values()
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def grad_norm(gradients: Iterable[Tensor], wide: bool = False) -> Tensor:
    """Euclidean norm of all gradients, whole ones and sharded ones (each shard counted once); 0-dim, fp32.

    sqrt(sum_g ||g||^2). ``wide``: in float64, whose squares neither overflow nor vanish, as fp32's do above 1.8e19 and
    below 1e-19. Collective where there are DTensors.
    """
    plain: list[Tensor] = []
    sharded: list[Tensor] = []
    for gradient in gradients:
        (sharded if is_dtensor(gradient) else plain).append(gradient)
    if wide:
        parts: list[Any] = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in map(local, plain)]
        parts += [torch.linalg.vector_norm(g, dtype=torch.float64).full_tensor() for g in sharded]
        return torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]))
    norm = torch.nn.utils.get_total_norm([local(gradient) for gradient in plain])
    if not sharded:
        return norm
    across: Any = torch.nn.utils.get_total_norm(sharded)
    return torch.hypot(norm.to(across.device), across.full_tensor())


def is_ddp(model: nn.Module) -> bool:
    """Whether the model is wrapped in DDP."""
    return isinstance(model, nn.parallel.DistributedDataParallel)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP; any other model itself (FSDP2 shards in place)."""
    return model.module if is_ddp(model) else model  # type: ignore[return-value]


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters by name, those that an optimiser holds: FSDP2's slices, also where a forward without a
    backward has left its whole ones in their place (they are given up, and gathered again by the next forward)."""
    inside = unwrapped(model)
    if is_fsdp(inside):
        for module in inside.modules():
            if is_fsdp(module):
                module.reshard()  # type: ignore[operator]
    return dict(inside.named_parameters())


@contextlib.contextmanager
def synchronising(model: nn.Module, when: bool) -> Iterator[None]:
    """Forward and backward of a micro-batch; ``when`` is False for all but the last, whose backward averages gradients
    over ranks. Without it, n micro-batches would send n times as much as one."""
    if is_ddp(model) and not when:
        with model.no_sync():  # type: ignore[operator]
            yield
        return
    if is_fsdp(model):
        model.set_requires_gradient_sync(when)  # type: ignore[operator]
    yield


def forget_unsent(model: nn.Module) -> None:
    """Drop what FSDP2 has accumulated and not yet exchanged: it lies in the unsharded parameters, beyond ``zero_grad``.

    Torch has no public way to it (as of 2.13), so these are its inner names; where they change, this raises.
    """
    if not is_fsdp(model):
        return
    for module in (m for m in model.modules() if is_fsdp(m)):
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for parameter in (p for group in groups if group is not None for p in group.fsdp_params):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def join(backend: str, **options: Any) -> None:
    """``init_process_group`` for the ranks that the environment describes.

    Those that ``mantissa train`` started find each other through its file, others as ``torchrun`` says. Where all are
    on one machine they talk over its loopback interface, on several gloo over the one that leads to ``MASTER_ADDR``,
    unless ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` say another. By itself gloo takes the one of the machine's
    own name, which is often the loopback's.
    """
    world = os.environ.get("WORLD_SIZE", "")
    if os.environ.get("LOCAL_WORLD_SIZE") == world:
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
        for library in ("GLOO", "NCCL") if loopback else ():
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", str(loopback))
    elif (name := _interface_to(os.environ.get("MASTER_ADDR", ""))) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if STORE in os.environ:
        store = dist.FileStore(os.environ[STORE], int(world))
        options |= {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(world)}
    dist.init_process_group(backend, **options)


def _interface_to(host: str) -> str | None:
    """The network interface by which this machine reaches ``host``, by IPv4 on Linux; None where it is not known.

    And where it is the loopback's, by which no other machine reaches this one.
    """
    if sys.platform != "linux" or not host:
        return None
    import fcntl

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # an interface without an address
                    found = fcntl.ioctl(probe, 0x8915, name.encode().ljust(256, b"\0"))  # SIOCGIFADDR
                    if socket.inet_ntoa(found[20:24]) == own and not own.startswith("127."):
                        return name
    except OSError:
        pass
    return None


def joined(backend: str) -> Ranks:
    """The ranks that ``torchrun`` started, whose group this one joins unless it has; ``ALONE`` where it is but one."""
    if not dist.is_initialized() and (world_size() or 1) > 1:
        join(backend)
    return Ranks.here()


def distribute(
    model: nn.Module,
    kind: Literal["ddp", "fsdp2"],
    *,
    device: torch.device | str | None = None,
    blocks: tuple[type[nn.Module], ...] = (),
    **options: Any,
) -> nn.Module:
    """Wrap ``model`` for the processes that ``torchrun`` started; in one process, return it as it is.

    Call it before making the optimiser: FSDP2 replaces the parameters. Joins the process group (nccl on CUDA, gloo on a
    CPU) unless that is done. ``device``: where the model goes; by default this rank's GPU, or the CPU without one.
    ``blocks``: for FSDP2, classes of modules to shard one by one, so that only one is whole at a time; by default the
    entries of every ``nn.ModuleList``. ``options`` go to ``DistributedDataParallel`` or ``fully_shard``.
    """
    if kind not in ("ddp", "fsdp2"):
        raise MantissaError(f'distribute(kind={kind!r}): expected "ddp" or "fsdp2"')
    on_gpu = torch.device(device).type == "cuda" if device is not None else torch.cuda.is_available()
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    model = model.to(place)
    if on_gpu:
        torch.cuda.set_device(place)
    ranks = joined("nccl" if on_gpu else "gloo")
    if ranks.alone:
        return model
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=[place.index] if on_gpu else None, **options)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise MantissaError(
                f'distribute(kind="fsdp2"): {name} has sparse=True, and FSDP2 exchanges no sparse gradients; set '
                'sparse=False, or take kind="ddp"'
            )
    options.setdefault("mesh", init_device_mesh(place.type, (ranks.world,)))
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    chosen = [m for m in model.modules() if isinstance(m, blocks)] if blocks else [m for each in lists for m in each]
    for module in chosen:
        fully_shard(module, **options)
    fully_shard(model, **options)
    return model


def shard(modules: Iterable[nn.Module], device: torch.device, ranks: Ranks) -> None:
    """A slice of each tensor of ``modules`` on each rank, gathered while that module runs; parts before wholes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(device.type, (ranks.world,))
    for module in modules:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # a sum: each rank's loss is a part of the batch's
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    # Exact kernels' logits are a view of a larger tensor. FSDP2 fears in-place changes of it; nobody makes any.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view tensor")


def whole(value: Any) -> Any:
    """A nested state with every tensor whole and on the CPU, as rank 0 writes it. Collective where there are DTensors,
    so every rank must call it, in the same order; all get the result."""
    if isinstance(value, Tensor):
        full: Tensor = value.full_tensor() if is_dtensor(value) else value  # type: ignore[attr-defined]
        return full.detach().cpu()
    if isinstance(value, dict):
        return {key: whole(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(whole(entry) for entry in value)
    return value


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """A whole tensor laid out as ``like``: its device, and a DTensor's placements. Collective as ``whole``."""
    if not is_dtensor(like):
        return full.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    layout: Any = like
    return distribute_tensor(full.to(like.device), layout.device_mesh, layout.placements)
