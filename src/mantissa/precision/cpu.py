"""What this CPU multiplies itself: whether products of bf16 are its own, or rounded and widened by hand.

Processors with AMX (Intel's servers from Sapphire Rapids on) or AVX512-BF16 (AMD from Zen 4 on, Intel's Cooper Lake)
multiply bf16 values exactly and add in fp32; on others the same call widens its operands and is no faster than fp32.
What a library makes of a processor cannot be read from its name: instructions may be held back
(``ONEDNN_MAX_CPU_ISA``). So one product is timed in both formats, once in a process; the formats' probe then proves
the products that a run uses (``kernels/probe.py``).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_ROWS, _IN, _OUT = 256, 576, 1536  # a small model's projection: 0.45 GFLOP, milliseconds
_ROUNDS = 7
# Of fp32's time: what is slower than this is not the processor's own. Seen: 0.5 where it is, 1 and more elsewhere.
_GAIN = 0.8


@dataclass(frozen=True)
class CpuProducts:
    """``ratio``: seconds of a bf16 product over those of the same one in fp32, one thread's least of some rounds."""

    ratio: float

    @property
    def own(self) -> bool:
        """Whether the processor multiplies bf16 itself."""
        return self.ratio <= _GAIN

    def __str__(self) -> str:
        return f"bf16 products take {self.ratio:.2f} of fp32's time ({_ROWS} x {_IN} x {_OUT})"


@functools.cache
def bf16_products() -> CpuProducts:
    """What was ``measured``, once in a process."""
    return measured()


def measured() -> CpuProducts:
    """Time one product in bf16 and in fp32, in turn: some 50 ms.

    The ratio is inf without oneDNN, or where it has no such product for this processor (held to AVX2, say).
    """
    if not torch.backends.mkldnn.is_available():
        return CpuProducts(float("inf"))
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(_ROWS, _IN, generator=generator), torch.randn(_OUT, _IN, generator=generator)
    halves = x.bfloat16(), w.bfloat16()
    with torch.no_grad():
        calls = [functools.partial(_product, *pair) for pair in ((x, w), halves)]
        try:
            calls[1]()
        except RuntimeError:  # oneDNN's "could not create a primitive"
            return CpuProducts(float("inf"))
        least = [float("inf")] * 2
        for _ in range(_ROUNDS):
            least = [min(seconds, _seconds(call)) for seconds, call in zip(least, calls, strict=True)]
    return CpuProducts(least[1] / least[0])


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    return out


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
