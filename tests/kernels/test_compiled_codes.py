"""Compiled products of 8-bit codes and their scales: against float64's of the values, and in what they are kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.kernels import NativeKernels, compiled, cpu, probe
from mantissa.kernels.compiled import Laid
from mantissa.kernels.cpu import CpuProducts, Products, activation_scheme, activation_values, weight_values
from mantissa.precision import BF16, SCHEMES, BlockScaled, Fp8Policy, Quantized

pytestmark = pytest.mark.skipif("codes" not in compiled.parts(), reason="no compiled products of codes here")
POLICIES: dict[str, Fp8Policy] = {
    "fp8": Fp8Policy(),
    "fp8 by a power of two": Fp8Policy(scale="power_of_two"),
    **{name: Quantized(scheme=name) for name in SCHEMES if name != "int8"},
}
HELD = {"fp8": "codes", "int4": "codes", "int4-32": "codes", "nvfp4": "total"}  # the others: folded
PRODUCTS = Products("bf16", CpuProducts(0.5, compiled=compiled.parts()))
LAYER = "model.layers.0.mlp.up_proj"
formats = pytest.mark.parametrize("name", POLICIES)


def drawn(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    """Rows of several magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape[0], 1, generator=generator))


def laid(weight: Tensor, fp8: Fp8Policy) -> tuple[BlockScaled, Laid]:
    copy = cpu.quantized_copy(weight, fp8, PRODUCTS)
    assert isinstance(copy, BlockScaled)
    found = PRODUCTS.laid_codes(copy, fp8)
    assert isinstance(found, Laid)
    return copy, found


@formats
@pytest.mark.parametrize(
    ("features", "inputs"),
    [(128, 576), (64, 200), (192, 64), (64, 1600), (128, 34)],  # blocks cut short, tiles or none
)
def test_a_product_is_that_of_the_values_and_does_not_depend_on_the_other_rows(
    name: str, features: int, inputs: int
) -> None:
    fp8, weight, x = POLICIES[name], drawn(features, inputs), drawn(300, inputs, seed=1).bfloat16()
    copy, codes = laid(weight, fp8)
    assert codes.kind == HELD.get(name, "folded")
    assert torch.equal(codes.to_dense().float(), copy.codes.float())
    scheme = activation_scheme(fp8)
    got = codes.coded_product(x, scheme)
    x_values, w_values = activation_values(x.float(), fp8).double(), weight_values(weight, fp8).double()
    scale = x_values.abs() @ w_values.abs().t()
    assert ((got.double() - x_values @ w_values.t()).abs() <= scale * inputs * 2.0**-24).all()
    for rows in (1, 2, 5, 6, 7, 15, 16, 17, 31, 32, 33, 49, 64, 96):
        assert torch.equal(codes.coded_product(x[:rows], scheme), got[:rows])
    bias = drawn(1, features)[0]
    with_bias = codes.coded_product(x, scheme, bias)
    assert torch.equal(with_bias, got + bias)
    assert torch.equal(codes.coded_product(x, scheme, bias, torch.bfloat16), with_bias.bfloat16())
    assert codes.coded_product(x[:0], scheme).shape == (0, features)


@formats
def test_threads_share_the_outputs_and_not_the_sums(name: str) -> None:
    fp8, x = POLICIES[name], drawn(9, 256, seed=1).bfloat16()
    _, codes = laid(drawn(1024, 256), fp8)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(codes.coded_product(x, activation_scheme(fp8)))
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
    finally:
        torch.set_num_threads(before)


@formats
def test_what_is_not_finite_stays_in_its_row(name: str) -> None:
    fp8, x = POLICIES[name], drawn(4, 256, seed=1).bfloat16()
    _, codes = laid(drawn(64, 256), fp8)
    sound = codes.coded_product(x, activation_scheme(fp8))
    x[1, 3], x[2, 200] = torch.inf, torch.nan
    got = codes.coded_product(x, activation_scheme(fp8))
    assert not got[1:3].isfinite().any()
    assert torch.equal(got[[0, 3]], sound[[0, 3]])


@pytest.mark.parametrize("name", ["fp8 by a power of two", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("power", [-140, -126, -120, -110, 0, 100])
def test_values_beyond_the_normals_are_zero_to_the_processor(name: str, power: int) -> None:
    """Where a scale takes a code below 2^-126, as in bf16's own products; and above it no digit is lost."""
    fp8 = POLICIES[name]
    weight = torch.ldexp(drawn(64, 64, spread=0.0), torch.tensor(power))
    _, codes = laid(weight, fp8)
    values = weight_values(weight, fp8)
    kept = torch.where(values.abs() < 2.0**-126, 0.0, values)
    assert torch.equal(codes.product(torch.eye(64).bfloat16()).t(), kept)


@formats
def test_a_rollout_multiplies_by_them_and_proves_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8, x = POLICIES[name], drawn(17, 256, seed=1).bfloat16()
    kernels = NativeKernels(BF16, fp8=fp8, table=PRODUCTS.table, copies=True)
    copy = kernels.copied(drawn(128, 256), LAYER)
    assert isinstance(copy, BlockScaled)
    kept = BlockScaled(kernels.laid(copy, LAYER), copy.scales)
    by_values = kernels.linear(x, copy, None, LAYER)  # a shape without a layout is multiplied so
    got = kernels.linear(x, kept, None, LAYER)
    assert got.dtype is torch.bfloat16
    assert (got != by_values).float().mean() < 0.02  # a rounding to bf16 that falls the other way
    assert torch.allclose(got.float(), by_values.float(), rtol=2.0**-7, atol=1e-4)
    assert fp8.kind in probe(kernels, "cpu") or name.startswith("fp8")
    right = Laid.product

    def wrong(self: Laid, *given: object, **more: object) -> Tensor:
        return right(self, *given, **more) * (1.25 if self.kind == HELD.get(name, "folded") else 1)  # type: ignore[arg-type]

    monkeypatch.setattr(Laid, "product", wrong)
    with pytest.raises(MantissaError, match=f"{fp8.kind} is not active in the NativeKernels"):
        probe(kernels, "cpu")
