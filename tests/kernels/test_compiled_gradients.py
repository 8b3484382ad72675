"""What is compiled of a policy that trains: the families' numbers, gradients of float64's, whatever shares a prompt."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.kernels import NativeKernels, SimulatedKernels, Traced, compiled, cpu
from mantissa.precision import BF16, FP16, FP32, NumberFormat, round_to_format
from mantissa.rl.experience import Sequences
from mantissa.rl.score import Packed

pytestmark = pytest.mark.skipif(not compiled.kinds(), reason=f"nothing is compiled here: {compiled.why_not()}")
FORMATS = pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=str)
CPU = torch.device("cpu")
# Prompts of one token and of many, alone and shared, out of order; responses of none, of one and of many.
LENGTHS = {
    "some": [(3, 2), (1, 20), (3, 0), (20, 2), (3, 17), (1, 1), (20, 40), (2, 0)],
    "long": [(300, 280), (300, 1), (5, 600)],
    "alone": [(1, 1)],
}


def packed_of(lengths: Sequence[tuple[int, int]]) -> Packed:
    """Sequences whose prompts are the same where they are as long."""
    prompts = [[100 + size] * size for size, _ in lengths]
    responses = [[1 + number] * size for number, (_, size) in enumerate(lengths)]
    return Packed.of(Sequences.build(prompts, responses, CPU))


def drawn(fmt: NumberFormat, *shape: int, seed: int) -> Tensor:
    return round_to_format(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), fmt)


def whole(packed: Packed, x_1HND: Tensor) -> Tensor:
    """Packed positions as whole sequences, B,H,T,D."""
    _, heads, count, size = x_1HND.shape
    x_NE = x_1HND.transpose(1, 2).reshape(count, heads * size)
    return F.embedding(packed.packed_BT, x_NE).unflatten(2, (heads, size)).transpose(1, 2)


def taken(packed: Packed, x_BHTD: Tensor) -> Tensor:
    """The packed positions of whole sequences, 1,H,N,D."""
    return x_BHTD.transpose(1, 2).flatten(0, 1)[packed.source_N].transpose(0, 1).unsqueeze(0)


def operands(packed: Packed, fmt: NumberFormat, heads: int, kv_heads: int, size: int) -> list[Tensor]:
    """q, k, v and the result's gradient, in the memory that projections give them."""
    shapes = [(1, len(packed.tokens_N), count, size) for count in (heads, kv_heads, kv_heads, heads)]
    return [drawn(fmt, *shape, seed=seed).transpose(1, 2) for seed, shape in enumerate(shapes)]


def assert_near(got: Sequence[Tensor], expected: Sequence[Tensor], bound: float) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one.double() - other.double()).norm() <= bound * other.double().norm()
        assert other.norm() > 0


@pytest.mark.parametrize("name", LENGTHS)
def test_spans_are_where_prompts_and_responses_lie(name: str) -> None:
    packed = packed_of(LENGTHS[name])
    order = packed.owner_B.argsort(stable=True).tolist()
    found = {}
    for start, length, first, stop in packed.spans.prompts_U4.tolist():
        for number in range(first, stop):
            begin, count = packed.spans.responses_B2[number].tolist()
            found[order[number]] = [*range(start, start + length), *range(begin, begin + count)]
    for row, (prompt, response) in enumerate(LENGTHS[name]):
        assert found[row] == packed.packed_BT[row, : prompt + max(0, response - 1)].tolist()
    assert sorted({*itertools.chain(*found.values())}) == list(range(len(packed.tokens_N)))
    both = packed.spans.longest
    assert both[0] == max(map(len, found.values()))
    assert both[1] == max(max(prompt, response - 1) for prompt, response in LENGTHS[name])


@FORMATS
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 32), (3, 3, 16), (4, 1, 64)])
def test_packed_attention_is_that_of_whole_sequences(
    fmt: NumberFormat, name: str, heads: int, kv_heads: int, size: int
) -> None:
    packed = packed_of(LENGTHS[name])
    q, k, v, grad = operands(packed, fmt, heads, kv_heads, size)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = compiled.PackedAttention.of(*leaves, fmt, packed.spans)
    with torch.no_grad():
        rows = compiled.attention(*(whole(packed, x) for x in leaves), fmt)
        assert torch.equal(out, taken(packed, rows))
        assert torch.equal(out, compiled.PackedAttention.of(*leaves, fmt, packed.spans))
    got = torch.autograd.grad(out, leaves, grad)

    wide = [x.detach().double().requires_grad_() for x in leaves]
    right = F.scaled_dot_product_attention(*(whole(packed, x) for x in wide), is_causal=True, enable_gqa=True)
    expected = torch.autograd.grad(taken(packed, right), wide, grad.double())
    if name != "alone":  # one key: a probability of 1, and no gradient of q and k
        assert_near(got, expected, 4e-6 if fmt is FP32 else 4 * fmt.epsilon)
    for each in got:
        assert torch.equal(each, round_to_format(each, fmt))


@pytest.mark.parametrize("name", LENGTHS)
def test_bf16_tensors_and_threads_make_no_difference(name: str) -> None:
    packed, before = packed_of(LENGTHS[name]), torch.get_num_threads()
    given = operands(packed, BF16, 6, 2, 32)

    def computed(dtype: torch.dtype) -> list[Tensor]:
        *leaves, grad = (x.to(dtype).detach().requires_grad_() for x in given)
        out = compiled.PackedAttention.of(*leaves, BF16, packed.spans)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    right = computed(torch.float32)
    try:
        torch.set_num_threads(2)
        again, halves = computed(torch.float32), computed(torch.bfloat16)
    finally:
        torch.set_num_threads(before)
    for one, other, half in zip(right, again, halves, strict=True):
        assert half.dtype is torch.bfloat16
        assert torch.equal(one, other)
        assert torch.equal(one, half.float())


Made = Callable[[SimulatedKernels | NativeKernels, list[Tensor]], Sequence[Tensor]]
OPERATIONS: dict[str, tuple[Made, list[tuple[int, ...]]]] = {
    "norm": (lambda kernels, x: [kernels.rms_norm(x[0], x[1], 1e-5)], [(70, 192), (192,)]),
    "norm of heads": (lambda kernels, x: [kernels.rms_norm(x[0], x[1], 1e-5)], [(2, 9, 5, 32), (32,)]),
    "sum and norm": (lambda kernels, x: kernels.add_norm(x[0], x[1], x[2], 1e-5), [(70, 192), (70, 192), (192,)]),
    "norm alone": (lambda kernels, x: kernels.add_norm(x[0], x[1], x[2], 1e-5)[1:], [(33, 64), (33, 64), (64,)]),
    "sum alone": (lambda kernels, x: kernels.add_norm(x[0], x[1], x[2], 1e-5)[:1], [(33, 64), (33, 64), (64,)]),
    "swiglu": (lambda kernels, x: [kernels.swiglu(x[0], x[1])], [(3, 41, 96), (3, 41, 96)]),
    "rotation": (
        lambda kernels, x: [kernels.rotate(x[0].transpose(1, 2), *ANGLES)], [(2, 7, 3, 64)]
    ),
}  # fmt: skip
ANGLES = [
    f(torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(9)).repeat(1, 1, 2)) for f in (torch.cos, torch.sin)
]


@pytest.mark.parametrize(("fmt", "native"), [(FP32, True), (BF16, True), (BF16, False), (FP16, False)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_and_gradients_are_those_of_torchs_operations(name: str, fmt: NumberFormat, native: bool) -> None:
    """To a rounding: of the format where it has few bits, of fp32's sums where it is fp32. And alike on two threads."""
    operation, shapes = OPERATIONS[name]
    dtype = fmt.dtype if native else torch.float32
    table, before = cpu.products(), torch.get_num_threads()
    tables = [replace(table, compiled=compiled.parts()), replace(table, compiled=())]
    ours, theirs = ((NativeKernels if native else SimulatedKernels)(fmt, table=each) for each in tables)

    def computed(kernels: SimulatedKernels | NativeKernels) -> list[Tensor]:
        given = [drawn(fmt, *shape, seed=seed) for seed, shape in enumerate(shapes)]
        leaves = [x.requires_grad_() if x.dim() == 1 else x.to(dtype).requires_grad_() for x in given]
        out = operation(kernels, leaves)
        seeds = [drawn(fmt, *x.shape, seed=20 + number).to(x.dtype) for number, x in enumerate(out)]
        with torch.no_grad():
            assert all(map(torch.equal, out, operation(kernels, leaves)))
        used = leaves[:2] if name == "sum alone" else leaves
        return [*out, *torch.autograd.grad(out, used, seeds)]

    got, expected = computed(ours), computed(theirs)
    try:
        torch.set_num_threads(2)
        again = computed(ours)
    finally:
        torch.set_num_threads(before)
    assert_near(got, expected, 1e-6 if fmt is FP32 else fmt.epsilon)
    for one, other, half in zip(got, again, expected, strict=True):
        assert torch.equal(one, other)
        assert one.dtype is half.dtype
        assert fmt is FP32 or torch.equal(one.float(), round_to_format(one.float(), fmt)) or one.dim() == 1


@FORMATS
def test_attention_of_whole_sequences_is_the_packed_one_and_the_rollout_s(fmt: NumberFormat) -> None:
    table = cpu.products()
    tables = [replace(table, compiled=compiled.parts()), replace(table, compiled=())]
    ours, theirs = (NativeKernels(fmt, table=t) if fmt is FP32 else SimulatedKernels(fmt, table=t) for t in tables)
    shapes = [(3, 37, count, 32) for count in (6, 2, 2, 6)]
    *given, grad = (drawn(fmt, *shape, seed=seed).transpose(1, 2) for seed, shape in enumerate(shapes))
    leaves = [x.requires_grad_() for x in given]
    out, expected = (kernels.causal_attention(*leaves) for kernels in (ours, theirs))
    with torch.no_grad():
        assert torch.equal(out, compiled.attention(*leaves, fmt))
        assert torch.equal(out, ours.causal_attention(*(x.contiguous() for x in leaves)))
        keys = (torch.cat((x, x), 2) for x in leaves[1:])  # a cache that goes on
        lengths = torch.full((3,), 37)
        assert torch.equal(ours.cached_attention(leaves[0][:, :, -1], *keys, lengths), out[:, :, -1])
    found = (torch.autograd.grad(x, leaves, grad) for x in (out, expected))
    assert_near([out], [expected], 1e-6 if fmt is FP32 else fmt.epsilon)
    assert_near(*found, 1e-6 if fmt is FP32 else 2 * fmt.epsilon)


def test_an_overflow_stays_one() -> None:
    x, y = (drawn(FP16, 8, 64, seed=seed).requires_grad_() for seed in range(2))
    weight = torch.ones(64, requires_grad=True)
    grad = torch.full((8, 64), 60000.0)
    total, normed = compiled.AddedNorm.of(x, y, weight, 1e-6, FP16)
    found = torch.autograd.grad((total, normed), (x, weight), (grad, grad))
    assert not found[0].isfinite().all()
    out = compiled.SwiGLU.of(x, (y * 60000).detach().requires_grad_(), FP16)
    assert not torch.autograd.grad(out, x, grad)[0].isfinite().all()


@pytest.mark.parametrize("fmt", [FP32, BF16])
def test_who_takes_notes_or_has_another_dtype_attends_to_whole_sequences(fmt: NumberFormat) -> None:
    packed = packed_of(LENGTHS["some"])
    kernels = NativeKernels(fmt, table=replace(cpu.products(), compiled=compiled.parts()))
    q, k, v, _ = (x.to(fmt.dtype) for x in operands(packed, fmt, 6, 2, 32))
    assert kernels.packed_attention(q, k, v, lambda: packed.spans) is not None
    assert Traced(kernels).packed_attention(q, k, v, lambda: packed.spans) is None
    assert NativeKernels(FP16).packed_attention(q.half(), k.half(), v.half(), lambda: packed.spans) is None
    assert not NativeKernels(FP16).compiles(q.half())
    bare = NativeKernels(fmt, table=replace(cpu.products(), compiled=()))
    assert bare.packed_attention(q, k, v, lambda: packed.spans) is None


@torch.no_grad()
def test_halves_of_fp16_are_not_read_as_those_of_bf16() -> None:
    table = replace(cpu.products(), compiled=compiled.parts())
    q, k, v = drawn(FP16, 2, 4, 32, seed=1), drawn(FP16, 2, 2, 8, 32, seed=2), drawn(FP16, 2, 2, 8, 32, seed=3)
    got = NativeKernels(FP16, table=table).cached_attention(q.half(), k.half(), v.half(), torch.full((2,), 8))
    right = SimulatedKernels(FP16, table=table).cached_attention(q, k, v, torch.full((2,), 8))
    assert_near([got], [right], 2 * FP16.epsilon)


def test_a_gradient_of_a_gradient_is_refused() -> None:
    x, weight = torch.randn(4, 64, requires_grad=True), torch.ones(64, requires_grad=True)
    (grad,) = torch.autograd.grad(compiled.Norm.of(x, weight, 1e-6, FP32).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
