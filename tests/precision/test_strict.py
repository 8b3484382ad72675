"""Strict promotion: what it stops, what it lets through, and what it says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from strict_promotion import StrictPromotion

Half, Float, Double = (torch.ones(2, 2, dtype=d) for d in (torch.float16, torch.float32, torch.float64))
HEADS = [torch.ones(1, 2, 8, 8).half().requires_grad_() for _ in range(3)]
MIXES: dict[str, Callable[[], object]] = {
    "mul": lambda: Half * Float,
    "add_": lambda: Float.clone().add_(Half),
    "div": lambda: Double / Float,
    "cat": lambda: torch.cat([Half, Float]),
    "stack": lambda: torch.stack([Half, Float]),
    "where": lambda: torch.where(Half > 0, Half, Float),
    "addcmul": lambda: torch.addcmul(Float, Float, Half),
    "foreach, same entry": lambda: torch._foreach_add([Float, Half], [Half, Float]),
    "foreach, second entry": lambda: torch._foreach_mul_([Float.clone(), Float.clone()], [Float, Half]),
    "bf16 with fp16": lambda: torch.maximum(Half, Half.bfloat16()),
}
ALLOWED: dict[str, Callable[[], object]] = {
    "python scalar": lambda: Half * 2.5 + 1,
    "zero-dimensional": lambda: Half * torch.tensor(2.0) + torch.tensor(1.0, dtype=torch.float64),
    "integers": lambda: Half * torch.arange(2) + torch.tensor([[True, False]]),
    "cast": lambda: Half.float() + Float,
    "copy_": lambda: Half.clone().copy_(Float),
    "fused attention, whose log-sum-exp is fp32": lambda: F.scaled_dot_product_attention(*HEADS).sum().backward(),
    "foreach copy": lambda: torch._foreach_copy_([Half.clone()], [Float]),
    "foreach over entries of several dtypes": lambda: torch._foreach_mul([Half, Float, Double], 2.0),
    "foreach pairs that agree": lambda: torch._foreach_add([Half, Float], [Half, Float]),
    "fp8 cast": lambda: Float.to(torch.float8_e4m3fn),
    "boolean mask": lambda: Half.masked_fill(Half > 0, 0.0),
}


@pytest.mark.parametrize("name", MIXES)
def test_mixing_raises(name: str) -> None:
    with StrictPromotion(), pytest.raises(RuntimeError, match="strict promotion: aten::"):
        MIXES[name]()


@pytest.mark.parametrize("name", ALLOWED)
def test_not_mixing_passes(name: str) -> None:
    with StrictPromotion():
        ALLOWED[name]()


def test_a_mix_in_the_backward_raises_too() -> None:
    class MixesInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> Tensor:
            return grads[0] * torch.ones(2, 2, dtype=torch.float64)

    x = torch.ones(2, 2, requires_grad=True)
    loss = MixesInBackward.apply(x).sum()
    with pytest.raises(RuntimeError, match=r"aten::mul mixes torch.float32, torch.float64"):
        loss.backward()


def test_the_whole_suite_runs_in_it_and_a_mode_that_ended_no_longer_raises() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode_temporarily

    assert any(isinstance(mode, StrictPromotion) for mode in _get_current_dispatch_mode_stack())
    with _pop_mode_temporarily():
        assert (Half * Float).dtype == torch.float32
