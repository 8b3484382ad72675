"""What only a GPU can show: which attention kernel runs, fp32 results of half products, TF32, agreement with the CPU.

The tables of operations, embeddings and the probe run on CUDA too, in their own files.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_oracle import attended
from mantissa.kernels import NativeKernels
from mantissa.precision import BF16, E4M3, E5M2, FP16, FP32, NumberFormat, round_by_arithmetic, round_to_format

pytestmark = pytest.mark.gpu
halves = pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)


def on_grid(fmt: NumberFormat, *shape: int, scale: float = 1.0) -> Tensor:
    return round_to_format(torch.randn(*shape) * scale, fmt)


@pytest.mark.parametrize("fmt", [FP16, BF16, E5M2, E4M3], ids=str)
def test_rounding_on_cuda_is_rounding_on_the_cpu(fmt: NumberFormat) -> None:
    halves_as_fp32 = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    dense = (torch.arange(2**20, dtype=torch.int32) << 12).view(torch.float32)  # every 4096th fp32 pattern
    for x in (halves_as_fp32, dense):
        kept = x[~x.isnan()]
        got = round_to_format(kept.cuda(), fmt).cpu()
        assert torch.equal(got.view(torch.int32), round_by_arithmetic(kept, fmt).view(torch.int32))
        assert bool(round_to_format(x[x.isnan()].cuda(), fmt).isnan().all())


@halves
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_half_attention_runs_on_the_flash_kernel(fmt: NumberFormat, kv_heads: int) -> None:
    """Restricted to flash, torch raises where it cannot use it; the result is held against float64."""
    q, k, v = on_grid(fmt, 2, 8, 300, 64), on_grid(fmt, 2, kv_heads, 300, 64), on_grid(fmt, 2, kv_heads, 300, 64)
    leaves = [x.cuda().to(fmt.dtype).requires_grad_() for x in (q, k, v)]
    seed = on_grid(fmt, 2, 8, 300, 64)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = NativeKernels(fmt).causal_attention(*leaves)
        got = [out, *torch.autograd.grad(out, leaves, seed.cuda().to(fmt.dtype))]
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected_out = attended(*exact)
    expected = [expected_out, *torch.autograd.grad(expected_out, exact, seed.double())]
    for ours, wide in zip(got, expected, strict=True):
        error = (ours.detach().cpu().double() - wide.detach()).abs().max()
        assert error <= 2 * fmt.epsilon * wide.abs().max()


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_fp32_attention_runs_on_the_memory_efficient_kernel(kv_heads: int) -> None:
    q, k, v = (torch.randn(2, h, 300, 64) for h in (8, kv_heads, kv_heads))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = NativeKernels(FP32).causal_attention(q.cuda(), k.cuda(), v.cuda())
    expected = attended(q.double(), k.double(), v.double())
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-4, atol=1e-5)


@halves
def test_logits_keep_the_accumulator(fmt: NumberFormat) -> None:
    x, master = on_grid(fmt, 64, 2048), torch.randn(512, 2048)
    logits = NativeKernels(fmt).logits(x.cuda().to(fmt.dtype), master.cuda())
    weight = round_to_format(master, fmt).double()
    exact, terms = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
    assert logits.dtype == torch.float32
    assert bool(((logits.cpu().double() - exact).abs() <= 2.0**-16 * terms).all())  # 2048 additions in fp32
    assert not torch.equal(round_to_format(logits, fmt), logits)


@halves
def test_long_sums_are_not_reduced_in_half(fmt: NumberFormat) -> None:
    """A split sum that is combined in half loses what lies below half an ulp of the largest part."""
    x = torch.zeros(8, 16384)
    x[:, 0], x[:, 1:] = 2 / fmt.epsilon, 2.0 ** (-9 if fmt is FP16 else -12)
    out = NativeKernels(fmt).linear(x.cuda().to(fmt.dtype), torch.ones(8, 16384, device="cuda"))
    exact = x.double().sum(-1)
    assert bool(((out.cpu().double()[:, 0] - exact).abs() <= fmt.epsilon / 2 * exact * 1.01).all())


def test_fp32_is_not_tf32() -> None:
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    out = NativeKernels(FP32).linear(a.cuda(), b.cuda()).cpu().double()
    exact, terms = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
    assert bool(((out - exact).abs() <= 2.0**-18 * terms).all())  # TF32 errs by 2^-11 a term
