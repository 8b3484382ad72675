"""The probes of kernels, autocast and fp8 pass what is honest, and catch each way of pretending there is to catch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.kernels import (
    Autocast,
    Kernels,
    NativeKernels,
    SimulatedKernels,
    autocast_for,
    cpu,
    learner_kernels,
    probe,
    probe_autocast,
    resolve,
    rollout_kernels,
    simulated,
)
from mantissa.kernels.autocast import Backend
from mantissa.kernels.rounded import rounding
from mantissa.precision import (
    BF16,
    DIAL,
    E4M3,
    FP16,
    FP32,
    Fp8Policy,
    NumberFormat,
    PrecisionPolicy,
    format_named,
    round_in_blocks,
    round_to_format,
)

formats = pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("logits_format", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    "family",
    [
        lambda logits: NativeKernels(FP32, logits),
        lambda logits: NativeKernels(FP16, logits),
        lambda logits: NativeKernels(BF16, logits),
        lambda logits: SimulatedKernels(FP16, logits),
        lambda logits: SimulatedKernels(BF16, logits),
        lambda logits: SimulatedKernels(FP16, logits, weights_on_grid=True),
        lambda logits: SimulatedKernels(BF16, logits, weights_on_grid=True),
        lambda logits: SimulatedKernels(DIAL["e8m2"], logits),
        lambda logits: SimulatedKernels(DIAL["e5m10"], logits),
        lambda logits: SimulatedKernels(DIAL["e5m2"], logits, weights_on_grid=True),
    ],
)
def test_every_honest_family_passes(family: object, logits_format: NumberFormat, device: str) -> None:
    kernels: Kernels = family(logits_format)  # type: ignore[operator]
    evidence = probe(kernels, device)
    assert "\n" not in evidence
    assert f"holds logits in {logits_format}" in evidence
    assert ("flushes a gradient of 2^-26 to 0" in evidence) == (kernels.format.exponent_bits == 5)
    assert ("accumulates wider than it stores" in evidence) == (kernels.format is not FP32)


@pytest.mark.usefixtures("bf16_is_simulated")
def test_roles_get_their_backend_logits_format_and_whether_weights_are_rounded() -> None:
    native = resolve(PrecisionPolicy(train="fp16", rollout="bf16", logits="bf16", backend="native"), "cpu")
    assert isinstance(learner_kernels(native), NativeKernels)
    assert isinstance(rollout_kernels(native), NativeKernels)
    simulated = resolve(PrecisionPolicy(train="fp16", rollout="bf16", logits="bf16"), "cpu")
    learner, rollout = learner_kernels(simulated), rollout_kernels(simulated)
    assert isinstance(learner, SimulatedKernels)
    assert isinstance(rollout, SimulatedKernels)
    assert (learner.weights_on_grid, rollout.weights_on_grid) == (False, True)
    assert learner.logits_format is rollout.logits_format is learner_kernels(native).logits_format is BF16


# ---- liars


class _HalfSum(torch.autograd.Function):
    """Rounds the running sum after every term, as a half-precision accumulator does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, fmt: NumberFormat) -> Tensor:
        ctx.save_for_backward(x, w)
        total = torch.zeros(x.shape[0], w.shape[0])
        for i in range(x.shape[1]):
            total = round_to_format(total + x[:, i : i + 1] * w[:, i], fmt)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        return grads[0] @ w, grads[0].t() @ x, None


def straight_through(exact: Tensor, fmt: NumberFormat) -> Tensor:
    """Rounded forward only: the usual fake quantisation."""
    return exact + (round_to_format(exact, fmt) - exact).detach()


# What each operation does instead of what it says; the check that sees it.
LIARS: dict[str, tuple[str, Callable[..., Tensor], str]] = {
    "fp32 inside": ("linear", lambda f, x, w: F.linear(x, w), "rounds 1+u/4 to 1"),
    "rounds only forward": (
        "linear", lambda f, x, w: straight_through(F.linear(x, w), f.format), "rounds a gradient of 1+u/4 to 1"),
    "rounds the input's gradient only": (
        "linear", lambda f, x, w: SimulatedKernels(f.format, weights_on_grid=True).linear(x, w),
        "rounds a weight's gradient of 1+u/4 to 1"),
    "keeps masters": (
        "weight", lambda f, w: round_to_format(w, f.format) + (w - round_to_format(w, f.format)).detach(),
        "rounds a weight of 1+u/4 to 1"),
    "half accumulation": (
        "linear", lambda f, x, w: _HalfSum.apply(x, f.weight(w), f.format), "accumulates wider than it stores"),
    "half logits": (
        "logits", lambda f, x, w: round_to_format(SimulatedKernels(f.format).logits(x, w), f.format),
        "holds logits in fp32"),
}  # fmt: skip


@formats
@pytest.mark.parametrize("name", LIARS)
def test_liars_are_caught(name: str, fmt: NumberFormat) -> None:
    operation, instead, caught_by = LIARS[name]
    liar = type("Liar", (SimulatedKernels,), {operation: instead})(fmt)
    expected = f"precision: {fmt} is not active in the Liar on cpu: it should show that it {caught_by} (expected"
    with pytest.raises(MantissaError, match="^" + re.escape(expected)):
        probe(liar, "cpu")


def test_saturation_in_place_of_overflow_is_caught() -> None:
    """Loss scaling would never be told."""
    kernels = SimulatedKernels(FP16)
    kernels.linear = lambda x, w: SimulatedKernels(FP16).linear(x, w).clamp(-65504.0, 65504.0)  # type: ignore
    with pytest.raises(MantissaError, match="overflows 131072 to inf"):
        probe(kernels, "cpu")


@pytest.mark.parametrize(("claims", "computes"), [(FP16, BF16), (BF16, FP16), (FP32, BF16), (FP32, FP16), (FP16, FP32)])
@pytest.mark.parametrize("base", [NativeKernels, SimulatedKernels])
def test_one_format_passed_off_as_another_is_caught(
    base: type[NativeKernels], claims: NumberFormat, computes: NumberFormat
) -> None:
    if base is SimulatedKernels and computes is FP32:
        pytest.skip("fp32 is not simulated")
    kernels = base(computes)
    inner = base(computes)
    kernels.format = claims
    kernels.linear = inner.linear  # type: ignore[method-assign]
    kernels.weight = inner.weight  # type: ignore[method-assign]
    with pytest.raises(MantissaError, match=f"precision: {claims} is not active"):
        probe(kernels, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("backend", ["native", "simulated"])
def test_probe_names_what_it_saw(backend: Backend, fmt: NumberFormat, device: str) -> None:
    evidence = probe_autocast(Autocast(fmt, backend, device), device)
    assert "keeps 1+u; " in evidence
    assert "rounds a weight's gradient of 1+u/4 to 1" in evidence
    assert ("overflows a gradient of 131072 to inf" in evidence) == (fmt is FP16)


@dataclasses.dataclass
class Pretended:
    """An ``Autocast`` that says one format and computes in another."""

    format: NumberFormat
    real: Autocast

    def forward(self) -> object:
        return self.real.forward()

    def backward(self) -> object:
        return self.real.backward()


@pytest.mark.parametrize(("says", "does"), [(FP16, FP32), (BF16, FP32), (FP16, BF16), (BF16, FP16), (FP32, BF16)])
def test_probe_refuses_another_format_than_it_is_told(says: NumberFormat, does: NumberFormat) -> None:
    with pytest.raises(MantissaError, match=f"{says} is not active"):
        probe_autocast(Pretended(says, Autocast(does, "simulated", "cpu")), "cpu")  # type: ignore[arg-type]


def test_probe_takes_its_gradients_inside_backward() -> None:
    seen = []

    class Watched(Autocast):
        def backward(self):  # type: ignore[no-untyped-def]
            seen.append(1)
            return super().backward()

    probe_autocast(Watched(FP16, "simulated", "cpu"), "cpu")
    assert len(seen) == 10  # two gradients in each of five cases


def test_formats_and_devices_that_have_no_autocast_are_refused() -> None:
    with pytest.raises(MantissaError, match=r"precision=e4m3: modules run in fp32, fp16 or bf16, not in fp8"):
        Autocast(E4M3, "simulated", "cpu")
    with pytest.raises(MantissaError, match="device=meta: torch has no autocast"):
        Autocast(FP16, "native", "meta")


@pytest.mark.parametrize("backend", ["auto", "native"])
@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_autocast_for_a_role_takes_what_is_active(name: str, backend: str) -> None:
    policy = PrecisionPolicy(train=name, rollout=name, backend=backend)  # type: ignore[arg-type]
    role = resolve(policy, "cpu").learner
    autocast = autocast_for(role, torch.device("cpu"))
    assert (autocast.format, autocast.backend, autocast.device_type) == (role.active, role.backend, "cpu")
    assert repr(autocast) == f"Autocast({name}, {role.backend}, cpu)"
    with autocast.forward():
        assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == role.active.dtype
        assert (rounding() is not None) == (role.backend == "simulated")


Quantise = Callable[..., Tensor]


@pytest.mark.parametrize("on_grid", [False, True], ids=["masters", "copies"])
@pytest.mark.parametrize("scale", ["fp32", "power_of_two"])
@pytest.mark.parametrize("backward", ["e4m3", "e5m2", "high"])
@pytest.mark.parametrize("base", ["bf16", "fp16"])
def test_every_honest_variant_passes(base: Any, backward: Any, scale: Any, on_grid: bool) -> None:
    fp8 = Fp8Policy(base=base, backward=backward, scale=scale, exclude=("layers.0", "down_proj"))
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
    for module in (simulated, cpu):  # gradients, and weights
        monkeypatch.setattr(module, "round_in_blocks", quantise)

    def values_of(x: Tensor, fp8: Fp8Policy) -> Tensor:  # whether they are compiled here or not
        return quantise(x, E4M3, ROW, fp8.power_of_two)

    monkeypatch.setattr(simulated, "activation_values", values_of)
    assert_caught(SimulatedKernels(FP16, fp8=fp8), caught_by)


def test_the_base_is_proved_too() -> None:
    kernels = SimulatedKernels(FP16, fp8=Fp8Policy())
    kernels.format = dataclasses.replace(FP16, name="bf16", exponent_bits=8, mantissa_bits=7)
    with pytest.raises(MantissaError, match="precision: bf16 is not active"):
        probe(kernels, "cpu")


@pytest.mark.parametrize("wrong", ["the sum", "an operand", "nothing"])
@pytest.mark.parametrize("way", ["o", "b"])
def test_a_library_that_a_table_names_is_proven_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch, wrong: str, way: str
) -> None:
    """On this machine, whatever was measured and where: what rounds a sum or an operand is refused by name."""

    def library(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        x = round_to_format(x, E4M3 if way == "b" else BF16) if wrong == "an operand" else x
        out = F.linear(x, w, bias)
        return out.bfloat16().float() if wrong == "the sum" else out

    monkeypatch.setattr(cpu, "onednn", library)
    operands = "bf16" if way == "b" else "fp32"
    ways = cpu.CpuProducts(1.0).ways | {f"{operands} {side}": (way * 6,) * 4 for side in ("forward", "input", "weight")}
    table = cpu.CpuProducts(1.0, ways=ways)
    kernels = SimulatedKernels(BF16, table=table) if way == "b" else NativeKernels(FP32, table=table)
    if wrong == "nothing":
        assert probe(kernels, "cpu").count("multiplies exactly by oneDNN") >= 3
        return
    with pytest.raises(MantissaError, match=r"it (keeps 1\+u|multiplies exactly by oneDNN.* \(forward\)) \(exp"):
        probe(kernels, "cpu")
