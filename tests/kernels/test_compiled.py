"""Products compiled for this processor: right, the same for any number of rows and threads, and built in safety."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mantissa.base.errors import MantissaError
from mantissa.kernels import NativeKernels, SimulatedKernels, compiled, cpu, probe
from mantissa.kernels.compiled import KINDS, Kind, Laid
from mantissa.kernels.cpu import CpuProducts
from mantissa.precision import BF16, FP16, FP32, PrecisionPolicy, round_to_format

pytestmark = pytest.mark.skipif(not compiled.kinds(), reason=f"nothing is compiled here: {compiled.why_not()}")
HERE = pytest.mark.parametrize("kind", compiled.kinds())
TILES = "avx512_bf16 avx512_vnni amx_bf16 amx_int8"
_GRID = {"fp32": FP32, "bf16": BF16, "fp16": FP16, "pairs": BF16}


def drawn(kind: Kind, *shape: int, seed: int = 0) -> Tensor:
    """fp32 values on the kind's grid."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return round_to_format(values, _GRID[kind])


@HERE
@pytest.mark.parametrize(
    ("features", "inputs"),
    [(64, 2), (128, 64), (192, 1538), (64, 1056)],  # the last two: more inputs than at a time
)
def test_a_product_is_right_and_does_not_depend_on_the_other_rows(kind: Kind, features: int, inputs: int) -> None:
    weight, bias = drawn(kind, features, inputs), drawn("fp32", features, seed=1)
    laid = compiled.lay(weight, kind)
    x = drawn(kind, 300, inputs, seed=2)
    expected = x.double() @ weight.double().t()
    alone = torch.cat([laid.product(row[None]) for row in x])
    for rows in (1, 2, 3, 4, 5, 6, 7, 12, 16, 17, 32, 33, 48, 49, 300):
        assert torch.equal(laid.product(x[:rows]), alone[:rows])
    scale = x.double().abs() @ weight.double().abs().t()
    assert ((alone.double() - expected).abs() <= scale * inputs * 2.0**-24).all()
    with_bias = laid.product(x, bias)
    assert torch.equal(with_bias, alone + bias)
    assert torch.equal(laid.product(x, bias, torch.bfloat16), with_bias.bfloat16())
    assert laid.product(x.view(2, 150, inputs)).shape == (2, 150, features)
    assert laid.product(x[:0]).shape == (0, features)


@HERE
def test_threads_share_the_outputs_and_not_the_sums(kind: Kind) -> None:
    laid, x = compiled.lay(drawn(kind, 1024, 256), kind), drawn(kind, 9, 256, seed=1)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(laid.product(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@HERE
def test_what_is_not_finite_stays_so_and_bf16_rounds_to_even(kind: Kind) -> None:
    weight = torch.zeros(64, 2)
    weight[:5, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, 1.0])
    weight[3:5, 1] = torch.tensor([2.0**-8, 3 * 2.0**-8])  # halfway between two values of bf16: to the even one
    one = torch.ones(1, 2)
    got = compiled.lay(weight, kind).product(one, dtype=torch.bfloat16)[0, :5]
    torch.testing.assert_close(got, weight.sum(1)[:5].bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert got[3:].tolist() == [1.0, 1.0 + 2.0**-6]


@HERE
def test_a_laid_out_weight_is_multiplied_and_made_plain_and_nothing_else(kind: Kind) -> None:
    weight = drawn(kind, 128, 64)
    laid = compiled.lay(weight, kind)
    parameter = nn.Parameter(laid, requires_grad=False)
    assert isinstance(parameter, Laid)
    assert (parameter.shape, parameter.dtype) == (weight.shape, weight.dtype)
    assert torch.equal(parameter.detach().to_dense(), weight)
    assert compiled.lay(weight.bfloat16(), kind).to_dense().dtype is torch.bfloat16
    for wrong in (lambda: laid + 1, lambda: laid @ weight.t(), laid.double, laid.clone):
        with pytest.raises(NotImplementedError, match="to_dense"):
            wrong()


@HERE
def test_a_result_of_another_dtype_is_refused(kind: Kind) -> None:
    laid = compiled.lay(drawn(kind, 64, 64), kind)
    with pytest.raises(TypeError, match="float32 or bfloat16, and was asked for"):
        laid.product(drawn(kind, 2, 64), dtype=torch.float16)


def test_the_shapes_that_fit() -> None:
    block = compiled.library().mantissa_block()
    assert [compiled.fits(shape, "fp32") for shape in ((block, 3), (block + 1, 3), (block, 2, 2))] == [
        True,
        False,
        False,
    ]
    assert not compiled.fits((block, 3), "pairs")


@pytest.mark.parametrize("preset", ["bf16", "fp16", "fp8", "fp8-rollout", "mxfp8-rollout", "mxfp4-rollout",
                                    "nvfp4-rollout", "int8-rollout", "fp32"])  # fmt: skip
def test_what_a_rollout_keeps_fits_the_kind_that_it_is_kept_in(preset: str) -> None:
    """A layout must not round: the values of each format, codes times scales included, come back to the bit."""
    backend = {} if preset == "fp32" else {"backend": "simulated"}
    policy = PrecisionPolicy.parse({"preset": preset, **backend})
    table = replace(CpuProducts(1.0), compiled=KINDS)
    from mantissa.kernels.roles import resolve, rollout_kernels

    kernels = rollout_kernels(resolve(policy, "cpu", products=table))
    master = torch.randn(256, 512, generator=torch.Generator().manual_seed(3)) * torch.logspace(-6, 3, 256)[:, None]
    for layer in ("model.layers.0.mlp.gate_proj", "lm_head"):
        copy = kernels.copied(master, layer)
        assert isinstance(copy, Tensor)
        laid = kernels.laid(copy, layer)
        assert isinstance(laid, Laid)
        assert torch.equal(laid.to_dense(), copy)


@pytest.mark.parametrize("fmt", [BF16, FP16])
def test_a_simulated_half_is_the_library_s_up_to_the_order_of_its_sums(fmt: Any) -> None:
    ways = {way: SimulatedKernels(fmt, weights_on_grid=True, table=replace(CpuProducts(1.0), compiled=way))
            for way in ((), KINDS)}  # fmt: skip
    master, x = torch.randn(256, 512), round_to_format(torch.randn(5, 512), fmt)
    found = [kernels.linear(x, kernels.laid(kernels.copied(master))) for kernels in ways.values()]
    torch.testing.assert_close(*found, rtol=2 * fmt.epsilon, atol=2.0**-7)
    assert torch.equal(round_to_format(found[1], fmt), found[1])


def test_native_bf16_keeps_its_head_in_bf16_and_its_logits_in_fp32() -> None:
    if "pairs" not in compiled.kinds():
        pytest.skip("this processor has no products of bf16 pairs")
    kernels = NativeKernels(BF16, table=replace(CpuProducts(0.5), compiled=KINDS), copies=True)
    master, x = torch.randn(256, 512), torch.randn(3, 512).bfloat16()
    head = kernels.laid(kernels.copied(master, "lm_head"), "lm_head")
    assert isinstance(head, Laid)
    assert head.held.dtype is torch.bfloat16
    logits = kernels.logits(x, head)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, x.float() @ master.bfloat16().float().t(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("fmt", [FP32, BF16, FP16])
def test_the_probe_proves_them_and_refuses_a_wrong_one(fmt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = replace(CpuProducts(1.0), compiled=compiled.kinds())
    kernels: Any = NativeKernels(FP32, table=table) if fmt is FP32 else SimulatedKernels(fmt, FP32, True, table=table)
    assert f"multiplies copies exactly by compiled products ({fmt.name})" in probe(kernels, "cpu")
    product = Laid.product
    monkeypatch.setattr(Laid, "product", lambda self, x, *more: product(self, x, *more) * (1 + 2.0**-23))
    with pytest.raises(MantissaError, match="compiled products"):
        probe(kernels, "cpu")


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As in a process that has built nothing yet, with a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiled, "built", compiled.built.__wrapped__)
    return tmp_path / "mantissa"


def test_it_is_built_once_and_kept(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled.kinds()
    (made,) = anew.iterdir()
    assert made.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(compiled, "_compile", lambda *_: pytest.fail("it was there"))
    assert compiled.kinds()


@pytest.mark.parametrize("how", ["file", "link", "folder"])
def test_what_others_could_have_written_is_not_loaded(anew: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled.kinds()
    (made,) = anew.iterdir()
    planted = anew.parent / "planted.so"
    planted.write_bytes(b"not a library: loading it is an error")
    made.unlink()  # it is mapped: written over, it would take this process along
    if how == "link":
        made.symlink_to(planted)
    else:
        made.write_bytes(planted.read_bytes())
        (made if how == "file" else anew).chmod(0o777)
    opened: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path, load=ctypes.CDLL: opened.append(path) or load(path))
    assert compiled.kinds(), compiled.why_not()
    assert planted.read_bytes().startswith(b"not")  # what the link pointed to was not written over
    assert (Path(opened[0]).parent == anew) == (how != "folder")
    assert not Path(opened[0]).is_symlink()
    assert Path(opened[0]).exists() == (how != "folder")  # one for this process alone is gone once it is loaded


@pytest.mark.parametrize(
    ("compiler", "said"),
    [("missing-cc", "no C compiler \\(missing-cc\\)"), ("false", "refused"), ("true", "could not be built")],
)
def test_without_a_compiler_that_works_there_is_none_and_it_says_why(
    anew: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, said: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert compiled.kinds() == ()
    with pytest.raises(MantissaError, match=said):
        compiled.library()
    assert "weights that do not train: oneDNN (" in CpuProducts(1.0).lines()[-1]
    kernels = SimulatedKernels(FP16, weights_on_grid=True, table=replace(CpuProducts(1.0), compiled=("fp16",)))
    with pytest.raises(MantissaError, match="this run multiplies by compiled products"):  # one begun with a compiler
        kernels.laid(torch.ones(256, 512))
    assert not list(anew.glob("*"))


def test_a_compiler_that_knows_no_tiles_builds_the_rest(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, ...]] = []

    def old(compiler: str, options: tuple[str, ...], path: Path, build: Any = compiled._compile) -> None:
        tried.append(options)
        if "-mamx-tile" in options:
            raise subprocess.CalledProcessError(1, compiler, stderr="unrecognized option '-mamx-tile'")
        build(compiler, options, path)

    monkeypatch.setattr(compiled, "_compile", old)
    flags = (*compiled._flags(), *TILES.split())
    monkeypatch.setattr(compiled, "_flags", lambda: flags)
    if "avx512_bf16" not in flags[: -len(TILES.split())]:  # what is built must run here
        monkeypatch.setattr(compiled, "_MORE", {})
    assert compiled.built()[0] is not None
    assert ["-mamx-tile" in options for options in tried] == [True, False]


@pytest.mark.skipif(not compiled.tiled(), reason="nothing is multiplied in tiles here")
def test_tiles_add_the_products_of_even_and_of_odd_inputs_apart() -> None:
    """As their instruction is defined, where the vectors' own adds pair after pair: so it shows which of them ran."""
    large, found = 2.0**24, {}
    for inputs in (32, 34):  # the second goes into no tile
        x = torch.zeros(2, inputs)
        x[0, :4], x[1, :4] = torch.tensor([1.0, large, 1.0, -large]), torch.tensor([large, 1.0, -large, 1.0])
        found[inputs] = compiled.lay(torch.ones(64, inputs), "pairs").product(x)[:, 0].tolist()
    assert found == {32: [2.0, 2.0], 34: [1.0, 0.0]}


@pytest.mark.parametrize(
    ("has", "capability", "expected"),
    [
        ("avx2 fma f16c avx512f avx512_bf16", "AVX512", ("avx2", "avx512f", "avx512_bf16")),
        ("avx2 fma f16c avx512f avx512_bf16", "AVX2", ("avx2",)),
        ("avx2 fma f16c avx512f avx512_vnni", "AVX512", ("avx2", "avx512f", "avx512_vnni")),
        ("avx2 fma f16c avx512_bf16 avx512_vnni", "AVX512", ("avx2",)),
        (f"avx2 fma f16c avx512f {TILES}", "AVX512", ("avx2", "avx512f", *TILES.split())),
        (f"avx2 fma f16c avx512f {TILES}", "AVX2", ("avx2",)),
        ("avx2 fma f16c avx512f", "DEFAULT", ()),
        ("avx2 fma", "AVX2", ()),
        ("asimd", "DEFAULT", ()),
    ],
)
def test_only_instructions_that_are_there_and_not_held_back_are_used(
    has: str, capability: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "CPU_FLAGS", has)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert compiled._flags() == expected


@pytest.mark.parametrize("right", [True, False])
def test_only_what_is_exact_and_not_slower_is_taken(monkeypatch: pytest.MonkeyPatch, right: bool) -> None:
    times = {"oneDNN": 1.0, "fp32": 0.5, "bf16": 1.05, "fp16": 1.15, "pairs": 2.0, "torch": 1.0, "ours": 0.9}
    monkeypatch.setattr(cpu, "_least", lambda calls, rounds: {name: times[name] for name in calls})
    if not right:
        product, attention = Laid.product, compiled.attention
        monkeypatch.setattr(Laid, "product", lambda self, x: product(self, x) + (self.kind == "fp32"))
        monkeypatch.setattr(compiled, "attention", lambda *given: attention(*given) * 1.001)
    found = cpu._compiled(cpu.has_bf16(), torch.Generator().manual_seed(0))
    assert found == (("fp32", "bf16", "attention", "rows") if right else ("bf16", "rows"))


@pytest.mark.skipif("pairs" not in compiled.kinds(), reason="no products of bf16 pairs here")
def test_a_learner_s_logits_are_the_rollout_s_of_equal_states() -> None:
    table = replace(cpu.products(), compiled=compiled.parts())
    x, weight = drawn("bf16", 7, 96).bfloat16(), drawn("fp32", 192, 96, seed=1)
    copies = NativeKernels(BF16, table=table, copies=True)
    copy = copies.copied(weight, "lm_head")
    assert isinstance(copy, torch.Tensor)
    with torch.no_grad():
        expected = copies.logits(x, copies.laid(copy, "lm_head"))
    learner, master = NativeKernels(BF16, table=table), weight.clone().requires_grad_()
    logits = learner.logits(x, master)
    assert logits.dtype is torch.float32
    assert torch.equal(logits, expected)
    logits.sum().backward()
    assert master.grad is not None
    torch.testing.assert_close(master.grad, x.float().sum(0).expand(192, 96), atol=0.1, rtol=1e-2)
