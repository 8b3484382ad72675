"""What is computed row by row by compiled code: torch's own numbers, or one rounding from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mantissa.kernels import ExactKernels, NativeKernels, SimulatedKernels, compiled, cpu
from mantissa.kernels.exact.bf16 import ExactBf16Kernels
from mantissa.kernels.exact.plan import AttentionChoice, ExactPlan
from mantissa.precision import BF16, FP16, FP32, NumberFormat, round_to_format

pytestmark = pytest.mark.skipif(not compiled.kinds(), reason=f"nothing is compiled here: {compiled.why_not()}")
FORMATS = pytest.mark.parametrize(("fmt", "native"), [(FP32, True), (BF16, True), (BF16, False), (FP16, False)])
SHAPE = (5, 3, 192)
Copies = NativeKernels | SimulatedKernels


def pair(fmt: NumberFormat, native: bool) -> list[Copies]:
    """A rollout's kernels that compute rows by compiled code, and the same by torch's."""
    table = cpu.products()
    tables = replace(table, compiled=compiled.parts()), replace(table, compiled=())
    if native:
        return [NativeKernels(fmt, table=each, copies=True) for each in tables]
    return [SimulatedKernels(fmt, weights_on_grid=True, table=each) for each in tables]


def drawn(kernels: Copies, *shape: int, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return round_to_format(values, kernels.format).to(kernels.dtype)


def assert_near(got: Tensor, expected: Tensor, fmt: NumberFormat) -> None:
    """Equal but for a few roundings, and in a half equal nearly everywhere."""
    assert got.dtype is expected.dtype
    got, expected = got.double(), expected.double()
    assert ((got - expected).abs() <= expected.abs() * 4 * fmt.epsilon + 2.0**-24).all()
    assert fmt is FP32 or (got != expected).double().mean() < 0.01


@FORMATS
@torch.no_grad()
def test_rows_are_what_torch_makes_of_them(fmt: NumberFormat, native: bool) -> None:
    ours, theirs = pair(fmt, native)
    x, y, weight = drawn(ours, *SHAPE), drawn(ours, *SHAPE, seed=1), drawn(ours, SHAPE[-1], seed=2)
    (total, normed), (expected, expected_normed) = (each.add_norm(x, y, weight, 1e-5) for each in (ours, theirs))
    assert torch.equal(total, expected)
    assert_near(normed, expected_normed, fmt)
    assert torch.equal(ours.rms_norm(total, weight, 1e-5), normed)
    gate, up = drawn(ours, *SHAPE[:2], 2 * SHAPE[2], seed=3).split(SHAPE[2], -1)  # parts of one tensor
    assert_near(ours.swiglu(gate, up), theirs.swiglu(gate, up), fmt)
    assert torch.equal(ours.swiglu(gate, up), ours.swiglu(gate.contiguous(), up.contiguous()))
    heads = drawn(ours, 5, 7, 6, 64, seed=4).transpose(1, 2)  # as a projection gives them
    angles = torch.randn(5, 7, 32, generator=torch.Generator().manual_seed(5)).repeat(1, 1, 2)
    for each in (angles, angles[:1]):
        cos, sin = each.cos(), each.sin()
        assert torch.equal(ours.rotate(heads, cos, sin), theirs.rotate(heads, cos, sin))


@torch.no_grad()
def test_what_is_not_finite_or_large_stays_so() -> None:
    gate = torch.tensor([torch.nan, torch.inf, -200.0, 200.0, -80.0, 0.0, -0.0, 1e-30]).repeat(1, 2)
    expected = torch.nn.functional.silu(gate)
    got = compiled.swiglu(gate, torch.ones(1, 16), FP32)
    torch.testing.assert_close(got, expected, atol=1e-35, rtol=1e-6, equal_nan=True)
    x, weight = torch.ones(2, 16), torch.ones(16)
    x[1, 3] = torch.nan
    total, normed = compiled.norm(x, weight, 0.0, FP32)
    assert total is x
    assert torch.equal(normed[0], weight)
    assert normed[1].isnan().all()


def test_a_policy_that_trains_has_the_same_rows_other_widths_their_own_way_and_an_exact_one_as_planned() -> None:
    table = replace(cpu.products(), compiled=compiled.parts())
    row = torch.ones(2, 64)
    for kernels in (NativeKernels(FP32, table=table, copies=True), NativeKernels(FP32, table=table)):
        assert kernels.compiles(row)
        assert not kernels.compiles(torch.ones(2, 6))
        assert not kernels.compiles(row.double())
    assert SimulatedKernels(FP16, table=table).compiles(row)
    assert not NativeKernels(FP32, table=replace(table, compiled=("fp32",))).compiles(row)
    for way in ("in order", "tiles"):
        plan = ExactPlan({}, AttentionChoice(way))
        for copies in (False, True):
            exact = ExactKernels(FP32, plan, weights_on_grid=copies, table=table)
            assert exact.compiles(row) == (way == "in order")


@pytest.mark.parametrize("fmt", [FP32, FP16, BF16])
def test_an_exact_learner_s_rows_are_the_rollout_s_and_its_gradients_the_fast_family_s(fmt: NumberFormat) -> None:
    table, plan = replace(cpu.products(), compiled=compiled.parts()), ExactPlan({}, AttentionChoice("in order"))
    if fmt is BF16:
        learner: Copies = ExactBf16Kernels(plan, table=table)
        rollout: Copies = ExactBf16Kernels(plan, table=table, copies=True)
        fast: Copies = NativeKernels(BF16, table=table)
    else:
        learner = ExactKernels(fmt, plan, table=table)
        rollout = ExactKernels(fmt, plan, weights_on_grid=True, table=table)
        fast = NativeKernels(FP32, table=table) if fmt is FP32 else SimulatedKernels(fmt, table=table)
    x, y, up = (drawn(learner, 40, 192, seed=seed) for seed in range(3))
    weight = drawn(rollout, 192, seed=3).float()
    found = []
    for kernels in (learner, fast):
        leaves = [each.clone().requires_grad_() for each in (x, up, weight)]
        normed = kernels.rms_norm(leaves[0], leaves[2], 1e-5)
        out = kernels.swiglu(normed, leaves[1])
        found.append((normed, out, torch.autograd.grad(out, leaves, y)))
    with torch.no_grad():
        normed = rollout.add_norm(x, torch.zeros_like(x), weight.to(x.dtype), 1e-5)[1]
        assert torch.equal(found[0][0], normed)
        assert torch.equal(found[0][1], rollout.swiglu(normed, up))
    for got, expected in zip(found[0][2], found[1][2], strict=True):
        bound = 1e-6 if fmt is FP32 else 2 * fmt.epsilon
        assert (got.double() - expected.double()).norm() <= bound * expected.double().norm()
        assert bool(expected.abs().max() > 0)
