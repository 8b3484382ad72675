"""Rounding in one pass, to a half and to values of codes: the bits of the Python that defines it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mantissa.kernels import SimulatedKernels, compiled
from mantissa.kernels.simulated import activation_values
from mantissa.precision import (
    ALONG_ROWS,
    BF16,
    DIAL,
    E4M3,
    FP16,
    SCHEMES,
    Fp8Policy,
    NumberFormat,
    Quantized,
    round_in_blocks,
    round_to_format,
)

pytestmark = pytest.mark.skipif(not compiled.kinds(), reason=f"nothing is compiled here: {compiled.why_not()}")
POLICIES: dict[str, Fp8Policy] = {
    "fp8": Fp8Policy(),
    "fp8 by a power of two": Fp8Policy(scale="power_of_two"),
    **{name: Quantized(scheme=name) for name, scheme in SCHEMES.items() if scheme.activations},
}


def defined(x_NE: Tensor, fp8: Fp8Policy) -> Tensor:
    if isinstance(fp8, Quantized):
        return SCHEMES[fp8.scheme].activation(x_NE)
    return round_in_blocks(x_NE, E4M3, ALONG_ROWS, fp8.power_of_two)


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    assert got.dtype is expected.dtype
    assert torch.equal(got.isnan(), expected.isnan())
    words = torch.int32 if got.dtype is torch.float32 else torch.int16
    assert torch.equal(got.nan_to_num(0.0).view(words), expected.nan_to_num(0.0).view(words))


def any_bits(*shape: int) -> Tensor:
    """Any values of fp32: subnormal, infinite and NaN among them."""
    words = torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(0))
    return words.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("fmt", [BF16, FP16])
@pytest.mark.parametrize("threads", [1, 2])
def test_to_a_half_it_is_the_cast(fmt: NumberFormat, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = any_bits(3, 100_003)
        midway = (torch.randn(4096).to(fmt.dtype).float() * (1 + fmt.epsilon / 2)).repeat(2)
        for each in (x, x[0, :13], midway, x.new_empty(0)):
            assert_same_bits(compiled.rounded(each, fmt), round_to_format(each, fmt))
            own = each.clone()
            assert compiled.rounded_(own, fmt) is own
            assert_same_bits(own, round_to_format(each, fmt))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fmt", [BF16, FP16])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_on_the_grid_is_left_and_one_value_that_is_not_is_seen(fmt: NumberFormat, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for size in (1, 16, 17, 70_001):
            x = round_to_format(torch.randn(size), fmt)
            assert compiled.on_grid(x, fmt) is x
            for at in {0, size // 2, size - 1}:
                off = x.clone()
                off[at] = 1 + fmt.epsilon / 8
                assert_same_bits(compiled.on_grid(off, fmt), round_to_format(off, fmt))
    finally:
        torch.set_num_threads(before)
    edge = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0])
    assert compiled.on_grid(edge, fmt) is edge
    wrong = any_bits(100)
    assert_same_bits(compiled.on_grid(wrong, fmt), round_to_format(wrong, fmt))
    assert torch.equal(compiled.on_grid(edge[:2].double(), fmt), edge[:2].double())


def test_what_it_does_not_serve_is_rounded_as_ever() -> None:
    x = torch.randn(6, 8)
    for given, fmt in ((x.t(), BF16), (x, DIAL["e8m3"]), (x.double(), FP16), (x.half(), BF16), (x, E4M3)):
        assert torch.equal(compiled.rounded(given, fmt), round_to_format(given, fmt))
        assert torch.equal(compiled.rounded_(given.clone(), fmt), round_to_format(given, fmt))


def test_what_is_differentiated_keeps_its_graph() -> None:
    x = torch.randn(8, requires_grad=True)
    for made in (compiled.rounded(x * 1, BF16), compiled.rounded_(x * 1, BF16)):
        assert torch.equal(made, round_to_format(x, BF16))
        assert torch.equal(torch.autograd.grad(made.sum(), x)[0], torch.ones(8))


@pytest.mark.parametrize("fmt", [BF16, FP16, DIAL["e5m4"]])
def test_a_weight_s_gradient_is_rounded_as_by_casts(fmt: NumberFormat) -> None:
    kernels, master = SimulatedKernels(fmt), torch.randn(64, 48, requires_grad=True)
    grad = torch.randn(64, 48) * 1e-3
    found = [torch.autograd.grad(copy, master, grad)[0]
             for copy in (kernels.weight(master), round_to_format(master, fmt))]  # fmt: skip
    assert torch.equal(*found)
    assert torch.equal(found[0], round_to_format(grad, fmt))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("width", [1, 16, 31, 128, 300])
def test_values_of_codes_are_the_definition_s(name: str, width: int) -> None:
    fp8, generator = POLICIES[name], torch.Generator().manual_seed(width)
    ordinary = torch.randn(33, width, generator=generator)
    ordinary *= torch.exp2(torch.randint(-20, 20, ordinary.shape, generator=generator).float())
    edges = ordinary.clone()
    edges[0], edges[1], edges[2] = 0.0, -0.0, ordinary[2] * 2.0**-130
    edges[3, 0], edges[4, -1], edges[5, 0], edges[6, -1] = torch.inf, torch.nan, 3e38, -3e38
    for x in (ordinary, edges, any_bits(33, width), ordinary.t().contiguous().t(), ordinary[:0]):
        assert_same_bits(activation_values(x, fp8), defined(x, fp8))


@pytest.mark.skipif("codes" not in compiled.parts(), reason="nothing here multiplies codes")
@pytest.mark.parametrize("width", [576, 200, 16])
def test_codes_times_their_scales_are_the_values(width: int) -> None:
    """To the bit in fp8; nvfp4's last scale is multiplied after a product's sum: its values are rounded elsewhere."""
    x = (torch.randn(9, width) * torch.exp(torch.randn(9, 1))).bfloat16()
    codes, scales = compiled.scaled_apart(x, "fp8")
    values = codes.float() * scales.repeat_interleave(128, 1)[:, :width]
    assert_same_bits(values, defined(x, POLICIES["fp8"]))
    assert torch.equal(codes, codes.to(torch.float8_e4m3fn).bfloat16())
    codes, scales = compiled.scaled_apart(x, "nvfp4")
    assert scales.shape == (9, 1)
    assert torch.allclose(codes.float() * scales, defined(x, POLICIES["nvfp4"]), rtol=2.0**-22, atol=0.0)
    with pytest.raises(KeyError):  # its scales are in its values
        compiled.scaled_apart(x, "mxfp8")


@pytest.mark.parametrize("name", ["fp8 by a power of two", "mxfp8", "mxfp4"])
def test_bf16_holds_the_values_of_scales_that_are_powers_of_two(name: str) -> None:
    x = (torch.randn(40, 3, 300) * torch.exp2(torch.randint(-140, 100, (40, 3, 300)).float())).bfloat16()
    got = activation_values(x, POLICIES[name])
    assert_same_bits(got, defined(x.float(), POLICIES[name]).bfloat16())


@pytest.mark.parametrize("name", POLICIES)
def test_threads_share_the_rows(name: str) -> None:
    before, x = torch.get_num_threads(), torch.randn(1000, 128)
    try:
        torch.set_num_threads(1)
        alone = activation_values(x, POLICIES[name])
        torch.set_num_threads(2)
        assert torch.equal(activation_values(x, POLICIES[name]), alone)
    finally:
        torch.set_num_threads(before)
