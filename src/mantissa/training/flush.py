"""How much of a batch's gradient the format flushes to zero, found by computing it twice."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mantissa.kernels import Autocast
from mantissa.precision import FP32
from mantissa.training.diagnosis import flushed_fraction, gradients_of
from mantissa.training.distributed import is_fsdp, local, synchronising
from mantissa.training.window import Keeper, Micro


def flush_probe(model: nn.Module, micro: Micro, autocast: Autocast, factor: float, device: torch.device) -> float:
    """Fraction of this rank's parameter gradients that are zero in ``autocast``'s format but not in fp32.

    Both passes multiply the loss by ``factor`` (loss scale x weight). Gradients that are already there, buffers and
    generators are put back. Under FSDP2 every rank must call this, with no micro-batch waiting: making gradients is
    exchanging them.
    """
    keeper = Keeper(model, device)
    pending = {parameter: parameter.grad for parameter in model.parameters()}

    def gradients(context: Autocast) -> dict[str, Tensor]:
        found = gradients_of(model, _pass(model, micro, context, factor))
        keeper.restore()
        return {name: local(grad) for name, grad in found.items()}

    low = gradients(autocast)
    exact = gradients(Autocast(FP32, "native", autocast.device_type))
    for parameter, grad in pending.items():
        parameter.grad = grad
    return flushed_fraction(low, exact)


def _pass(model: nn.Module, micro: Micro, autocast: Autocast, factor: float) -> Callable[[], None]:
    def work() -> None:
        assert micro.loss_fn is not None
        with synchronising(model, is_fsdp(model)):
            with autocast.forward():
                loss = micro.loss_fn(model, micro.batch)
            with autocast.backward():
                (loss.float() * factor).backward()

    return work
