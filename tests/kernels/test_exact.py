"""Exact kernels, one by one: against float64, against the fast family, and a row against itself elsewhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention_oracle import attended
from exact_policies import FAMILIES, exactly, make_model
from mantissa.base.errors import MantissaError
from mantissa.kernels import (
    ExactBf16Kernels,
    ExactKernels,
    ExactPlan,
    ModelShapes,
    NativeKernels,
    SimulatedKernels,
    cpu,
    learner_kernels,
    plan_exact,
    probe,
    reference_kernels,
    resolve,
    rollout_kernels,
)
from mantissa.kernels import exact_probe as probe_module
from mantissa.kernels.cpu import _ONEDNN, Products, packed
from mantissa.kernels.exact.kernels import ExactAttention, cached, causal, product
from mantissa.kernels.exact.plan import AttentionChoice, Choice, pieces
from mantissa.kernels.exact_probe import threads
from mantissa.precision import BF16, FP16, FP32, NumberFormat, PrecisionPolicy, is_on_grid, round_to_format

PRODUCTS = [
    Choice("tiles", (16, 32, 48, 64, 96, 128)),
    Choice("one tile", (64,)),
    Choice("fp64", (64,)),
    Choice("tiles", (16, 32, 64), onednn=True),
]
ATTENTION = [
    AttentionChoice("tiles", (1, 2, 4, 8), 4, (16, 32), 16),
    AttentionChoice("tiles", (1, 2, 4, 8), 16, (16,), 128),
    AttentionChoice("one tile", (16,), 32, (16,), 128),
    AttentionChoice("fp64", (16,), 32, (16,), 128),
]
FORMATS = [FP32, BF16, FP16]


def plan_for(*sizes: tuple[int, int], attention: AttentionChoice = ATTENTION[0]) -> ExactPlan:
    return ExactPlan(dict.fromkeys(((8, 8), *sizes), PRODUCTS[0]), attention)


def drawn(*shape: int, seed: int = 0, fmt: NumberFormat = FP32) -> Tensor:
    return round_to_format(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), fmt)


def held(choice: Choice, x: Tensor, weight: Tensor) -> Choice:
    """The choice with those of its sizes that this machine's library adds alike, as a plan has them."""
    rows = [product(x[: choice.sizes[0]], weight, dataclasses.replace(choice, sizes=(n,))) for n in choice.sizes]
    alike = tuple(n for n, row in zip(choice.sizes, rows, strict=True) if torch.equal(row, rows[0]))
    return dataclasses.replace(choice, sizes=alike)


@pytest.mark.parametrize("choice", PRODUCTS, ids=str)
@pytest.mark.parametrize("rows", [1, 16, 65, 200])
def test_products_are_right_and_rows_are_their_own(choice: Choice, rows: int) -> None:
    x, weight = drawn(200, 48), drawn(24, 48, seed=1)
    choice = held(choice, x, weight)
    got = product(x[:rows], weight, choice)
    expected = x[:rows].double() @ weight.double().t()
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-5)
    assert torch.equal(got, product(x, weight, choice)[:rows])
    assert torch.equal(product(x[:rows].view(1, rows, 48), weight, choice)[0], got)


def test_a_rollouts_packed_weight_gives_the_learners_bits() -> None:
    """oneDNN's own layout holds the same values; a way that has no use for it takes them back."""
    shapes = ModelShapes((("gate_proj", 288, 256), ("lm_head", 288, 40)), 2, 1, 16, 40, 32, 256)
    table = dataclasses.replace(cpu.products(), compiled=())
    plan = plan_exact(shapes, exactly("bf16", backend="simulated").learner, "cpu", table=table)
    assert (plan.product((256, 288)).onednn, plan.product((40, 288)).onednn) == (_ONEDNN, False)
    x, weight = drawn(300, 288), drawn(256, 288, seed=1)
    for choice in (plan.product((256, 288)), held(PRODUCTS[0], x, weight), PRODUCTS[1], PRODUCTS[2]):
        learner = product(x, weight, choice)
        assert ExactKernels(BF16, plan, weights_on_grid=True).laid(weight).is_mkldnn == _ONEDNN
        torch.testing.assert_close(learner.double(), x.double() @ weight.double().t(), rtol=0, atol=1e-4)
        for rows in (1, 16, 40, 300):
            assert torch.equal(product(x[:rows], packed(weight), choice), learner[:rows])


@pytest.mark.parametrize("sizes", [(16, 32, 48, 64, 96), (64,), (1, 2, 4, 8, 16), (16,)])
def test_pieces_cover_every_row_once_and_only_the_last_is_filled_up(sizes: tuple[int, ...]) -> None:
    for count in range(300):
        parts = pieces(count, sizes)
        assert [row for start, stop, _ in parts for row in range(start, stop)] == list(range(count))
        assert all(size in sizes and stop - start <= size for start, stop, size in parts)
        assert all(stop - start == size for start, stop, size in parts[:-1])
        if sizes[0] == 1:
            assert all(stop - start == size for start, stop, size in parts)


def test_a_plan_is_for_the_threads_that_it_was_made_with() -> None:
    plan = dataclasses.replace(plan_for((24, 48)), threads=(1, 2))
    with threads(3), pytest.raises(MantissaError, match="proven for 1 and 2 threads, and torch now uses 3"):
        ExactKernels(FP32, plan).linear(drawn(7, 48), drawn(24, 48))


def test_fp64_products_are_the_rounded_sum() -> None:
    x, weight = drawn(5, 48), drawn(24, 48, seed=1)
    sums = [[math.fsum(a * b for a, b in zip(r, w, strict=True)) for w in weight.tolist()] for r in x.tolist()]
    assert torch.equal(product(x, weight, PRODUCTS[2]), torch.tensor(sums))


def test_a_bias_is_added_after_the_sum_and_rounded_with_it() -> None:
    x, weight, bias = drawn(7, 48), drawn(24, 48, seed=1), drawn(24, seed=2)
    for fmt in FORMATS:
        kernels = ExactKernels(fmt, plan_for((24, 48)))
        a, w, b = (round_to_format(t, fmt) for t in (x, weight, bias))
        assert torch.equal(kernels.linear(a, weight, bias), round_to_format(product(a, w, PRODUCTS[0]) + b, fmt))


def test_a_product_the_plan_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no product of shape \(24, 40\): it was made for another model"):
        ExactKernels(FP32, plan_for((24, 48))).linear(drawn(7, 40), drawn(24, 40))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_swiglu_is_right_wherever_a_value_stands(fmt: NumberFormat) -> None:
    gate = torch.cat((drawn(5000, seed=3, fmt=fmt) * 6, torch.tensor([0.0, -0.0, 88.0, -88.0, -104.0, -1e4, 1e4])))
    gate = round_to_format(gate, fmt)
    up = drawn(len(gate), seed=4, fmt=fmt)
    kernels = ExactKernels(fmt, plan_for())
    got = kernels.swiglu(gate, up)
    assert bool(is_on_grid(got, fmt).all())
    silu = F.silu(gate.double()).float() if fmt is FP32 else round_to_format(F.silu(gate.double()).float(), fmt)
    torch.testing.assert_close(got, round_to_format(silu * up, fmt), rtol=2 * max(fmt.epsilon, 1e-7), atol=1e-30)
    for start, count in ((0, 1), (1, 3), (7, 17), (4990, 10)):
        part = slice(start, start + count)
        assert torch.equal(kernels.swiglu(gate[part], up[part]), got[part])


def test_swiglu_in_parts_is_swiglu() -> None:
    gate, up = drawn(3, 200_003), drawn(3, 200_003, seed=1)  # more than one part, and none a whole number of rows
    got = ExactKernels(BF16, plan_for()).swiglu(gate, up)
    silu = round_to_format(gate / (1 + torch.exp(-gate)), BF16)
    assert torch.equal(got, round_to_format(silu * up, BF16))


@pytest.mark.parametrize("choice", ATTENTION, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "length"), [(3, 3, 5), (4, 2, 39), (5, 1, 300)])
def test_attention_and_its_gradients_against_float64(
    choice: AttentionChoice, heads: int, kv_heads: int, length: int
) -> None:
    tensors = [drawn(2, n, length, 16, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads))]
    mine = [t.clone().requires_grad_() for t in tensors]
    oracle = [t.double().requires_grad_() for t in tensors]
    got, expected = ExactAttention.apply(*mine, FP32, Products(), FP32, choice), attended(*oracle)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=5e-6)
    seed = drawn(*got.shape, seed=9)
    got.backward(seed)
    expected.backward(seed.double())
    for m, o in zip(mine, oracle, strict=True):
        assert m.grad is not None
        assert o.grad is not None
        torch.testing.assert_close(m.grad.double(), o.grad, rtol=0, atol=2e-5)


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_attention_rounds_where_the_fast_family_does(fmt: NumberFormat) -> None:
    """Up to a probability that another order of the sum tips over: nearly all values are the fast family's own."""
    q, k, v = drawn(3, 4, 33, 16, fmt=fmt), drawn(3, 2, 33, 16, seed=1, fmt=fmt), drawn(3, 2, 33, 16, seed=2, fmt=fmt)
    got = ExactKernels(fmt, plan_for()).causal_attention(q, k, v)
    fast = SimulatedKernels(fmt).causal_attention(q, k, v)
    assert bool(is_on_grid(got, fmt).all())
    assert float((got == fast).float().mean()) > 0.97


def holds(choice: AttentionChoice) -> bool:
    """Whether this machine's library adds these calls alike: what a probe finds, and no plan would choose otherwise."""
    shapes = ModelShapes((), 4, 2, 16, 8)
    tried = probe_module._Attention(shapes, torch.Generator().manual_seed(0), bf16=False)
    tried._refer_to(choice.way)
    return tried.holds(choice)


@pytest.mark.parametrize("choice", ATTENTION, ids=str)
def test_a_query_is_the_same_in_training_in_a_chunk_and_in_decode(choice: AttentionChoice) -> None:
    if not holds(choice):
        pytest.skip("on this machine a plan would not choose it")
    q, k, v = drawn(2, 4, 150, 16), drawn(2, 2, 150, 16, seed=1), drawn(2, 2, 150, 16, seed=2)
    whole = causal(q, k, v, BF16, choice)
    for first, last in ((0, 7), (7, 8), (8, 50), (50, 150)):
        chunk = causal(q[:, :, first:last], k[:, :, :last], v[:, :, :last], BF16, choice)
        assert torch.equal(chunk, whole[:, :, first:last])
    for position, keys in ((0, 16), (15, 16), (16, 32), (100, 112), (149, 160), (30, 320)):
        cache = drawn(2, 2, 2, keys, 16, seed=3) * 50  # what lies behind the length is rubbish
        kept = min(keys, 150)
        cache[0, :, :, :kept], cache[1, :, :, :kept] = k[:, :, :kept], v[:, :, :kept]
        cache[:, :, :, position + 1 :] *= -3
        got = cached(q[:, :, position], cache[0], cache[1], torch.full((2,), position + 1), BF16, choice)
        assert torch.equal(got, whole[:, :, position])
        alone = cached(q[1:, :, position], cache[0, 1:], cache[1, 1:], torch.tensor([position + 1]), BF16, choice)
        assert torch.equal(alone, whole[1:, :, position])


def test_keys_and_values_are_rounded_as_the_cache_would_and_gradients_pass() -> None:
    q, k, v = drawn(2, 4, 9, 16, fmt=FP16), drawn(2, 2, 9, 16, seed=1, fmt=FP16), drawn(2, 2, 9, 16, seed=2, fmt=FP16)
    coarse = ExactKernels(FP16, plan_for(), kv_format=BF16)
    plain = ExactKernels(FP16, plan_for())
    assert plain.kv_format is FP16
    rounded = round_to_format(k, BF16), round_to_format(v, BF16)
    assert torch.equal(coarse.causal_attention(q, k, v), plain.causal_attention(q, *rounded))
    assert not torch.equal(coarse.causal_attention(q, k, v), plain.causal_attention(q, k, v))
    gradients = []
    for kernels, given in ((coarse, (k, v)), (plain, rounded)):
        leaves = [t.clone().requires_grad_() for t in given]
        kernels.causal_attention(q, *leaves).backward(drawn(2, 4, 9, 16, seed=3))
        gradients.append([t.grad for t in leaves])
    for through, at in zip(*gradients, strict=True):
        assert torch.equal(through, at)  # the rounding's own gradient is one: nothing more is rounded


def test_in_fp32_a_decoder_and_its_gradients_are_the_native_familys() -> None:
    """The backward passes of the simulated family, where rounding is the identity and may not alias."""
    model = make_model(FAMILIES["qwen2"])
    sizes = {tuple(w.shape) for w in model.parameters() if w.dim() == 2}
    tokens = torch.randint(0, 96, (3, 21), generator=torch.Generator().manual_seed(1))
    gradients: list[dict[str, Tensor]] = []
    for kernels in (ExactKernels(FP32, plan_for(*sizes)), NativeKernels(FP32)):  # type: ignore[arg-type]
        model.zero_grad(set_to_none=True)
        logits = model.logits(model(tokens, kernels), kernels)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    mine, native = gradients
    assert mine.keys() == native.keys()
    for name, grad in native.items():
        assert (mine[name] - grad).norm() <= 2e-5 * grad.norm(), name


@pytest.mark.usefixtures("bf16_is_simulated")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_kernels_are_chosen_by_role_and_prove_their_format(precision: str) -> None:
    resolved, plan = exactly(precision, kv_cache="bf16", logits="bf16"), plan_for()
    resolved = dataclasses.replace(resolved, reference=resolved.learner)
    learner, rollout = learner_kernels(resolved, plan), rollout_kernels(resolved, plan)
    reference = reference_kernels(resolved, plan)
    for kernels in (learner, rollout, reference):
        assert isinstance(kernels, ExactKernels)
        assert (kernels.format.name, kernels.logits_format, kernels.kv_format) == (precision, BF16, BF16)
        assert kernels.plan is plan
        assert "keeps 1+u" in probe(kernels, "cpu")
    assert (learner.weights_on_grid, rollout.weights_on_grid, reference.weights_on_grid) == (False, True, True)  # type: ignore[union-attr]
    for choose in (learner_kernels, rollout_kernels, reference_kernels):
        with pytest.raises(ValueError, match="kernels are exact: pass the plan that plan_exact made"):
            choose(resolved)
    fast = resolve(PrecisionPolicy(train="bf16", rollout="bf16"), "cpu")
    assert type(learner_kernels(fast)) is SimulatedKernels


@pytest.mark.parametrize("kernels_of", [lambda plan: ExactKernels(FP32, plan), ExactBf16Kernels], ids=["fp32", "bf16"])
@pytest.mark.parametrize("longest", [0, 16, 32])
def test_more_keys_than_a_softmax_was_tried_with_are_refused(
    kernels_of: Callable[[ExactPlan], ExactKernels | ExactBf16Kernels], longest: int
) -> None:
    """In training and in decoding; as many as were tried are taken, and a plan without a length takes any number."""
    kernels = kernels_of(dataclasses.replace(plan_for(), length=longest))
    dtype = torch.bfloat16 if isinstance(kernels, ExactBf16Kernels) else torch.float32

    def attend(keys: int) -> tuple[Callable[[], Tensor], ...]:
        q, k, v = (drawn(1, heads, keys, 16, seed=heads).to(dtype) for heads in (2, 1, 1))
        lengths = torch.tensor([3])  # it is the cache's size that a softmax runs over
        return lambda: kernels.causal_attention(q, k, v), lambda: kernels.cached_attention(q[:, :, 0], k, v, lengths)

    for keys in (15, 16, 17, 31, 32, 33):
        for call in attend(keys):
            if longest and keys > longest:
                said = f"proven for sequences of {longest} positions at most, and here are {keys}"
                with pytest.raises(MantissaError, match=said):
                    call()
            else:
                assert bool(call().isfinite().all())


def test_a_plan_says_how_many_keys_it_was_tried_with() -> None:
    """Up to a whole block, to which attention fills a number of keys up."""
    for length, tried in ((100, 128), (129, 256)):
        shapes = ModelShapes((("q_proj", 48, 32),), 2, 1, 16, 40, length, 64)
        assert plan_exact(shapes, exactly("fp32").learner, "cpu").length == tried


@pytest.mark.parametrize("shape", [(50, 16), (50, 3, 16)])
def test_a_norms_weight_has_its_gradient_over_all_rows_and_heads(shape: tuple[int, ...]) -> None:
    """Against float64: sum over rows (and heads, of a norm by head) of the gradient times x / rms(x)."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    weight = (torch.rand(16, generator=generator) + 0.5).requires_grad_()
    ExactBf16Kernels(plan_for()).rms_norm(x, weight, 1e-6).backward(grad)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = (normed * grad.double()).reshape(-1, 16)
    assert weight.grad is not None
    # every term is rounded to bf16, and so is each partial sum of so many
    torch.testing.assert_close(weight.grad.double(), expected.sum(0), rtol=2.0**-7, atol=2.0**-7 * len(expected) ** 0.5)
