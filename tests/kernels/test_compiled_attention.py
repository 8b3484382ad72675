"""Attention compiled for this processor: each row is its own, right, in whatever layout its operands are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.kernels import ModelShapes, compiled, cpu, learner_kernels, plan_exact, resolve, rollout_kernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import BF16, E4M3, FP16, FP32, NumberFormat, PrecisionPolicy, round_to_format
from mantissa.rl.assemble import exact_plan
from mantissa.rollout import NativeEngine, Request, SamplingParams

pytestmark = pytest.mark.skipif(not compiled.kinds(), reason=f"nothing is compiled here: {compiled.why_not()}")
FORMATS = pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=str)
SHAPES = pytest.mark.parametrize(
    ("sequences", "heads", "kv_heads", "length", "size"),
    [(2, 9, 3, 70, 64), (1, 4, 4, 1, 16), (3, 8, 1, 33, 48), (1, 2, 1, 700, 128)],
)


def drawn(fmt: NumberFormat, sequences: int, heads: int, kv_heads: int, length: int, size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (sequences, heads, length, size), *[(sequences, kv_heads, length, size)] * 2
    return [round_to_format(torch.randn(shape, generator=generator), fmt) for shape in shapes]


@FORMATS
@SHAPES
def test_it_is_right(fmt: NumberFormat, sequences: int, heads: int, kv_heads: int, length: int, size: int) -> None:
    q, k, v = drawn(fmt, sequences, heads, kv_heads, length, size)
    got = compiled.attention(q, k, v, fmt)
    wide = (x.double() for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    # Probabilities of one sum, each rounded once, and the result once: a half step of the largest value each.
    bound = 2.0**-20 if fmt is FP32 else 2.0 ** -(fmt.mantissa_bits + 1) * 2 * float(v.abs().max())
    assert (got.double() - expected).abs().max() <= bound
    assert torch.equal(got, round_to_format(got, fmt))


@FORMATS
@SHAPES
def test_a_row_depends_on_its_own_past_alone(
    fmt: NumberFormat, sequences: int, heads: int, kv_heads: int, length: int, size: int
) -> None:
    """Neither on other rows, on how many there are, on the room behind a cache, nor on the threads."""
    q, k, v = drawn(fmt, sequences, heads, kv_heads, length, size)
    whole = compiled.attention(q, k, v, fmt)
    for at in {0, length // 2, length - 1}:
        room = torch.full((2, sequences, kv_heads, length + 7, size), torch.nan)  # never read
        room[0, :, :, : at + 1], room[1, :, :, : at + 1] = k[:, :, : at + 1], v[:, :, : at + 1]
        seen = torch.full((sequences,), at + 1)
        assert torch.equal(compiled.attention(q[:, :, at : at + 1], *room, fmt, seen)[:, :, 0], whole[:, :, at])
        start = at // 2
        assert torch.equal(compiled.attention(q[:, :, start : at + 1], *room, fmt, seen), whole[:, :, start : at + 1])
        one = compiled.attention(q[:1, :, : at + 1], k[:1, :, : at + 1], v[:1, :, : at + 1], fmt)
        assert torch.equal(one, whole[:1, :, : at + 1])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(compiled.attention(q, k, v, fmt), whole)
    finally:
        torch.set_num_threads(before)


def test_sequences_of_several_lengths_and_any_strides_are_the_same() -> None:
    q, k, v = drawn(BF16, 3, 6, 2, 40, 64)
    whole = compiled.attention(q, k, v, BF16)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(compiled.attention(*turned, BF16), whole)
    assert torch.equal(compiled.attention(*(x.bfloat16() for x in (q, k, v)), BF16).float(), whole)
    seen = torch.tensor([5, 40, 16])
    last = torch.stack([q[at, :, n - 1] for at, n in enumerate(seen.tolist())])
    got = compiled.attention(last.unsqueeze(2), k, v, BF16, seen)[:, :, 0]
    assert torch.equal(got, torch.stack([whole[at, :, n - 1] for at, n in enumerate(seen.tolist())]))


@FORMATS
def test_what_is_not_finite_stays_in_the_rows_that_see_it(fmt: NumberFormat) -> None:
    q, k, v = drawn(fmt, 1, 2, 1, 40, 16)
    right = compiled.attention(q, k, v, fmt)
    k[0, 0, 20, 3], v[0, 0, 33, 5] = torch.nan, torch.inf
    got = compiled.attention(q, k, v, fmt)
    assert torch.equal(got[:, :, :20], right[:, :, :20])
    assert got[:, :, 20:].isnan().all()
    k[0, 0, 20, 3] = 0.0
    got = compiled.attention(q, k, v, fmt)
    assert got[:, :, :33].isfinite().all()
    assert got[:, :, 33:, 5].isinf().all()


def test_scores_far_apart_give_zeros_and_ones() -> None:
    q, k, v = drawn(FP32, 1, 1, 1, 3, 16)
    q, k = torch.ones_like(q), torch.zeros_like(k)
    k[0, 0, 1] = 1e4
    got = compiled.attention(q, k, v, FP32)[0, 0]
    torch.testing.assert_close(got, torch.stack((v[0, 0, 0], v[0, 0, 1], v[0, 0, 1])), rtol=0, atol=0)


def test_where_it_is_there() -> None:
    assert compiled.computes(64, FP16)
    assert not compiled.computes(64, E4M3)
    assert not compiled.computes(6, FP32)


LIBRARY = ("tiles", "fp64")  # its own way, or none: MKL held to AVX2 gives an Emerald Rapids no tiles of attention


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_an_exact_plan_takes_compiled_code_where_it_was_measured_to_be_faster(precision: str) -> None:
    role = resolve(PrecisionPolicy(train=precision, rollout=precision, kernels="exact"), "cpu").learner  # type: ignore[arg-type]
    shapes = ModelShapes((("model.mlp.up_proj", 64, 128), ("lm_head", 64, 192), ("model.small", 64, 30)), 4, 2, 16, 192)
    table = replace(cpu.products(), compiled=compiled.parts())
    plan = plan_exact(shapes, role, "cpu", table=table)
    own = {**plan.products, **plan.bf16}
    ways = {size: choice.way for size, choice in own.items() if choice.names}
    assert ways.pop((30, 64)) in LIBRARY
    assert ways == {(128, 64): "in order", (192, 64): "in order"}
    assert plan.attention.way == "in order"
    assert plan.way == "in order"
    assert any("in order of any number of rows, compiled" in line for line in plan.lines())
    safer = plan_exact(shapes, role, "cpu", "tiles", table=table)
    assert safer.way in LIBRARY
    assert safer.attention.way in LIBRARY
    assert plan_exact(shapes, role, "cpu", table=replace(table, compiled=())).way in LIBRARY
    assert plan_exact(shapes, role, "cpu", table=table, masked=True).attention.way in LIBRARY


@pytest.mark.parametrize("precision", ["fp16", "fp8", "bf16"])
@pytest.mark.parametrize("kernels", ["fast", "exact"])
def test_an_engine_may_sample_by_the_learners_kernels(precision: str, kernels: str) -> None:
    """They round what they read, so a copy is not laid out for them; what is drawn is the rollout kernels' own."""
    policy = PrecisionPolicy(train=precision, rollout=precision, kernels=kernels)  # type: ignore[arg-type]
    resolved = replace(resolve(policy, "cpu"), products=replace(cpu.products(), compiled=compiled.parts()))
    model = Decoder(ModelConfig("llama", 256, 64, 128, 2, 4, 2, 16)).initialize(torch.Generator().manual_seed(0))
    plan = exact_plan(resolved, model, torch.device("cpu"), 64, 64)
    drawn = []
    for family in (learner_kernels(resolved, plan), rollout_kernels(resolved, plan)):
        engine = NativeEngine(model.config, family, kv_format=resolved.kv_cache.active, slots=4, max_length=32)
        engine.sync(dict(model.named_parameters()), 1)
        [row] = engine.generate([Request((1, 2, 3), seed=0, samples=3)], SamplingParams(max_tokens=8), 1)
        drawn.append([(each.tokens, each.logp_T.tolist()) for each in row])
    if kernels == "exact":
        assert drawn[0] == drawn[1]
    else:
        assert [tokens for tokens, _ in drawn[0]] == [tokens for tokens, _ in drawn[1]]
