"""What a CPU's own bf16 would make of fp16 and of fp8 with fp32 scales: the time of a product over that in fp32.

A projection of SmolLM2-135M (576 x 1536), 1 to 2048 rows, by products of bf16 values with fp32 results (``cpu.BF16``):

- ``fp16``: a value of 11 digits is the sum of two of bf16, so a product is four of them, each exact. Taken as one, of
  four times the features, that oneDNN sums.
- ``fp8``: e4m3 codes in blocks of 128 along the features, each block's sum times its two scales, then added.

Both are right (compared with float64 before they are timed); splitting or quantising activations is not timed, nor
that of the weight. Expected, before the first run: no gain, for four products of 0.5 take 2.0, and a pass over the
results for each block costs what the products save.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from runner import Row, Rows, case
from steps import interleaved
from torch import Tensor

from mantissa.kernels import cpu

IN, OUT, BLOCK = 576, 1536, 128


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values of fp16 as two of bf16."""
    high = x.bfloat16().float()
    return high, x - high


def in_halves(x_NE: Tensor, w_FE: Tensor) -> tuple[Callable[[], Tensor], Tensor]:
    (xh, xl), (wh, wl) = halves(x_NE), halves(w_FE)
    operands = torch.cat((xh, xl, xh, xl), 1), torch.cat((wh, wh, wl, wl), 1)
    return functools.partial(cpu.multiply, cpu.BF16, *operands), x_NE.double() @ w_FE.double().t()


def in_blocks(generator: torch.Generator, rows: int) -> tuple[Callable[[], Tensor], Tensor]:
    """Codes of e4m3 and scales: of a row and 128 features, and of 128 by 128 weights."""
    blocks = -(-IN // BLOCK)

    def codes(*shape: int) -> list[Tensor]:
        drawn = torch.randn(shape, generator=generator).mul_(64).to(torch.float8_e4m3fn).float()
        return [part.contiguous() for part in drawn.split(BLOCK, 1)]

    x, w = codes(rows, IN), codes(OUT, IN)
    scale_x = torch.rand(blocks, rows, 1, generator=generator)
    scale_w = torch.rand(blocks, OUT // BLOCK, generator=generator).repeat_interleave(BLOCK, 1)

    def product() -> Tensor:
        total = cpu.multiply(cpu.BF16, x[0], w[0]).mul_(scale_x[0]).mul_(scale_w[0])
        for i in range(1, blocks):
            total.add_(cpu.multiply(cpu.BF16, x[i], w[i]).mul_(scale_x[i]).mul_(scale_w[i]))
        return total

    exact = sum((x[i].double() @ w[i].double().t()) * scale_x[i].double() * scale_w[i].double() for i in range(blocks))
    assert isinstance(exact, Tensor)
    return product, exact


@case(rounds=1, rows=(1, 16))
def native_splits(threads: int = 1, rounds: int = 20, rows: Sequence[int] = (1, 16, 128, 512, 2048)) -> Rows:
    torch.set_grad_enabled(False)
    generator = torch.Generator().manual_seed(0)
    for count in rows:
        x, w = (torch.randn(n, IN, generator=generator).half().float() for n in (count, OUT))
        x_bf16, w_bf16 = x.bfloat16().float(), w.bfloat16().float()
        calls: dict[str, Callable[[], Tensor]] = {
            "fp32 by oneDNN": functools.partial(cpu.multiply, cpu.ONEDNN, x, w),
            "fp32 by torch": functools.partial(cpu.multiply, cpu.TORCH, x, w),
            "bf16, fp32 result": functools.partial(cpu.multiply, cpu.BF16, x_bf16, w_bf16),
        }
        for name, (call, exact) in {"fp16": in_halves(x, w), "fp8": in_blocks(generator, count)}.items():
            torch.testing.assert_close(call().double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))
            calls[name] = call
        taken = interleaved(calls, 0, rounds, time.thread_time)
        least = min(median(taken[name]) for name in ("fp32 by oneDNN", "fp32 by torch"))
        for name in list(calls)[2:]:
            about: Row = {"case": name, "rows_of_product": count, "rounds": rounds}
            yield about | {"metric": "time_over_fp32", "unit": "ratio", "value": median(taken[name]) / least}
