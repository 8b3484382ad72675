"""Several processes: joining them, wrapping a model for them, what is sharded; ``mantissa.base.ranks`` is who they are.

``distribute`` wraps a model for DDP (every rank holds all of it) or FSDP2 (every rank holds a shard of each parameter)
under ``torchrun``. With one process every function here is the identity, so there is no branch elsewhere.

What must agree between ranks, and how: the largest gradient (MAX, hence found-inf), the weights of batches (SUM), the
end of the data (MAX of "have one"). Gradients are averaged by DDP and FSDP2 themselves, in fp32.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mantissa.base.environ import STORE
from mantissa.base.errors import MantissaError
from mantissa.base.ranks import Ranks, is_dtensor, is_fsdp, world_size


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
