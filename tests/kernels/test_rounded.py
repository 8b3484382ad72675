"""Operations and attention under ``RoundedOps``: one rounding of the exact result, whatever torch's half kernels do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.kernels import rounded as module
from mantissa.kernels.rounded import RoundedOps, rounded_attention, rounding
from mantissa.precision import BF16, FP16, FP32, NumberFormat, round_by_arithmetic

FORMATS = [FP16, BF16]
both = pytest.mark.parametrize("fmt", FORMATS, ids=str)


def integers(*shape: int, largest: int = 60) -> Tensor:
    """Whole numbers: their products and sums are exact in fp32 and in float64, in any order."""
    return torch.randint(-largest, largest + 1, shape, dtype=torch.float64)


PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(9, 17), (17, 5)]),
    "bmm": (torch.bmm, [(3, 9, 17), (3, 17, 5)]),
    "matmul 4-D": (torch.matmul, [(2, 3, 9, 17), (2, 3, 17, 5)]),
    "addmm": (lambda *x: torch.addmm(*x, beta=2, alpha=4), [(9, 5), (9, 17), (17, 5)]),
    "baddbmm": (torch.baddbmm, [(3, 9, 5), (3, 9, 17), (3, 17, 5)]),
    "addbmm": (torch.addbmm, [(9, 5), (3, 9, 17), (3, 17, 5)]),
    "mv": (torch.mv, [(9, 17), (17,)]),
    "addmv": (torch.addmv, [(9,), (9, 17), (17,)]),
    "addr": (torch.addr, [(40, 30), (40,), (30,)]),
    "dot": (torch.dot, [(301,), (301,)]),
    "einsum": (lambda x, y: torch.einsum("abi,ibc->ac", x, y), [(4, 3, 17), (17, 3, 6)]),
    "linear": (F.linear, [(2, 9, 17), (5, 17), (5,)]),
    "bilinear": (F.bilinear, [(4, 5), (4, 7), (3, 5, 7)]),
    "conv1d": (F.conv1d, [(2, 4, 19), (6, 4, 3), (6,)]),
    "conv2d, strided, grouped": (lambda *x: F.conv2d(*x, stride=2, padding=1, groups=2), [(2, 4, 9, 9), (6, 2, 3, 3)]),
    "conv2d, dilated": (lambda *x: F.conv2d(*x, dilation=2), [(2, 4, 9, 9), (6, 4, 3, 3), (6,)]),
    "conv3d": (F.conv3d, [(2, 3, 5, 5, 5), (4, 3, 3, 3, 3)]),
    "conv_transpose2d": (lambda *x: F.conv_transpose2d(*x, stride=2), [(2, 4, 5, 5), (4, 3, 3, 3), (3,)]),
}


@both
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_the_exact_result_rounded_once(name: str, fmt: NumberFormat) -> None:
    """Bit for bit against float64, outputs and gradients. Sums of whole numbers of this size pass through no rounding
    but the last, and that one is needed: 17 products of up to 3600 have more digits than either format."""
    function, shapes = PRODUCTS[name]
    exact = [integers(*shape).requires_grad_() for shape in shapes]
    given = [x.detach().to(fmt.dtype).requires_grad_() for x in exact]
    expected = function(*exact)
    seed = integers(*expected.shape)
    with RoundedOps():
        out = function(*given)
        gradients = torch.autograd.grad(out, given, seed.to(fmt.dtype))
    expected_gradients = torch.autograd.grad(expected, exact, seed)
    for got, want in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        assert got.dtype == fmt.dtype
        assert torch.equal(got.detach().double(), round_by_arithmetic(want.detach(), fmt))
    assert not torch.equal(out.detach().double(), expected.detach()), "these numbers do not need the rounding"


def test_overflow_and_flush_are_those_of_the_format() -> None:
    x, w = torch.full((1, 2), 300.0).half(), torch.full((2, 1), 300.0).half()
    tiny = torch.full((1, 1), 2.0**-13).half()
    with RoundedOps():
        assert torch.mm(x, w).item() == math.inf
        assert torch.mm(x.bfloat16(), w.bfloat16()).item() == 180224.0  # 180000 on bf16's grid
        assert torch.mm(tiny, tiny).item() == 0.0
        assert torch.mm(tiny * 2, tiny * 2).item() == 2.0**-24
        image = F.conv2d(torch.full((1, 1, 2, 2), 200.0).half(), torch.full((1, 1, 2, 2), 100.0).half())
    assert image.item() == math.inf


def normal(*shape: int) -> Tensor:
    return torch.randn(shape)


SCATTER = torch.arange(64) % 4
ELEMENTWISE: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "add": (torch.add, [(64, 33), (64, 33)]),
    "add, alpha": (lambda x, y: torch.add(x, y, alpha=0.37), [(64, 33), (64, 33)]),
    "add number": (lambda x: x + 0.3, [(64, 33)]),
    "number minus": (lambda x: 1.3 - x, [(64, 33)]),
    "mul": (torch.mul, [(64, 33), (33,)]),
    "mul number": (lambda x: x * 0.3, [(64, 33)]),
    "div": (torch.div, [(64, 33), (64, 33)]),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), [(64, 33), (64, 33)]),
    "addcmul": (lambda x, y, z: torch.addcmul(x, y, z, value=0.3), [(64, 33), (64, 33), (64, 33)]),
    **{name: (getattr(F, name), [(64, 33)]) for name in ("relu", "silu", "mish", "elu", "hardswish", "logsigmoid")},
    **{name: (getattr(torch, name), [(64, 33)]) for name in ("tanh", "sigmoid", "mean", "sum")},
    "glu": (F.glu, [(64, 34)]),
    "mean of rows": (lambda x: x.mean(1), [(64, 33)]),
    "sum of columns": (lambda x: x.sum(0), [(64, 33)]),
    "var": (lambda x: x.var(1), [(64, 33)]),
    "softmax": (lambda x: torch.softmax(x, -1), [(64, 33)]),
    "softmax of columns": (lambda x: torch.softmax(x, 0), [(64, 33)]),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), [(64, 33)]),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), [(64, 33)]),
    "prod": (lambda x: torch.prod(x, -1), [(64, 5)]),
    "layer_norm": (lambda x: F.layer_norm(x, (33,)), [(64, 33)]),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), [(8, 6, 5, 5)]),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 1), [(2, 3, 9, 9)]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 1), [(2, 3, 9, 9)]),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 4), [(2, 3, 9, 9)]),
    "grid_sample": (lambda x: F.grid_sample(x, GRID.to(x.dtype), align_corners=False), [(2, 3, 9, 9)]),
    "fold": (lambda x: F.fold(x, (8, 8), (3, 3)), [(2, 18, 36)]),
    "unfold": (lambda x: x.unfold(1, 5, 1), [(4, 30)]),
    "index_put": (lambda x, y: x.index_put((SCATTER,), y, True), [(4, 33), (64, 33)]),
    "gather rows": (lambda x: x[SCATTER], [(4, 33)]),
    "embedding": (lambda w: F.embedding(SCATTER, w), [(4, 33)]),
    "cdist": (torch.cdist, [(9, 5), (7, 5)]),
    "rrelu": (lambda x: F.rrelu(x, training=False), [(64, 33)]),
}  # fmt: skip
GRID = torch.randint(-60, 60, (2, 4, 4, 2)) / 64
# backward passes made of several operations on half tensors (a product of two saved results, say), on CUDA too
COMPOSITE_BACKWARD = {"div", "var", "logsumexp", "prod", "mul", "tanh", "sigmoid", "softmax", "softmax of columns",
                      "log_softmax", "layer_norm", "cdist", "addcmul"}  # fmt: skip


@both
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_everything_else_rounds_once_too(name: str, fmt: NumberFormat) -> None:
    """Against the fp32 operation on the same half values, rounded: torch's half kernels differ where they add up in
    half or round a constant. Vectorised fp32 functions may differ in the last fp32 bit, hence a stray tie."""
    function, shapes = ELEMENTWISE[name]
    given = [normal(*shape).to(fmt.dtype).requires_grad_() for shape in shapes]
    wide = [x.detach().float().requires_grad_() for x in given]
    expected = function(*wide)
    seed = normal(*expected.shape).to(fmt.dtype)
    with RoundedOps():
        out = function(*given)
        gradients = torch.autograd.grad(out, given, seed)
    pairs = [(out, expected)]
    if name not in COMPOSITE_BACKWARD:
        pairs += zip(gradients, torch.autograd.grad(expected, wide, seed.float()), strict=True)
    for got, want in pairs:
        assert got.dtype == fmt.dtype
        differs = got.detach() != want.detach().to(fmt.dtype)
        assert differs.float().mean() <= 0.002, f"{int(differs.sum())} of {differs.numel()} differ"
        assert torch.allclose(got.float(), want, rtol=fmt.epsilon, atol=fmt.smallest_subnormal)


@both
def test_mean_does_not_overflow_where_its_sum_would(fmt: NumberFormat) -> None:
    x = torch.full((4, 100), 2000.0).to(fmt.dtype)
    with RoundedOps():
        assert torch.equal(x.mean(1), x[:, 0])
        assert torch.equal(F.adaptive_avg_pool2d(x.view(1, 4, 10, 10), 1).flatten(), x[:, 0])


@both
def test_results_written_in_place_and_to_out(fmt: NumberFormat) -> None:
    a, b, c = integers(5, 7), integers(7, 3), integers(5, 3)
    half = [x.to(fmt.dtype) for x in (a, b, c)]
    expected = round_by_arithmetic(c + a @ b, fmt)
    with RoundedOps():
        result = half[2].addmm_(half[0], half[1])
        out = torch.empty(5, 3, dtype=fmt.dtype)
        returned = torch.mm(half[0], half[1], out=out)
        resized = torch.empty(0, dtype=fmt.dtype)
        torch.mm(half[0], half[1], out=resized)
    assert result is half[2]
    assert torch.equal(result.double(), expected)
    assert returned is out
    assert torch.equal(out.double(), round_by_arithmetic(a @ b, fmt))
    assert torch.equal(resized, out)


@both
def test_mixtures_are_widened_in_the_open(fmt: NumberFormat) -> None:
    """The suite's strict promotion, below this mode, would refuse what torch does here silently."""
    half, full = normal(6, 5).to(fmt.dtype), normal(6, 5)
    with RoundedOps():
        assert torch.equal(full + half, full + half.float())
        assert torch.equal(torch.cat([full, half]), torch.cat([full, half.float()]))
        assert torch.equal(torch.where(full > 0, half, full), torch.where(full > 0, half.float(), full))
        written = full.clone().add_(half)
        narrow = half.clone().mul_(full)
        double = half * full.double()
    assert torch.equal(written, full + half.float())
    assert narrow.dtype == fmt.dtype
    assert torch.equal(narrow, (half.float() * full).to(fmt.dtype))
    assert torch.equal(double, half.double() * full.double())


@both
def test_batch_norm_keeps_its_statistics_in_fp32(fmt: NumberFormat) -> None:
    x, w, b = (normal(8, 6, 5, 5) * 3 + 1).to(fmt.dtype).requires_grad_(), normal(6), normal(6)
    mean, var = torch.zeros(6), torch.ones(6)
    want_mean, want_var = mean.clone(), var.clone()
    wide = x.detach().float().requires_grad_()
    want = F.batch_norm(wide, want_mean, want_var, w, b, training=True)
    with RoundedOps():
        got = F.batch_norm(x, mean, var, w, b, training=True)
        (grad,) = torch.autograd.grad(got, x, torch.ones_like(got) * x.detach())
    (want_grad,) = torch.autograd.grad(want, wide, wide.detach())
    assert torch.equal(got, want.to(fmt.dtype))
    assert torch.equal(mean, want_mean)
    assert torch.equal(var, want_var)
    assert torch.equal(grad, want_grad.to(fmt.dtype))
    half_mean, half_var = torch.zeros(6, dtype=fmt.dtype), torch.ones(6, dtype=fmt.dtype)
    with RoundedOps():  # a model whose buffers are half: they are written all the same
        F.batch_norm(x, half_mean, half_var, w.to(fmt.dtype), b.to(fmt.dtype), training=True)
    assert torch.equal(half_mean, want_mean.to(fmt.dtype))
    assert torch.equal(half_var, want_var.to(fmt.dtype))


def test_what_has_no_half_tensor_is_left_alone() -> None:
    x, z = normal(6, 5), torch.randn(6, 5, dtype=torch.complex64)
    counts = torch.arange(12).view(3, 4)
    expected = [x @ x.t(), z @ z.t(), counts @ counts.t(), x.double() @ x.double().t(), x.clone().mul_(2)]
    with RoundedOps() as mode:
        assert rounding() is mode
        got = [x @ x.t(), z @ z.t(), counts @ counts.t(), x.double() @ x.double().t(), x.clone().mul_(2)]
        with pytest.raises(RuntimeError, match=r"mixes|dtype"):
            torch.mm(x.half(), x.bfloat16().t())  # refused as before: no rule makes sense of it
    assert rounding() is None
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert FP32.dtype == x.dtype


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
