"""Where a model that learns lies: whole in each process, or in slices over all of them (FSDP2)."""

from __future__ import annotations

import warnings

import torch

from mantissa.base.ranks import Ranks
from mantissa.model import Decoder


def place(model: Decoder, device: torch.device, ranks: Ranks) -> Decoder:
    """The learner's model, whole on ``device`` or with a slice of each tensor there. Before its optimiser is made.

    A layer is gathered for its forward and again for its backward; what belongs to no layer (embedding, last norm,
    head) likewise around ``Decoder.within``.
    """
    if not ranks.sharded:
        return model.to(device)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (ranks.world,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # a sum: each rank's loss is a part of the batch's
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    register_fsdp_forward_method(model, "within")
    # Exact kernels' logits are a view of a larger tensor. FSDP2 fears in-place changes of it; nobody makes any.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view tensor")
    return model
