"""``rounded_attention``: bit for bit where everything is exact, and against torch in float64 in all its variants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.kernels import rounded as module
from mantissa.kernels.rounded import rounded_attention
from mantissa.precision import BF16, FP16, NumberFormat, round_by_arithmetic

both = pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)


@both
def test_where_it_rounds_bit_for_bit(fmt: NumberFormat) -> None:
    """Keys orthogonal to queries: every probability is 1/7, and every other number is whole. The places of rounding
    are those of a flash kernel: P, O, dS and the three gradients; rounding P or dS elsewhere would show. 1/7 in fp32
    times a whole number may land on the other side of a tie: one value in fifty may differ."""
    exact = [torch.randint(-9, 10, (2, 3, n, 8), dtype=torch.float64) for n in (5, 7, 7, 5)]
    q, k, v, grad = exact
    q[..., 4:], k[..., :4] = 0, 0
    given = [x.to(fmt.dtype).requires_grad_() for x in (q, k, v)]
    out = rounded_attention(*given, scale=0.5)
    gradients = torch.autograd.grad(out, given, grad.to(fmt.dtype))

    p = torch.full((2, 3, 5, 7), 1 / 7, dtype=torch.float64)
    p_rounded = round_by_arithmetic(p, fmt)
    want = round_by_arithmetic(p_rounded @ v, fmt)
    d_scores = p * (grad @ v.transpose(-1, -2) - (grad * want).sum(-1, keepdim=True))
    d_rounded = round_by_arithmetic(d_scores, fmt)
    expected = [d_rounded @ k * 0.5, d_rounded.transpose(-1, -2) @ q * 0.5, p_rounded.transpose(-1, -2) @ grad]
    assert torch.equal(out.detach().double(), want)
    assert not torch.equal(want, round_by_arithmetic(p @ v, fmt)), "rounding P does not show"
    assert not torch.equal(round_by_arithmetic(d_scores @ k * 0.5, fmt), round_by_arithmetic(expected[0], fmt))
    for got, wanted in zip(gradients, expected, strict=True):
        assert (got.double() != round_by_arithmetic(wanted, fmt)).double().mean() <= 0.02


def variants() -> dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]]:
    q, k = (2, 4, 21, 16), (2, 4, 33, 16)
    seen = torch.rand(2, 1, 21, 33) > 0.4
    seen[..., 0] = True
    return {
        "plain": (q, k, {}),
        "scale": (q, k, {"scale": 0.1}),
        "causal": (k, k, {"is_causal": True}),
        "causal, fewer queries": (q, k, {"is_causal": True}),
        "causal, fewer keys": (k, q, {"is_causal": True}),
        "mask of booleans": (q, k, {"attn_mask": seen}),
        "added mask": (q, k, {"attn_mask": torch.randn(21, 33).half()}),
        "shared heads": (q, (2, 2, 33, 16), {"enable_gqa": True}),
        "broadcast over the batch": (q, (1, 4, 33, 16), {}),
        "three dimensions": (q[1:], k[1:], {}),
    }


@pytest.mark.parametrize(("block", "fmt"), [(2**20, FP16), (1, BF16)], ids=["one block", "blocks"])
@pytest.mark.parametrize("name", variants())
def test_variants_against_float64(name: str, block: int, fmt: NumberFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own attention and autograd in float64, on the same half operands; within a few roundings."""
    monkeypatch.setattr(module, "_BLOCK_SCORES", block)  # 1: blocks of sixteen queries
    q_shape, k_shape, options = variants()[name]
    given = [torch.randn(s).to(fmt.dtype).requires_grad_() for s in (q_shape, k_shape, k_shape)]
    exact = [x.detach().double().requires_grad_() for x in given]
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        mask = mask.to(fmt.dtype).requires_grad_()
        options = {**options, "attn_mask": mask}
        given.append(mask)
        exact.append(mask.detach().double().requires_grad_())
    wide = {**options, "attn_mask": exact[3]} if len(exact) == 4 else options
    out, want = rounded_attention(*given[:3], **options), F.scaled_dot_product_attention(*exact[:3], **wide)
    seed = torch.randn(want.shape).to(fmt.dtype)
    gradients = torch.autograd.grad(out, given, seed)
    expected = torch.autograd.grad(want, exact, seed.double())
    for got, wanted in zip((out, *gradients), (want, *expected), strict=True):
        assert got.dtype == fmt.dtype
        assert got.shape == wanted.shape
        error = (got.detach().double() - wanted.detach()).norm() / wanted.detach().norm()
        assert 0.05 * fmt.epsilon < error < fmt.epsilon


def test_queries_that_see_nothing_give_zeros_and_no_gradient() -> None:
    q, k, v = (torch.randn(1, 1, 4, 8).half().requires_grad_() for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    out = rounded_attention(q, k, v, mask)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert torch.equal(out[0, 0, 1], torch.zeros(8).half())
    assert torch.equal(gradients[0][0, 0, 1], torch.zeros(8).half())
    assert all(bool(g.isfinite().all()) for g in gradients)


@both
def test_dropout_against_float64_with_the_mask_it_drew(fmt: NumberFormat) -> None:
    """Values that are the identity show which probabilities were kept; then the rest is float64 with that mask."""
    q, k, v = (torch.randn(2, 3, 24, 24).to(fmt.dtype).requires_grad_() for _ in range(3))
    eye = torch.eye(24).to(fmt.dtype).expand(2, 3, 24, 24)
    torch.manual_seed(5)
    kept = rounded_attention(q, k, eye, dropout_p=0.3) != 0
    torch.manual_seed(5)
    out = rounded_attention(q, k, v, dropout_p=0.3)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    p = torch.softmax(exact[0] @ exact[1].transpose(-1, -2) * 24**-0.5, -1)
    want = torch.where(kept, p / 0.7, torch.zeros_like(p)) @ exact[2]
    seed = torch.randn(want.shape).to(fmt.dtype)
    assert abs(kept.double().mean().item() - 0.7) < 0.03
    gradients = torch.autograd.grad(out, (q, k, v), seed)
    expected = torch.autograd.grad(want, exact, seed.double())
    for got, wanted in zip((out, *gradients), (want, *expected), strict=True):
        error = (got.detach().double() - wanted.detach()).norm() / wanted.detach().norm()
        assert 0.05 * fmt.epsilon < error < fmt.epsilon
    assert torch.equal(rounded_attention(q, k, v, dropout_p=1.0), torch.zeros_like(v))


def test_a_gradient_beyond_the_format_overflows() -> None:
    q, k, v = (torch.ones(1, 1, 2, 8).half().requires_grad_() for _ in range(3))
    out = rounded_attention(q, k, v)
    (grad,) = torch.autograd.grad(out, v, torch.full_like(out, 60000.0))
    assert torch.equal(grad.isinf(), torch.zeros_like(grad, dtype=torch.bool))  # 2 * 60000 / 2
    out = rounded_attention(q[:, :, :1].expand(1, 1, 4, 8), k, v)
    (grad,) = torch.autograd.grad(out, v, torch.full_like(out, 60000.0))
    assert bool(grad.isinf().all())  # 4 * 60000 / 2


def test_gradients_twice_are_refused() -> None:
    x: Tensor = torch.randn(1, 1, 4, 8).half().requires_grad_()
    (grad,) = torch.autograd.grad(rounded_attention(x, x, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
