"""Number formats as data.

A binary floating-point format is four facts: how many exponent bits, how many explicit mantissa bits, the largest
finite value, and what happens beyond it. Everything else (spacing, smallest normal, smallest subnormal) follows.

=========  ========  ========  ===========  ==================  ==========================
name       exponent  mantissa  largest      smallest normal     beyond the largest value
=========  ========  ========  ===========  ==================  ==========================
fp32       8         23        3.40e38      2^-126              inf
bf16       8         7         3.39e38      2^-126              inf
fp16       5         10        65504        2^-14               inf
e5m2       5         2         57344        2^-14               inf
e4m3       4         3         448          2^-6                saturates (it has no inf)
=========  ========  ========  ===========  ==================  ==========================

The significand has one implicit bit more than the mantissa column says: 8 bits for bf16, 11 for fp16. ``e4m3`` is the
``e4m3fn`` variant: no infinities, so its top exponent holds values. Here finite and infinite input saturates at 448 and
NaN stays. Torch's cast agrees from 2.13 on; before, on a CPU, it made NaN of anything above 464.

Sources: IEEE 754-2019 (binary16, binary32); OCP 8-bit floating point specification 1.0 (e4m3, e5m2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mantissa.errors import MantissaError, nearest


@dataclass(frozen=True)
class NumberFormat:
    """One binary floating-point format.

    ``smallest_normal`` is 2^(1-bias), ``smallest_subnormal`` 2^(1-bias-mantissa_bits), ``epsilon`` the distance from 1
    to the next value, 2^-mantissa_bits. ``overflow`` says what rounding does beyond ``largest``.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    largest: float
    overflow: Literal["inf", "saturate"]
    dtype: torch.dtype

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        return 2.0**-self.mantissa_bits

    @property
    def needs_loss_scaling(self) -> bool:
        """True where gradients of ordinary size fall below the smallest subnormal: fewer than 8 exponent bits."""
        return self.exponent_bits < 8

    def __str__(self) -> str:
        return self.name


FP32 = NumberFormat("fp32", 8, 23, torch.finfo(torch.float32).max, "inf", torch.float32)
BF16 = NumberFormat("bf16", 8, 7, torch.finfo(torch.bfloat16).max, "inf", torch.bfloat16)
FP16 = NumberFormat("fp16", 5, 10, 65504.0, "inf", torch.float16)
E5M2 = NumberFormat("e5m2", 5, 2, 57344.0, "inf", torch.float8_e5m2)
E4M3 = NumberFormat("e4m3", 4, 3, 448.0, "saturate", torch.float8_e4m3fn)

FORMATS: dict[str, NumberFormat] = {f.name: f for f in (FP32, BF16, FP16, E5M2, E4M3)}
ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "e4m3fn": "e4m3"}


def format_named(name: str) -> NumberFormat:
    """Look a format up by name (``fp16``) or by torch's name for it (``float16``); unknown names are a user's error."""
    known = ALIASES.get(name, name)
    if known not in FORMATS:
        hint = nearest(name, [*FORMATS, *ALIASES])
        raise MantissaError(f"unknown number format {name!r}: expected one of {', '.join(FORMATS)}{hint}")
    return FORMATS[known]
