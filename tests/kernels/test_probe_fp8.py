"""The probe of fp8: it passes every honest variant, and catches each way of pretending that it is there to catch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from mantissa.errors import MantissaError
from mantissa.kernels import SimulatedKernels, probe, simulated
from mantissa.precision import BF16, FP16, Fp8Policy, NumberFormat, format_named, round_in_blocks, round_to_format

Quantise = Callable[..., Tensor]


@pytest.mark.parametrize("on_grid", [False, True], ids=["masters", "copies"])
@pytest.mark.parametrize("scale", ["fp32", "power_of_two"])
@pytest.mark.parametrize("backward", ["e4m3", "e5m2", "high"])
@pytest.mark.parametrize("base", ["bf16", "fp16"])
def test_every_honest_variant_passes(base: Any, backward: Any, scale: Any, on_grid: bool) -> None:
    fp8 = Fp8Policy(base, backward, scale, exclude=("layers.0", "down_proj"))
    evidence = probe(SimulatedKernels(format_named(base), weights_on_grid=on_grid, fp8=fp8), "cpu")
    assert evidence.startswith("keeps 1+u; rounds 1+u/4 to 1; ")  # the base's proof
    for what in (
        "rounds an input of 1+1/16 to 1",
        "quantises the fp32 master",
        f"scales by {'its largest value' if scale == 'fp32' else 'a power of two'}",
        "leaves layers.0 in the base",
        "leaves down_proj in the base",
    ):
        assert what in evidence
    digits = base if backward == "high" else backward
    assert (f"gives a weight's gradient of 1.125 {digits}'s digits" in evidence) == (not on_grid)


def test_a_base_alone_is_not_asked_for_fp8() -> None:
    assert "1+1/16" not in probe(SimulatedKernels(BF16), "cpu")


def test_a_policy_that_excludes_everything_is_refused() -> None:
    with pytest.raises(MantissaError, match="leaves no layer in fp8"):
        probe(SimulatedKernels(BF16, fp8=Fp8Policy(exclude=("layers",))), "cpu")


# ---- liars: one policy passed off as another


CLAIMS: list[tuple[dict[str, Any], dict[str, Any] | None, str]] = [
    ({}, None, "rounds an input of 1+1/16 to 1"),
    ({}, {"backward": "e4m3"}, "gives a gradient of 1.125 e5m2's digits"),
    ({}, {"backward": "high"}, "gives a gradient of 1.0625 e5m2's digits"),
    ({"backward": "e4m3"}, {"backward": "e5m2"}, "gives a gradient of 1.125 e4m3's digits"),
    ({"backward": "high"}, {"backward": "e5m2"}, "gives a gradient of 1.0625 bf16's digits"),
    ({}, {"scale": "power_of_two"}, "scales by its largest value"),
    ({"scale": "power_of_two"}, {}, "scales by a power of two"),
    ({"exclude": ["down_proj"]}, {}, "leaves down_proj in the base"),
]


@pytest.mark.parametrize(("claims", "computes", "caught_by"), CLAIMS)
def test_one_policy_passed_off_as_another_is_caught(
    claims: dict[str, Any], computes: dict[str, Any] | None, caught_by: str
) -> None:
    kernels = SimulatedKernels(BF16, fp8=Fp8Policy(**claims))
    inner = SimulatedKernels(BF16, fp8=None if computes is None else Fp8Policy(**computes))
    kernels.linear = inner.linear  # type: ignore[method-assign]
    assert_caught(kernels, caught_by)


def assert_caught(kernels: SimulatedKernels, caught_by: str) -> None:
    with pytest.raises(MantissaError) as caught:
        probe(kernels, "cpu")
    expected = f"precision: fp8 is not active in the {type(kernels).__name__} on cpu: it should show that it "
    assert str(caught.value).startswith(f"{expected}{caught_by} (expected")
    assert "\n" not in str(caught.value)


class QuantisesTheHalfCopy(SimulatedKernels):
    def linear(self, x: Tensor, w: Any, b: Tensor | None = None, layer: str = "") -> Tensor:
        return super().linear(x, round_to_format(w, self.format) if layer else w, b, layer)


class QuantisesEverything(SimulatedKernels):
    def linear(self, x: Tensor, w: Any, b: Tensor | None = None, layer: str = "") -> Tensor:
        return super().linear(x, w, b, layer if x.shape[-1] == 8 else "layers.5.any")


class CopiesInTheBase(SimulatedKernels):
    """Ships half weights to the rollout, which multiplies them as if they were codes' values."""

    def copied(self, master: Tensor, layer: str = "") -> Tensor:
        return round_to_format(master, self.format)


@pytest.mark.parametrize("on_grid", [False, True], ids=["masters", "copies"])
def test_liars_about_weights_are_caught(on_grid: bool) -> None:
    fp8 = Fp8Policy(exclude=("down_proj",))
    assert_caught(QuantisesEverything(BF16, weights_on_grid=on_grid, fp8=fp8), "leaves what has no name in the base")
    if on_grid:
        assert_caught(CopiesInTheBase(BF16, weights_on_grid=True, fp8=fp8), "rounds a weight of 1+1/16 to 1")
    else:
        assert_caught(QuantisesTheHalfCopy(BF16, fp8=fp8), "quantises the fp32 master")


# ---- liars: another quantisation behind the right policy


ROW, COLUMN, BOTH = (1, 128), (128, 1), (128, 128)
# The block taken in place of another, for a tensor x; and the check that sees it.
BLOCKS: dict[str, tuple[Callable[[Tensor, tuple[int, int]], tuple[int, int]], str]] = {
    "per tensor": (lambda x, block: (x.shape[-2], x.shape[-1]), "gives 128 other inputs another"),
    "per row": (lambda x, block: (1, x.shape[-1]) if block == ROW else block, "gives 128 other inputs another"),
    "all rows": (lambda x, block: BOTH if block == ROW else block, "gives another row's inputs another"),
    "finer": (lambda x, block: (1, 32) if block == ROW else block, "shares a scale among 128 inputs"),
    "weights by row": (lambda x, block: ROW if block == BOTH else block, "shares a scale among 128 by 128 weights"),
    "wide weights": (lambda x, block: (256, 256) if block == BOTH else block, "gives 128 other weights another"),
    "other way": (
        lambda x, block: ROW if block == COLUMN else block,
        "gives a weight's gradient of 1.0625 e4m3's digits",
    ),
}


def inputs_alone(x: Tensor, fmt: NumberFormat, block: tuple[int, int], power_of_two: bool) -> Tensor:
    """The usual fake quantisation: the backward pass is left as it was."""
    return x if block == (128, 1) else round_in_blocks(x, fmt, block, power_of_two)


def saturating(x: Tensor, fmt: NumberFormat, block: tuple[int, int], power_of_two: bool) -> Tensor:
    return round_in_blocks(x.clamp(-65504.0, 65504.0), fmt, block, power_of_two)


def with_block(of: Callable[[Tensor, tuple[int, int]], tuple[int, int]]) -> Quantise:
    return lambda x, fmt, block, power_of_two: round_in_blocks(x, fmt, of(x, block), power_of_two)


QUANTISATIONS: list[tuple[Quantise, str]] = [
    *((with_block(block), caught_by) for block, caught_by in BLOCKS.values()),
    (inputs_alone, "gives a weight's gradient of 1.0625 e4m3's digits"),
    (saturating, "passes an overflowed gradient on"),
]


@pytest.mark.parametrize(("quantise", "caught_by"), QUANTISATIONS)
def test_another_quantisation_is_caught(quantise: Quantise, caught_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = Fp8Policy(backward="e4m3", base="fp16")
    probe(SimulatedKernels(FP16, fp8=fp8), "cpu")
    monkeypatch.setattr(simulated, "round_in_blocks", quantise)
    assert_caught(SimulatedKernels(FP16, fp8=fp8), caught_by)


def test_the_base_is_proved_too() -> None:
    kernels = SimulatedKernels(FP16, fp8=Fp8Policy())
    kernels.format = dataclasses.replace(FP16, name="bf16", mantissa_bits=7)
    with pytest.raises(MantissaError, match="precision: bf16 is not active"):
        probe(kernels, "cpu")
