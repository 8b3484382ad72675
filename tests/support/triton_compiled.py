"""Compiling for a GPU what a function would launch on one, on a machine that has none.

``compiled`` runs a function on CPU tensors with Triton's launch replaced: each kernel it would launch is compiled, with
the very types, constants and alignments of that launch, to PTX and machine code. Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def compiled(work: Callable[[], Any], capability: int) -> list[Any]:
    """The kernels that ``work`` launches, compiled for compute capability ``capability`` (90 for 9.0)."""
    found: list[Any] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        found.append(_compile(kernel, dict(zip(kernel.arg_names, args, strict=False)) | given, capability))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.JITFunction, "run", run)
        work()
    return found


def specialization(kernel: Any, arguments: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Types, constants and alignments by which Triton chooses a compilation of ``kernel``: equal ones share it."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value, name = arguments[parameter.name], parameter.name
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or one:
            signature[name], constants[name] = "constexpr", value
            continue
        pointer = isinstance(value, torch.Tensor)
        if pointer:
            signature[name] = "*" + _NAMES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        number = value.data_ptr() if pointer else value
        if not isinstance(number, float) and number % 16 == 0 and not parameter.do_not_specialize:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


@contextmanager
def recorded() -> Iterator[list[tuple[str, Any]]]:
    """Within it nothing is launched; what would be is listed, as (kernel's name, its specialization)."""
    launches: list[tuple[str, Any]] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | given
        options = {name: given[name] for name in _OPTIONS if name in given}
        launches.append((kernel.__name__, (*specialization(kernel, arguments), options)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.JITFunction, "run", run)
        yield launches


def _compile(kernel: Any, arguments: dict[str, Any], capability: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, *specialization(kernel, arguments))
    options = {name: arguments[name] for name in _OPTIONS if name in arguments}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
