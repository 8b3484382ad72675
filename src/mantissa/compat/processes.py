"""Several processes under ``torchrun``: joining them, leaving them, and placing a model among them."""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mantissa.compat.config import ExtendedFP16Config
from mantissa.errors import MantissaError
from mantissa.training import distribute
from mantissa.training.distributed import join


def init_distributed(backend: str | None = None) -> tuple[int, int]:
    """Join the process group that ``torchrun`` describes; returns rank and world size, (0, 1) where there is but one.

    ``backend``: by default nccl where there is CUDA, else gloo.
    """
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return 0, 1
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # before nccl's first message
        join(backend or ("nccl" if torch.cuda.is_available() else "gloo"))
    return dist.get_rank(), dist.get_world_size()


def cleanup_distributed() -> None:
    """Leave the process group, if there is one. In a ``finally`` too: while an exception is on its way, it waits for
    nobody, so that the other ranks learn of the failure instead of waiting for this one."""
    if dist.is_initialized():
        if sys.exc_info()[0] is None:
            dist.barrier()  # a rank that leaves early can abort another that still listens to it
        dist.destroy_process_group()


def device_for(device: torch.device | str | None) -> torch.device:
    """The device that is given, else this process's own GPU (by ``LOCAL_RANK``), else the CPU."""
    if device is not None:
        return torch.device(device)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _buffers(broadcast: bool) -> dict[str, Any]:
    """DDP's option for buffers, where it is not the default: torch 2.13 gave it another name."""
    if broadcast:
        return {}
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def placed(
    model: nn.Module, config: ExtendedFP16Config, device: torch.device, rank: int | None, world_size: int | None
) -> nn.Module:
    """The model on its device, in DDP where that is asked for, once it is clear which processes there are."""
    if config.use_ddp and not isinstance(model, nn.parallel.DistributedDataParallel):
        model = distribute(
            model,
            "ddp",
            device=device,
            find_unused_parameters=config.find_unused_parameters,
            **_buffers(config.broadcast_buffers),
        )
    present = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    asked = (present[0] if rank is None else rank, present[1] if world_size is None else world_size)
    if asked != present:
        raise MantissaError(
            f"rank {asked[0]} of {asked[1]} was asked for, but this process is rank {present[0]} of {present[1]}: "
            "start it with torchrun, call init_distributed() first, and hand on what that returns"
        )
    if present[1] > 1 and not isinstance(model, nn.parallel.DistributedDataParallel):
        raise MantissaError(f"{present[1]} processes would each train a model of their own: set use_ddp=True")
    return model.to(device)
