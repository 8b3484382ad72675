"""The Triton kernels behind native fp8 and exact on CUDA: what they share.

Imported only where a kernel is really launched: a CPU install has no triton.

Why the same row always gets the same bits. A Triton kernel is compiled once for each combination of what it
specialises on: dtypes, constants, whether a pointer and an integer are multiples of 16, whether an integer is 1.
Another compilation may lay a reduction out over other threads, which is another order of its sum. So

1. whatever counts rows or positions is marked ``do_not_specialize``;
2. every tensor is contiguous and starts at a multiple of 16 bytes (``aligned``);
3. tile sizes depend on the dtype and the weight's shape alone;
4. multiplications and additions are not fused behind our back (``enable_fp_fusion=False``): a loop's peeled first
   iteration might be fused where its body is not.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 128  # that fill a GPU, about: its multiprocessors
LAUNCH: dict[str, Any] = {"enable_fp_fusion": False}


def aligned(x: Tensor) -> Tensor:
    """``x`` contiguous and at a multiple of 16 bytes, copied only where it is not."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def ceil_div(n: int, by: int) -> int:
    """n / by, rounded up."""
    return -(-n // by)


def power_of_two_above(n: int, least: int) -> int:
    """The smallest power of two that is at least ``n`` and ``least`` (itself one)."""
    return max(least, 1 << (n - 1).bit_length())


@triton.jit
def exp(x: tl.tensor) -> tl.tensor:
    """e^x in fp32, to about 2 ulp, for x from -200 to 100 (beyond it is 0 or inf anyway).

    The hardware gives 2^t to 2^-22; t = x log2(e) alone would lose digits as x grows. What rounding t left out, and
    what log2(e) has below fp32, is r < 2^-17, so 2^(t + r) = 2^t (1 + r ln 2) to a part in 2^34.
    """
    log2e: tl.constexpr = 1.44269502162933349609375  # log2(e) in fp32
    below: tl.constexpr = 1.92596299112661746e-8  # log2(e) less that
    t = x * log2e
    rest = tl.fma(x, log2e, -t) + x * below
    return tl.exp2(t) * (1.0 + rest * 0.693147182464599609375)
