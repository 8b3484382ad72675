"""int8 products on a CPU, against float64 and the format's own definition."""

from __future__ import annotations

import pytest
import torch

from mantissa.base.errors import MantissaError
from mantissa.kernels import NativeKernels, SimulatedKernels, compiled, cpu
from mantissa.precision import BF16, SCHEMES, BlockScaled, Quantized, int8_codes

FULL = torch.full((16, 64), 127, dtype=torch.int8)
EXACT = bool((torch._int_mm(FULL, FULL.t()) == 64 * 127**2).all())
exact = pytest.mark.skipif(not EXACT, reason="this library adds int8 products in 16 bits")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_codes_and_scales_are_the_schemes_own() -> None:
    x = torch.cat((random(7, 100), torch.zeros(1, 100), torch.full((1, 100), 1e-42)))
    expected = SCHEMES["int8"].encode(x, True)
    codes, scales = int8_codes(x)
    assert torch.equal(codes.float(), expected.codes)
    assert torch.equal(scales, expected.scales)
    assert torch.equal(codes.float() * scales, expected.values)


def test_only_exact_sums_are_taken() -> None:
    assert (cpu.measured().int8_ratio < float("inf")) == EXACT


@exact
@pytest.mark.parametrize(("rows", "features"), [(1, 64), (3, 576), (64, 1536), (17, 131)])
def test_a_product_is_exact_but_for_three_roundings(rows: int, features: int) -> None:
    x, w, bias = random(2, rows, features), random(96, features, seed=1), random(96, seed=2)
    codes, scales = int8_codes(w)
    values = SCHEMES["int8"].encode(x.flatten(0, 1), True)
    exact = (values.codes.double() @ codes.double().t()) * values.scales.double() * scales.double().t()
    got = cpu.int8(x, BlockScaled(codes, scales), bias)
    assert got.shape == (2, rows, 96)
    oracle = exact + bias.double()
    limit = 3 * 2.0**-24 * exact.abs() + 2.0**-23 * oracle.abs()
    assert ((got.flatten(0, 1).double() - oracle).abs() <= limit).all()


@exact
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_beside_any_others(threads: int) -> None:
    """By construction: a sum of integers has no order."""
    x, weight = random(64, 576), BlockScaled(*int8_codes(random(200, 576, seed=1)))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = cpu.int8(x, weight)
        for rows in (1, 5, 16, 33):
            assert torch.equal(cpu.int8(x[:rows], weight), whole[:rows])
    finally:
        torch.set_num_threads(before)


def test_what_is_not_finite_stays_so_and_in_its_row() -> None:
    x = random(3, 64)
    x[1, 5] = float("inf")
    out = cpu.int8(x, BlockScaled(*int8_codes(random(8, 64, seed=1))))
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_a_sum_that_could_leave_32_bits_is_refused() -> None:
    with pytest.raises(MantissaError, match="131,072 features"):
        cpu.int8(torch.zeros(1, 1 << 17), BlockScaled(torch.zeros(1, 1, dtype=torch.int8), torch.ones(1, 1)))


def test_no_rows_are_no_rows() -> None:
    assert cpu.int8(torch.zeros(0, 64), BlockScaled(*int8_codes(random(8, 64)))).shape == (0, 8)


@exact
def test_native_and_simulated_agree_to_a_rounding() -> None:
    """The simulated product sums values in fp32; here they are integers, so the two differ by that sum's error."""
    fp8 = Quantized(scheme="int8")
    native, simulated = NativeKernels(BF16, fp8=fp8), SimulatedKernels(BF16, weights_on_grid=True, fp8=fp8)
    w, x, layer = random(96, 576, seed=1), random(16, 576).bfloat16(), "model.layers.0.mlp.up_proj"
    out = native.linear(x, native.copied(w, layer), None, layer).float()
    other = simulated.linear(x.float(), simulated.copied(w, layer), None, layer)
    near = other.bfloat16().float()
    assert torch.equal(near, other)
    assert (out != other).float().mean() < 0.01  # a rounding to bf16 that falls the other way
    assert (out - other).abs().max() <= 2.0**-7 * other.abs().max()


laid = pytest.mark.skipif("int8" not in compiled.parts(), reason="no compiled products of int8 here")


@laid
@exact
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("features", "inputs"), [(64, 4), (128, 580), (192, 1536), (64, 2112)])
def test_a_laid_out_weight_gives_the_same_bits(dtype: torch.dtype, threads: int, features: int, inputs: int) -> None:
    plain, bias = BlockScaled(*int8_codes(random(features, inputs))), random(features, seed=3)
    weight = BlockScaled(compiled.lay_codes(plain.codes), plain.scales)
    assert torch.equal(weight.codes.to_dense(), plain.codes)
    x = random(2, 129, inputs, seed=1).to(dtype)
    x[0, 0], x[0, 1, 0], x[1, 2] = 0.0, torch.inf, x[1, 2] * 1e-36
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 5, 16, 129):
            for offset in (None, bias):
                got, expected = (cpu.int8(x[:, :rows], each, offset, dtype) for each in (weight, plain))
                assert got.dtype is dtype
                assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
    finally:
        torch.set_num_threads(before)


@laid
@exact
def test_a_laid_out_weight_reads_any_dtype_as_its_values() -> None:
    plain, x = BlockScaled(*int8_codes(random(64, 128))), random(5, 128, seed=1)
    weight = BlockScaled(compiled.lay_codes(plain.codes), plain.scales)
    for dtype in (torch.float16, torch.float64):
        assert torch.equal(cpu.int8(x.to(dtype), weight), cpu.int8(x.to(dtype).float(), plain))


@laid
@exact
@pytest.mark.parametrize("fewer", [4, 64])  # the second a number of inputs that goes into tiles, where there are any
def test_a_laid_out_sum_that_nearly_leaves_32_bits_is_exact(fewer: int) -> None:
    codes = torch.full((64, (1 << 17) - fewer), -128, dtype=torch.int8)
    plain = BlockScaled(codes, torch.ones(64, 1))
    x = torch.ones(1, codes.shape[1])
    got, expected = (cpu.int8(x, each) for each in (BlockScaled(compiled.lay_codes(codes), plain.scales), plain))
    assert torch.equal(got, expected)
    assert got[0, 0] < -(2.0**31) * (127 / 127.5 * 0.99) / 127  # x's scale is 1 / 127.5
