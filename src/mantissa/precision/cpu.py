"""What this CPU multiplies itself: whether products of bf16 and int8 are its own, or rounded and widened by hand.

Processors with AMX (Intel's servers from Sapphire Rapids on) or AVX512-BF16 (AMD from Zen 4 on, Intel's Cooper Lake)
multiply bf16 values exactly and add in fp32; on others the same call widens its operands and is no faster than fp32.
VNNI (AVX512-VNNI, AVX-VNNI, AMX) multiplies int8 and adds in int32, exactly.
What a library makes of a processor cannot be read from its name: instructions may be held back
(``ONEDNN_MAX_CPU_ISA``). So one product is timed in each, once in a process; the formats' probe then proves
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
    """Seconds of a product over those of the same one in fp32, each the least of some rounds: ``ratio`` bf16's,
    ``int8_ratio`` int8's; inf where a library has no such product, or one that is not exact."""

    ratio: float
    int8_ratio: float = float("inf")

    @property
    def own(self) -> frozenset[str]:
        """The formats that the processor multiplies itself, faster than fp32: of ``bf16``, ``int8``."""
        ratios = {"bf16": self.ratio, "int8": self.int8_ratio}
        return frozenset(name for name, ratio in ratios.items() if ratio <= _GAIN)

    def __str__(self) -> str:
        each = ", ".join(f"{name} {ratio:.2f}" for name, ratio in (("bf16", self.ratio), ("int8", self.int8_ratio)))
        return f"time of a product over fp32's ({_ROWS} x {_IN} x {_OUT}): {each}"


@functools.cache
def products() -> CpuProducts:
    """What was ``measured``, once in a process."""
    return measured()


def measured() -> CpuProducts:
    """Time one product in fp32, bf16 and int8, in turn: some 50 ms.

    A ratio is inf without oneDNN, or where it has no such product for this processor (held to AVX2, say), and int8's
    where a sum of products is wrong: before VNNI a processor adds pairs of them in 16 bits, and cuts off.
    """
    if not torch.backends.mkldnn.is_available():
        return CpuProducts(float("inf"))
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(_ROWS, _IN, generator=generator), torch.randn(_OUT, _IN, generator=generator)
    codes = [torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator) for shape in (x.shape, w.shape)]
    calls: dict[str, Callable[[], object]] = {"fp32": functools.partial(_product, x, w)}
    with torch.no_grad():
        if _runs(bf16 := functools.partial(_product, x.bfloat16(), w.bfloat16())):
            calls["bf16"] = bf16
        if _exact_integers(*codes):
            calls["int8"] = functools.partial(_integer_product, *codes)
        least = dict.fromkeys(calls, float("inf"))
        for _ in range(_ROUNDS):
            least |= {name: min(least[name], _seconds(call)) for name, call in calls.items()}
            # Without such instructions an int8 product is a loop that takes a hundred times as long: tried once.
            calls = {name: call for name, call in calls.items() if least[name] <= 3 * least["fp32"]}
    ratios = {name: seconds / least["fp32"] for name, seconds in least.items()}
    return CpuProducts(ratios.get("bf16", float("inf")), ratios.get("int8", float("inf")))


def _runs(call: Callable[[], object]) -> bool:
    try:
        call()
    except RuntimeError:  # oneDNN's "could not create a primitive"
        return False
    return True


def _exact_integers(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether int8 products are added without loss: of random codes, and where all are the largest there are."""
    x[0], w[0], x[1], w[1] = -128, -128, 127, 127
    some = w[:64]  # an exact sum of these in float64: 576 * 2^14 is far below 2^53
    return torch.equal(_integer_product(x, some).double(), x.double() @ some.double().t())


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    return out


def _integer_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch._int_mm(x, w.t())


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
