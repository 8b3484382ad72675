"""Running Triton kernels without a GPU: its interpreter, with the casts of a GPU, and compiling for one.

The interpreter executes a kernel program by program with numpy. That shows that masks, places and the order of blocks
are right; it cannot show what a tensor core does. As it comes (3.6), it cuts bf16 and fp8 off in place of rounding
them, multiplies the *bit patterns* of bf16, rounds twice in a fused multiply-add, and asks of numpy a conversion that
numpy 2.4 refuses. ``repair`` gives it casts that round as the GPU's do, and sums in float64 that are rounded once.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

# On a GPU these tests are among those marked gpu; interpreted they run anywhere.
needs_a_device = pytest.mark.skipif(False, reason="") if INTERPRETED else pytest.mark.gpu


def repair() -> None:
    """Give the interpreter a GPU's casts to and from bf16 and fp8, and products of their values."""
    from triton.runtime import interpreter

    torch_dtypes = {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8e4nv": torch.float8_e4m3fn,
        "fp8e5": torch.float8_e5m2,
    }
    storage = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        given, wanted = torch_dtypes[source.name], torch_dtypes[target.name]
        bits = torch.from_numpy(np.ascontiguousarray(data).view(f"int{8 * given.itemsize}").copy())
        wide = bits.view(storage[given.itemsize]).view(given).float()
        if target.name == "fp8e4nv":
            wide = wide.clamp(-448, 448)  # the GPU's cast saturates
        out = wide.to(wanted).view(storage[wanted.itemsize]).numpy()
        return out.view(f"uint{8 * wanted.itemsize}").reshape(data.shape)

    def wide_values(operand: Any) -> Any:
        if operand.dtype.scalar.name in ("fp16", "fp32"):
            return operand.data.astype(np.float64)
        return convert(operand.data, operand.dtype.scalar, triton.language.float32, None).view(np.float32).astype(float)

    def dot(self: Any, a: Any, b: Any, total: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        # A row's fp32 sum may depend on its place in numpy's own tiles; a float64 one, rounded, does not.
        product = np.matmul(wide_values(a), wide_values(b)).astype(np.float32)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    def fma(self: Any, a: Any, b: Any, c: Any) -> Any:
        once = a.data.astype(float) * b.data + c.data  # the product of two fp32 values is exact in float64
        return interpreter.TensorHandle(once.astype(np.float32), c.dtype.scalar)

    execute = interpreter.GridExecutor.__call__

    def quiet(self: Any, *args: Any, **given: Any) -> Any:
        with np.errstate(all="ignore"):  # a GPU does not warn of inf - inf
            return execute(self, *args, **given)

    interpreter.GridExecutor.__call__ = quiet
    patch_tensor = interpreter._patch_lang_tensor

    def patched_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # a bound of ``range``

    interpreter._patch_lang_tensor = patched_tensor
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.InterpreterBuilder.create_fma = fma


if INTERPRETED:
    from mantissa.kernels import native

    repair()
    native._by_triton = lambda x: True  # fp8 as on a GPU, of tensors that are on a CPU
