"""Every kernel compiles for Hopper and Ampere, uses their tensor cores, and is one compilation for any number of rows.

No GPU is needed for this, only Triton, not in its interpreted mode.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from mantissa.kernels.exact.gpu import ExactGpuKernels
from mantissa.precision import BF16, FP16, FP32, Fp8Policy, NumberFormat
from triton_compiled import compiled, recorded
from triton_interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles: run without TRITON_INTERPRET")
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # bytes a block may have
Work = Callable[[ExactGpuKernels, int], Any]


def tensor(kernels: ExactGpuKernels, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=kernels.dtype)


def angles(rows: int) -> torch.Tensor:
    return torch.zeros(1, rows, 128)


def seen(kernels: ExactGpuKernels, rows: int, cap: float = 0.0, sinks: bool = False) -> torch.Tensor:
    from mantissa.kernels.triton.attention import masked_attention

    mask, sink = torch.ones(2, 1, rows, rows, dtype=torch.bool), torch.zeros(8) if sinks else None
    q, k, v = tensor(kernels, 2, 8, rows, 128), tensor(kernels, 2, 2, rows, 128), tensor(kernels, 2, 2, rows, 128)
    return masked_attention(q, k, v, mask, torch.zeros(2, dtype=torch.int32), 0.1, cap, sink)


def sums(kernels: ExactGpuKernels, rows: int) -> torch.Tensor:
    from mantissa.kernels.triton.rows import row_sums

    return row_sums(tensor(kernels, rows, 1000))


OPERATIONS: dict[str, Work] = {
    "seen": seen,
    "seen, with sinks": lambda f, n: seen(f, n, sinks=True),
    "seen, capped": lambda f, n: seen(f, n, cap=50.0),
    "sums": sums,
    "linear": lambda f, n: f.linear(tensor(f, n, 1024), torch.zeros(512, 1024), torch.zeros(512)),
    "linear, wide": lambda f, n: f.linear(tensor(f, n, 1024), torch.zeros(4096, 1024)),
    "linear, ragged": lambda f, n: f.linear(tensor(f, n, 1000), torch.zeros(500, 1000)),
    "linear, many rows": lambda f, n: f.linear(tensor(f, 128 * 128, 1024), torch.zeros(512, 1024)),
    "logits": lambda f, n: f.logits(tensor(f, n, 1024), torch.zeros(8192, 1024)),
    "rms_norm": lambda f, n: f.rms_norm(tensor(f, n, 1024), torch.zeros(1024), 1e-6),
    "swiglu": lambda f, n: f.swiglu(tensor(f, n, 1536), tensor(f, n, 1536)),
    "rotate": lambda f, n: f.rotate(tensor(f, 1, n, 8, 128).transpose(1, 2), angles(n), angles(n)),
    "causal": lambda f, n: f.causal_attention(
        tensor(f, 2, 8, n, 128), tensor(f, 2, 2, n, 128), tensor(f, 2, 2, n, 128)
    ),
    "causal, head of 80": lambda f, n: f.causal_attention(*(tensor(f, 1, 6, n, 80) for _ in range(3))),
    "cached": lambda f, n: f.cached_attention(
        tensor(f, n, 8, 64), tensor(f, n, 2, 96, 64), tensor(f, n, 2, 96, 64), torch.full((n,), 90)
    ),
    "cached, long": lambda f, n: f.cached_attention(
        tensor(f, 4, 8, 128), tensor(f, 4, 2, 1100, 128), tensor(f, 4, 2, 1100, 128), torch.full((4,), 1090)
    ),
}
# Whose parts a second kernel joins, in halves; in fp32, of smaller tiles, 96 rows of the wide ones fill a GPU.
APART = ("linear", "linear, wide", "linear, ragged", "logits", "cached, long")


def bare_arithmetic(ptx: str) -> list[str]:
    """Sums and products without a rounding mode, which the assembler may fuse into one operation."""
    return re.findall(r"\b(?:mul|add|sub)\.(?:ftz\.)?f32\b", ptx)


def spilled(kernel: Any) -> int:
    """Bytes of a thread's stack: registers that the assembler had no room for."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.findall(r"STACK:(\d+)", said.stdout)[0])


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_compile(name: str, fmt: NumberFormat, capability: int) -> None:
    kernel, *joins = compiled(lambda: OPERATIONS[name](ExactGpuKernels(fmt), 96), capability)
    expected = name in APART and not (fmt is FP32 and name in ("linear, wide", "logits"))
    assert [join.metadata.name for join in joins] == ["_join"] * expected
    most = 256 if name.startswith("seen") else 32  # a mask, its places and a window's bounds take registers too
    assert all(spilled(each) <= most for each in (kernel, *joins))
    assert not any(bare_arithmetic(join.asm["ptx"]) for join in joins)
    assert kernel.metadata.shared <= SHARED_MEMORY[capability]
    assert len(kernel.asm["cubin"]) > 1000
    ptx = kernel.asm["ptx"]
    assert not bare_arithmetic(ptx)
    if name.startswith(("linear", "logits", "causal", "cached", "seen")):
        assert ("wgmma" in ptx) == (fmt is not FP32 and capability == 90)
        assert ("mma.sync" in ptx) == (fmt is not FP32 and capability == 80)
        assert "tf32" not in ptx  # fp32 is true fp32
    else:
        assert "fma.rn.f32" not in ptx or name == "swiglu"  # whose exponential asks for one


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_the_log_prob_compiles(capability: int) -> None:
    from mantissa.kernels.triton.rows import token_logprob

    def work() -> Any:
        return token_logprob(torch.zeros(6, 151_669), torch.zeros(6, dtype=torch.int64))

    (kernel,) = compiled(work, capability)
    assert not bare_arithmetic(kernel.asm["ptx"])


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("backward", ["e4m3", "e5m2"])
def test_fp8_compiles_for_hopper(backward: Any, power_of_two: bool) -> None:
    """Forward and backward: two quantisations and a product; then three quantisations and two products."""
    from mantissa.kernels.triton.products import Fp8Linear

    fp8 = Fp8Policy(backward=backward, scale="power_of_two" if power_of_two else "fp32")
    x = torch.zeros(300, 1024, dtype=torch.bfloat16, requires_grad=True)
    master = torch.zeros(4096, 1024, requires_grad=True)

    def work() -> None:
        out = Fp8Linear.apply(x, master, None, None, fp8)
        torch.autograd.grad(out, (x, master), torch.zeros_like(out))

    kernels = compiled(work, 90)
    names = [kernel.metadata.name for kernel in kernels]
    assert sorted(names) == ["_quantize"] * 5 + ["_scaled_product"] * 3
    for kernel in kernels:
        ptx = kernel.asm["ptx"]
        assert not bare_arithmetic(ptx)
        assert kernel.metadata.shared <= SHARED_MEMORY[90]
        if kernel.metadata.name == "_scaled_product":
            assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e[45]m[23]\.e4m3", ptx)
        else:
            assert "div.rn.f32" in ptx  # the division is IEEE's
            assert "div.rn.ftz" not in ptx
            assert re.search(r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f32", ptx)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_number_of_rows_chooses_nothing(name: str) -> None:
    """Types, constants, alignments, warps and stages of a launch are the same for 1 to 131 rows."""
    family = ExactGpuKernels(BF16)
    with recorded() as launches:
        for rows in (1, 2, 16, 96, 127 if name in APART else 131):  # two tiles of rows may fill a GPU
            OPERATIONS[name](family, rows)
    assert len(launches) == (10 if name in APART else 5)
    launches = [launch for launch in launches if launch[0] != "_join"]  # element by element: no compilation can differ
    if name == "rotate":  # strides may be specialised on: it has no sum (test below)
        launches = [(kernel, options[-1]) for kernel, options in launches]
    assert all(launch == launches[0] for launch in launches[1:])


def test_an_unaligned_view_is_launched_as_any_other() -> None:
    """Rows 1.. of a bf16 matrix with 100 features start at 200 bytes, no multiple of 16; a sum must not see that."""
    family, x = ExactGpuKernels(BF16), torch.zeros(9, 100, dtype=torch.bfloat16)
    assert x[1:].data_ptr() % 16
    with recorded() as launches:
        for given in (x, x[1:], x.t().contiguous().t()):
            family.rms_norm(given, torch.zeros(100), 1e-6)
            family.linear(given, torch.zeros(32, 100))
    assert launches[0] == launches[2] == launches[4]
    assert launches[1] == launches[3] == launches[5]


def test_fp8_launches_do_not_depend_on_rows() -> None:
    from mantissa.kernels.triton.products import Fp8Linear

    weight = torch.zeros(512, 1024)
    with recorded() as launches:
        for rows in (1, 7, 16, 128):
            x = torch.zeros(rows, 1024, dtype=torch.bfloat16)
            Fp8Linear.apply(x, weight, None, torch.zeros(512, dtype=torch.bfloat16), Fp8Policy())
    by_name = [[launch for launch in launches if launch[0] == name] for name in ("_quantize", "_scaled_product")]
    assert [len(found) for found in by_name] == [8, 4]
    per_row = [found for found in by_name[0] if found[1][1]["PER_ROW"]]
    assert all(launch == per_row[0] for launch in per_row)
    assert all(launch == by_name[1][0] for launch in by_name[1])
