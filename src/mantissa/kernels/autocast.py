"""A number format for any torch module: its forward and loss, and the backward pass of what they computed.

``Kernels`` give our own model its operations one by one. A module written by someone else calls torch, so precision has
to come from around it. Parameters stay fp32 masters; ``Autocast`` has two contexts:

    with autocast.forward():
        loss = loss_fn(model, batch)
    with autocast.backward():
        loss.backward()

native: ``torch.amp.autocast`` of the device type in the forward pass. The backward pass runs in the types that the
forward pass chose, so nothing is needed there.

simulated: the same, on any device, with CUDA's choice of types (``autocast_lists``) and with a tensor core's arithmetic
(``rounded_ops``), in both passes. Tensors are half tensors, so overflow beyond 65504 and the flush below 2^-25 are
torch's own casts, in activations and in gradients.

fp32: autocast switched off, so that one around the caller does not leak in.

What is not in a product keeps CUDA's autocast types: softmax, norms and losses fp32, embeddings fp32, element-wise
operations in the type they are given. Weights are cast once for each forward pass and their gradients arrive in fp32,
rounded to the format.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from mantissa.errors import MantissaError
from mantissa.kernels.autocast_lists import follow_cuda
from mantissa.kernels.rounded_ops import RoundedOps, rounding
from mantissa.precision import FP32, NumberFormat, ResolvedRole
from mantissa.precision.policy import Backend

_HALF_FORMATS = ("fp16", "bf16")


class Autocast:
    """How modules that are not ours compute in ``format`` on ``device_type``; ``backend`` as in ``ResolvedRole``.

    Both contexts may be entered any number of times, inside each other too, and under ``torch.no_grad``. With
    activation checkpointing the recomputation happens inside ``backward()``, in the format. Thread-local, but for two
    switches of torch that are global: the fast path of ``nn.MultiheadAttention`` is off within a simulated
    ``forward()``, the fused recurrent layers while a recurrent layer runs.

    Raises ``MantissaError`` for a format that has no autocast (fp8) and a device type that torch cannot autocast.
    """

    def __init__(self, fmt: NumberFormat, backend: Backend, device_type: str) -> None:
        if fmt != FP32 and fmt.name not in _HALF_FORMATS:
            raise MantissaError(f"precision={fmt}: modules run in fp32, {' or '.join(_HALF_FORMATS)}, not in fp8")
        if not torch.amp.autocast_mode.is_autocast_available(device_type):
            raise MantissaError(f"device={device_type}: torch has no autocast for it; choose cpu or cuda")
        self.format = fmt
        self.backend = backend
        self.device_type = device_type

    def __repr__(self) -> str:
        return f"Autocast({self.format}, {self.backend}, {self.device_type})"

    @property
    def _simulates(self) -> bool:
        return self.backend == "simulated" and self.format != FP32

    def forward(self) -> AbstractContextManager[None]:
        """The context of the model's forward pass and of its loss."""
        return self._forward()

    def backward(self) -> AbstractContextManager[None]:
        """The context of the backward pass of what ``forward()`` computed. An autocast around it does not leak in."""
        return self._backward()

    @contextmanager
    def _forward(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._simulates:
                follow_cuda(self.device_type)
                stack.enter_context(_no_attention_fast_path())
                _enter_rounding(stack, keep_casts=True)
            dtype, enabled = (None, False) if self.format == FP32 else (self.format.dtype, True)
            stack.enter_context(torch.autocast(self.device_type, dtype=dtype, enabled=enabled))
            yield

    @contextmanager
    def _backward(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._simulates:
                _enter_rounding(stack, keep_casts=False)
            stack.enter_context(torch.autocast(self.device_type, enabled=False))
            yield


def autocast_for(role: ResolvedRole, device: torch.device | str) -> Autocast:
    """The ``Autocast`` of a role's active format and backend on ``device``."""
    return Autocast(role.active, role.backend, torch.device(device).type)


def _enter_rounding(stack: ExitStack, keep_casts: bool) -> None:
    if rounding() is None:  # once is enough: a second mode would only look at what the first has done
        stack.enter_context(RoundedOps(keep_casts))


@contextmanager
def _no_attention_fast_path() -> Iterator[None]:
    """``nn.MultiheadAttention`` leaves autocast out in its fast path for evaluation, except under CUDA's autocast."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
