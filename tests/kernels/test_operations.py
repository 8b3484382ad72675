"""Every operation of every kernel family, but attention, against float64, forward and backward, in one table.

The oracle computes in float64, without any rounding, from the operands that the family is given: activations on the
format's grid, masters rounded to it. The bound on an output is then

    n * (eps / 2) * R  +  2^-20 * A  +  n * smallest subnormal

n: how many roundings to the format lie between operands and result (1 for a product, 2 for RMSNorm); eps / 2: half an
ulp of 1; R: the magnitude that is rounded (the result's, or the sum's of what was rounded before a sum); A: the sum of
the magnitudes of all terms, whose fp32 accumulation errs by less than 2^-20 of it at these sizes.

Then the fast families' product, in every layout of the weight, and a rollout whose weights are packed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_oracle import FAMILIES
from mantissa.kernels import (
    ExactKernels,
    ExactPlan,
    Kernels,
    NativeKernels,
    SimulatedKernels,
    cpu,
    resolve,
    rollout_kernels,
)
from mantissa.kernels.compiled import is_laid
from mantissa.kernels.exact.plan import Choice
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import BF16, FP16, FP32, Fp8Policy, NumberFormat, PrecisionPolicy, is_on_grid, round_to_format
from mantissa.rollout import CopiedPolicy

ACCUMULATION = 2.0**-20


@dataclass(frozen=True)
class Operation:
    """``kinds``: a = activation (on the grid, in the family's dtype), m = master (fp32), f = fp32 table, t = tokens.

    ``forward``: (oracle's result, R, A) of the float64 operands. ``backward``: for each a and m, in order, (R, A) of
    its gradient from the seed and the operands. ``roundings``: n forward; n backward for each gradient.
    """

    kinds: str
    make: Callable[[], list[Tensor]]
    run: Callable[..., Tensor]
    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    backward: Callable[..., list[tuple[Tensor, Tensor]]]
    roundings: int
    gradient_roundings: tuple[int, ...]
    result: str = "format"


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) * scale


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def one(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, x.abs(), x.abs()


def same(*xs: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x, x) for x in xs]


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    b = 0.0 if bias is None else bias
    y = x @ w.t() + b
    return y, y.abs(), x.abs() @ w.abs().t() + (0.0 if bias is None else bias.abs())


def product_backward(g: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
    dx, dw, db = g @ w, flat(g).t() @ flat(x), flat(g).sum(0)
    ax, aw = g.abs() @ w.abs(), flat(g).abs().t() @ flat(x).abs()
    found = [(dx.abs(), ax), (dw.abs(), aw)]
    return found if bias is None else [*found, (db.abs(), flat(g).abs().sum(0))]


EPS = 1e-6


def norm_oracle(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return one(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w)


def norm_backward(g: Tensor, x: Tensor, w: Tensor) -> list[tuple[Tensor, Tensor]]:
    s = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    n, dn = (x * s).abs(), (g * w).abs()
    return same(s * (dn + n * (dn * n).mean(-1, keepdim=True)), flat(g.abs() * n).sum(0))


def swiglu_oracle(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return one(gate * torch.sigmoid(gate) * up)


def swiglu_backward(g: Tensor, gate: Tensor, up: Tensor) -> list[tuple[Tensor, Tensor]]:
    s = torch.sigmoid(gate)
    # 1 + gate * (1 - s) cancels near gate = -1.28: the fp32 error there is one of its terms' size
    dgate = (g * up * s * (1 + gate * (1 - s))).abs()
    return [(dgate, (g * up * s).abs() * (1 + gate.abs())), same((g * gate * s).abs())[0]]


def sigmoid_backward(g: Tensor, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    s = torch.sigmoid(x)  # of which 1 - s is taken once it is rounded
    return [((g * s).abs(), (g * s).abs())]


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate_oracle(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    y = x * c + rotate_half(x) * s
    return y, y.abs(), (x * c).abs() + (rotate_half(x) * s).abs()


def rotate_backward(g: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [rotate_oracle(g, cos, -sin)[1:]]


def angles() -> list[Tensor]:
    a = torch.rand(2, 7, 4, dtype=torch.float64).repeat(1, 1, 2) * 6
    return [a.cos().float().double(), a.sin().float().double()]


OPERATIONS: dict[str, Operation] = {
    "weight": Operation("m", lambda: [normal(6, 8)], lambda f, w: f.weight(w), lambda w: one(w),
                        lambda g, w: same(g.abs()), 0, (0,)),
    "linear 3-D": Operation("am", lambda: [normal(5, 3, 48), normal(32, 48, scale=0.1)], lambda f, x, w: f.linear(x, w),
                            product, product_backward, 1, (1, 1)),
    "linear 2-D, bias": Operation("amm", lambda: [normal(9, 40), normal(24, 40), normal(24)],
                                  lambda f, x, w, b: f.linear(x, w, b), product, product_backward, 1, (1, 1, 1)),
    "linear 1-D": Operation("am", lambda: [normal(48), normal(32, 48)], lambda f, x, w: f.linear(x, w), product,
                            product_backward, 1, (1, 1)),
    "logits": Operation("am", lambda: [normal(2, 6, 48), normal(64, 48)], lambda f, x, w: f.logits(x, w), product,
                        product_backward, 0, (1, 1), "logits"),
    "rms_norm": Operation("am", lambda: [normal(4, 5, 48, scale=3), 1 + normal(48, scale=0.2)],
                          lambda f, x, w: f.rms_norm(x, w, EPS), norm_oracle, norm_backward, 2, (2, 3)),
    "swiglu": Operation("aa", lambda: [normal(4, 96, scale=2), normal(4, 96)], lambda f, g, u: f.swiglu(g, u),
                        swiglu_oracle, swiglu_backward, 2, (2, 2)),
    "router": Operation("am", lambda: [normal(2, 6, 48), normal(5, 48)], lambda f, x, w: f.router(x, w), product,
                        product_backward, 0, (1, 1), "logits"),
    "sigmoid": Operation("a", lambda: [normal(7, 13, scale=3)], lambda f, x: f.sigmoid(x),
                         lambda x: one(torch.sigmoid(x)), sigmoid_backward, 1, (3,)),
    "scale": Operation("af", lambda: [normal(9, 40), torch.rand(9).double()], lambda f, x, w: f.scale(x, w),
                       lambda x, w: one(x * w.unsqueeze(-1)), lambda g, x, w: same((g * w.unsqueeze(-1)).abs()),
                       1, (1,)),
    "rotate": Operation("aff", lambda: [normal(2, 3, 7, 8), *angles()], lambda f, *x: f.rotate(*x), rotate_oracle,
                        rotate_backward, 1, (1,)),
    "add": Operation("aa", lambda: [normal(4, 96), normal(4, 96)], lambda f, x, y: f.add(x, y), lambda x, y: one(x + y),
                     lambda g, x, y: same(g.abs(), g.abs()), 1, (0, 0)),
}  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def operands(op: Operation, kernels: Kernels, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """The operands for the family (leaves that require a gradient) and, rounded, for the oracle."""
    given, exact = [], []
    for kind, x in zip(op.kinds, op.make(), strict=True):
        if kind == "a":
            x = round_to_format(x, kernels.format)
            given.append(x.to(device, kernels.dtype).requires_grad_())
        elif kind == "m":
            given.append(x.float().to(device).requires_grad_())
            x = round_to_format(x.float(), kernels.format).double()
        else:
            given.append(x.float().to(device))
        exact.append(x.clone().requires_grad_(kind in "am"))
    return given, exact


def assert_within(got: Tensor, exact: Tensor, n: int, fmt: NumberFormat, magnitude: Tensor, terms: Tensor) -> None:
    bound = n * (fmt.epsilon / 2) * magnitude + ACCUMULATION * terms + n * fmt.smallest_subnormal
    error = (got.detach().cpu().double() - exact).abs()
    worst = ((error - bound) / (bound + 1e-300)).max().item()
    assert worst <= 0, f"{1 + worst:.3g} times the bound"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_forward_and_backward_against_float64(name: str, family: str, device: str) -> None:
    op, kernels = OPERATIONS[name], FAMILIES[family]
    given, exact = operands(op, kernels, device)
    result_format = kernels.format if op.result == "format" else FP32

    out = op.run(kernels, *given)
    expected, magnitude, terms = op.forward(*exact)
    assert out.dtype == (kernels.dtype if op.result == "format" else torch.float32)
    assert out.device.type == device
    assert bool(is_on_grid(out, result_format).all())
    assert_within(out, expected.detach(), op.roundings, kernels.format, magnitude.detach(), terms.detach())

    if isinstance(kernels, SimulatedKernels):
        with torch.no_grad():  # the forward by itself: a rollout's, by the same bits
            assert torch.equal(op.run(kernels, *given), out)

    seed = round_to_format(torch.randn(expected.shape, dtype=torch.float64), kernels.format)
    leaves = [x for x in given if x.requires_grad]
    gradients = torch.autograd.grad(out, leaves, seed.to(device, out.dtype))
    expected_gradients = torch.autograd.grad(expected, [x for x in exact if x.requires_grad], seed)
    with torch.no_grad():
        bounds = op.backward(seed, *exact)
    for leaf, got, want, n, (size, terms) in zip(
        leaves, gradients, expected_gradients, op.gradient_roundings, bounds, strict=True
    ):
        assert got.dtype == leaf.dtype
        assert bool(is_on_grid(got, kernels.format).all())
        assert_within(got, want, n, kernels.format, size, terms)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_rows_and_their_gradient(family: str, device: str) -> None:
    kernels: Any = FAMILIES[family]
    table = torch.randn(11, 8)
    tokens = torch.tensor([[3, 3, 0], [10, 3, 9]])
    master = table.to(device, copy=True).requires_grad_()
    rows = kernels.embedding(tokens.to(device), master)
    assert rows.dtype == kernels.dtype
    assert torch.equal(rows.detach().cpu().float(), round_to_format(table, kernels.format)[tokens])
    seed = round_to_format(torch.randn(2, 3, 8), kernels.format)
    (gradient,) = torch.autograd.grad(rows, master, seed.to(device, rows.dtype))
    expected = torch.zeros(11, 8, dtype=torch.float64).index_add_(0, tokens.flatten(), seed.double().flatten(0, 1))
    assert gradient.dtype == torch.float32  # the sum over a token's occurrences stays fp32, as its terms are rounded
    assert not gradient[[1, 2, 4, 5, 6, 7, 8]].any()
    torch.testing.assert_close(gradient.cpu().double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("logits_format", [FP32, FP16, BF16], ids=str)
def test_logits_are_rounded_only_where_asked_and_so_is_their_gradient(family: str, logits_format: NumberFormat) -> None:
    kernels = type(FAMILIES[family])(FAMILIES[family].format, logits_format)
    x = round_to_format(torch.randn(4, 48), kernels.format).to(kernels.dtype).requires_grad_()
    master = torch.randn(64, 48, requires_grad=True)
    logits = kernels.logits(x, master)
    assert logits.dtype == torch.float32
    exact = x.detach().double() @ round_to_format(master.detach(), kernels.format).double().t()
    terms = x.detach().double().abs() @ master.detach().double().abs().t()
    assert_within(logits, exact, 1 if logits_format is not FP32 else 0, logits_format, exact.abs(), terms)
    assert bool(is_on_grid(logits, logits_format).all())
    assert bool(is_on_grid(logits, FP16).all()) == (logits_format is not FP32)  # these bf16 values are fp16 values too

    seed = torch.randn(4, 64)  # off every grid: the gradient passes the logits' format, then the operands'
    (gradient,) = torch.autograd.grad(logits, x, seed)
    rounded = round_to_format(round_to_format(seed, logits_format), kernels.format).double()
    weight = round_to_format(master.detach(), kernels.format).double()
    expected = rounded @ weight
    assert_within(gradient, expected, 1, kernels.format, expected.abs(), rounded.abs() @ weight.abs())


def test_fp32_is_not_simulated() -> None:
    with pytest.raises(ValueError, match="fp32 needs no simulation: use NativeKernels"):
        SimulatedKernels(FP32)


def test_weights_on_the_grid_are_not_copied() -> None:
    kernels = SimulatedKernels(FP16, weights_on_grid=True)
    weight = torch.randn(4, 8).half().float()
    assert kernels.weight(weight) is weight
    assert NativeKernels(FP32).weight(weight) is weight
    half = weight.half()
    assert NativeKernels(FP16).weight(half) is half
    assert torch.equal(kernels.embedding(torch.tensor([[1]]), weight)[0, 0], weight[1])
    x = round_to_format(torch.randn(3, 8), FP16)
    assert torch.equal(kernels.linear(x, weight), SimulatedKernels(FP16).linear(x, weight))


def test_families_are_made_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"  # importing it would raise
        "from mantissa.kernels.exact.gpu import ExactGpuKernels\n"
        "from mantissa.precision import BF16, Fp8Policy\n"
        "family = ExactGpuKernels(BF16, fp8=Fp8Policy())\n"
        "print(family.format, family.kv_format, family.logits_format)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["bf16", "bf16", "fp32"]


def test_a_layer_that_fp8_leaves_out_is_the_base_s() -> None:
    """Excluded layers, the head and products without a name: the same bits as without fp8, and copies in the base."""
    plain, fp8 = NativeKernels(FP32), NativeKernels(FP32, fp8=Fp8Policy(exclude=("down_proj",)))
    x, weight, bias = torch.randn(5, 8), torch.randn(3, 8), torch.randn(3)
    for layer in ("", "lm_head", "model.layers.0.mlp.down_proj"):
        assert torch.equal(fp8.linear(x, weight, bias, layer), plain.linear(x, weight, bias))
        assert torch.equal(fp8.copied(weight, layer), weight)
    assert torch.equal(fp8.logits(x, weight), plain.logits(x, weight))


BIG = ModelConfig("qwen3", 600, 256, 256, 1, 4, 2, 64, qk_norm=True, tie_word_embeddings=True)


@pytest.mark.parametrize("rows", [0, 1, 17, 300])
@pytest.mark.parametrize("layout", ["plain", "transposed", "packed"])
@pytest.mark.parametrize("biased", [False, True])
def test_product_is_float64s_to_rounding(rows: int, layout: str, biased: bool) -> None:
    x, weight, bias = torch.randn(2, rows, 200), torch.randn(400, 200), torch.randn(400) if biased else None
    given = {"plain": weight, "transposed": weight.t().contiguous().t(), "packed": cpu.packed(weight)}[layout]
    oracle = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    library = cpu.Products()
    torch.testing.assert_close(library.forward(x, given, bias).double(), oracle, rtol=1e-5, atol=1e-4)
    if rows:  # a sum's gradient lies in memory once, however large it is
        spread = torch.ones(1, 1, 1).expand(2, rows, 400)
        torch.testing.assert_close(library.of_input(spread, weight), spread @ weight, rtol=1e-5, atol=1e-4)
        flat, inputs = spread.reshape(-1, 400), x.flatten(0, 1)
        torch.testing.assert_close(library.of_weight(flat, inputs), flat.t() @ inputs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_packed_copies_hold_the_same_values_and_give_the_same_logits(precision: str) -> None:
    """And a second ``take`` replaces the first; a master is never kept itself."""
    kernels = rollout_kernels(resolve(PrecisionPolicy.parse(precision), "cpu"))
    plain, laid = (CopiedPolicy(BIG, kernels, "cpu", "sync", pack=pack) for pack in (False, True))
    tokens = torch.randint(0, 600, (2, 40))
    for _ in range(2):
        masters = {name: p.detach() for name, p in Decoder(BIG).initialize().named_parameters()}
        for policy in (plain, laid):
            policy.take(masters)
        assert all(torch.equal(kept, laid.weights[name]) for name, kept in plain.weights.items())
        assert is_laid(laid.decoder.head_weight) == torch.backends.mkldnn.is_available()
        with torch.no_grad():
            expected, found = (p.decoder.logits(p.decoder(tokens, kernels), kernels) for p in (plain, laid))
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 if precision == "fp32" else 2e-2)
        for master in masters.values():  # a copy is never the master itself
            master.fill_(float("nan"))
        assert all(kept.isfinite().all() for kept in laid.weights.values())
    with pytest.raises(Exception, match="missing"):
        laid.take({})
    assert all(kept.isnan().all() for kept in laid.weights.values())


def test_only_who_multiplies_by_this_product_has_packed_weights() -> None:
    exact, weight = ExactKernels(FP32, ExactPlan({}, Choice("fp64", 1))), torch.ones(256, 256)
    families: list[Kernels] = [exact, NativeKernels(FP16), NativeKernels(FP32)]
    expected = [False, False, torch.backends.mkldnn.is_available()]
    assert [is_laid(kernels.laid(kernels.copied(weight))) for kernels in families] == expected
