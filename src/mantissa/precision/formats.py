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

The dial. ``e8m2`` to ``e8m10`` and ``e5m2`` to ``e5m10`` are formats of so many exponent and mantissa bits, IEEE 754's
in all else. e8m7 has bf16's values, e5m10 fp16's; the others exist on no device, and turn digits or range alone.

Sources: IEEE 754-2019 (binary16, binary32); OCP 8-bit floating point specification 1.0 (e4m3, e5m2).

Rounding is to nearest, ties to even, with gradual underflow, as the hardware does, and stays in the tensor's own dtype:
low precision on a CPU is *simulated*, a tensor stays fp32 in memory, but holds only values that the format can.

Safe numerics: the few formulas on which everything else stands, each with the naive form it replaces. There B are
sequences, T positions, V the vocabulary; all is fp32 (float64 in tests).

- ``token_logprob``: ``log(softmax(x))[t]`` underflows to -inf for improbable tokens, and ``x_t - logsumexp(x)`` errs by
  a rounding at the logits' own size (5e-4 for logits of 1e4). ``(x_t - max x) - log(sum exp(x - max x))`` does neither.
- ``entropy``: ``-p log p`` is NaN where a filtered token has p = 0, and its gradient is NaN even where the product is
  replaced afterwards; a clamp of ``log p``, before the product, keeps both finite.
- ``masked_sum``, ``masked_mean``: ``(x * mask).sum()`` turns a masked inf or NaN into NaN; ``where`` does not.
- ``Accumulator``: the mean of micro-batches' means is not the batch's; sums and counts, added up, are.
- ``clamped_log_ratio``: ``exp(a - b)`` overflows fp32 at 88.7 and its gradient with it; the clamp at +-20 keeps both.
- ``kl_estimate``: ``r - 1 - log r`` near r = 1 is the small difference of two numbers; it is taken in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mantissa.base.errors import MantissaError, nearest


@dataclass(frozen=True)
class NumberFormat:
    """One binary floating-point format.

    ``dtype``: torch's for the format; fp32, which holds its values, for one of the dial that torch has no dtype for.
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

    @functools.cached_property  # asked for at every rounding
    def has_dtype(self) -> bool:
        """Whether ``dtype`` is the format itself, and a cast to it the rounding."""
        return torch.finfo(self.dtype).bits == 1 + self.exponent_bits + self.mantissa_bits

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
# By name; e5m2 is the one that is a format of hardware too. Of e bits and m: (2 - 2^-m) * 2^(2^(e - 1) - 1) is largest.
DIAL: dict[str, NumberFormat] = {
    name: FORMATS.get(name, NumberFormat(name, e, m, (2 - 2.0**-m) * 2.0 ** (2 ** (e - 1) - 1), "inf", torch.float32))
    for e in (8, 5)
    for m in range(2, 11)
    for name in (f"e{e}m{m}",)
}
ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "e4m3fn": "e4m3"}


def format_named(name: str) -> NumberFormat:
    """Look a format up by name (``fp16``) or by torch's name for it (``float16``); unknown names are a user's error.

    The dial's formats are not among them: nothing is stored in one.
    """
    known = ALIASES.get(name, name)
    if known not in FORMATS:
        hint = nearest(name, [*FORMATS, *ALIASES])
        raise MantissaError(f"unknown number format {name!r}: expected one of {', '.join(FORMATS)}{hint}")
    return FORMATS[known]


def round_to_format(x: Tensor, fmt: NumberFormat) -> Tensor:
    """Return ``x`` rounded to the nearest value of ``fmt`` (ties to even), in the dtype of ``x``.

    Beyond ``fmt.largest`` the result is inf or saturates, as ``fmt.overflow`` says; NaN stays NaN. The result must be a
    value of the dtype of ``x`` too: fp16 input rounded to bf16 becomes inf from 65408 on, for fp16 has no 65536.
    A new tensor, except where rounding is the identity (``fmt`` is fp32 and ``x`` is no wider), which returns ``x``.
    Differentiable, except from float64: the gradient is rounded too, by the casts' own backward.

    For fp32 a cast to the format's dtype and back, at 0.07-0.25 ms per million elements. ``round_by_arithmetic`` is the
    reference, which never casts, and serves where a cast would be wrong: torch casts float64 to a half or to fp8
    through float32, which rounds twice (1 + 2^-11 + 2^-40 must round up to 1 + 2^-10 in fp16, but passes through the
    tie 1 + 2^-11 and ends at 1).

    What a cast to e4m3 does beyond 448 depends on the torch version (NaN on a CPU before 2.13, 448 from then on), so
    the saturation is ours: a clamp before the cast.
    """
    if fmt.mantissa_bits >= 23 and x.dtype != torch.float64:
        return x
    if x.dtype == torch.float64:
        return round_by_arithmetic(x, fmt)
    if not fmt.has_dtype:
        rounded: Tensor = _Dialled.apply(x, fmt)
        return rounded
    # x.dtype is fp32 or narrower: one exact widening or none, then one rounding in the cast.
    return _cast(x, fmt).to(x.dtype)


def round_to_format_(x: Tensor, fmt: NumberFormat) -> Tensor:
    """``round_to_format`` in place, for a tensor that the caller owns; returns ``x``.

    A large ``x`` is cast part by part, each back while the cache holds it: 0.6 to 0.9 of the time.
    """
    if fmt.mantissa_bits >= 23 and x.dtype != torch.float64:
        return x
    if x.dtype == torch.float64:
        return x.copy_(round_by_arithmetic(x, fmt))
    if fmt.has_dtype:
        whole = x.numel() < 8 * _PART or x.requires_grad or not x.is_contiguous()
        for part in (x,) if whole else x.view(-1).split(2 * _PART):
            part.copy_(_cast(part, fmt))
        return x
    return _dialled_(x, fmt) if x.dtype == torch.float32 and not x.requires_grad else x.copy_(round_to_format(x, fmt))


def _cast(x: Tensor, fmt: NumberFormat) -> Tensor:
    if fmt.overflow == "saturate":
        x = x.clamp(-fmt.largest, fmt.largest)  # keeps NaN; what lies between 448 and 464 would round to 448 anyway
    return x.to(fmt.dtype)


class _Dialled(torch.autograd.Function):
    """``round_to_format`` to a format of the dial, the gradient rounded as casts would round it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: NumberFormat) -> Tensor:
        ctx.fmt = fmt
        wide = x.clone() if x.dtype == torch.float32 else x.float()  # exact
        return _dialled_(wide, fmt).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return round_to_format(grads[0], ctx.fmt), None


_PART = 1 << 16  # values rounded at a time: 256 KiB and a scratch of the same size; of a cast two


def _dialled_(x: Tensor, fmt: NumberFormat) -> Tensor:
    """Round ``x``, fp32 and without gradient, to ``fmt`` in place.

    A format of the dial has no dtype to cast to. With 8 exponent bits its values are fp32's that end in zeros: half a
    unit less one bit, and the last bit that stays, are added to fp32's bits as an integer, and what lies below is cut.
    The carry makes the next binade, at the top inf, and subnormals need nothing of their own. With 5 exponent bits
    adding and subtracting 1.5 * 2^(e + 23 - mantissa bits) rounds in fp32's own addition, e not below the smallest
    normal's, and what then exceeds the range becomes inf by a factor of 2^112. The first costs 2 to 3 times a cast,
    the second 5, part by part so that each part stays in the cache.
    """
    part = _by_bits_ if fmt.exponent_bits == FP32.exponent_bits else _by_addition_
    for each in x.view(-1).split(_PART) if x.numel() > _PART and x.is_contiguous() else (x,):
        part(each, fmt)
    return x


def _by_bits_(x: Tensor, fmt: NumberFormat) -> None:
    """Formats with fp32's exponent. A NaN's digits are replaced first: the carry could make a number of it."""
    cut = FP32.mantissa_bits - fmt.mantissa_bits
    shift, last, below_half, kept = (_int32(n, x.device) for n in (cut, 1, (1 << cut - 1) - 1, -(1 << cut)))
    bits = torch.nan_to_num_(x, math.nan, math.inf, -math.inf).view(torch.int32)
    bits.add_((bits >> shift).bitwise_and_(last).add_(below_half)).bitwise_and_(kept)


def _by_addition_(x: Tensor, fmt: NumberFormat) -> None:
    """Formats with fewer exponent bits. The sum lies in a binade whose spacing is the grid's; it may only lose a -0."""
    scale, above = 1.5 * 2.0 ** (FP32.mantissa_bits - fmt.mantissa_bits), 2.0 ** (FP32.bias - fmt.bias)
    bits = x.view(torch.int32) & _int32(0x7F800000, x.device)
    power = bits.clamp_(1 + FP32.bias - fmt.bias << 23, 2 + FP32.bias + fmt.bias << 23).view(torch.float32)
    rounded = torch.add(x, power, alpha=scale).sub_(power, alpha=scale).mul_(above).mul_(1 / above)
    torch.copysign(rounded, x, out=x)


@functools.cache
def _int32(value: int, device: torch.device) -> Tensor:
    """A number as a tensor: made anew for each call, one costs as much as an operation on a few thousand values."""
    return torch.tensor(value, dtype=torch.int32, device=device)


def round_by_arithmetic(x: Tensor, fmt: NumberFormat) -> Tensor:
    """The reference: round onto the grid of ``fmt`` with float64 arithmetic only, in the dtype of ``x``.

    For |x| in [2^e, 2^(e+1)) the grid's spacing is s = 2^(max(e, 1-bias) - mantissa_bits), and the result is
    s * round_half_even(x / s). Both the division and the product are by powers of two, hence exact. A result beyond
    the largest value becomes inf or saturates.
    """
    wide = x.to(torch.float64)  # exact: float64 holds every value of the narrower formats
    _, exponent = torch.frexp(wide)  # |x| = m * 2^exponent with m in [0.5, 1), so e = exponent - 1
    spacing_exponent = (exponent - 1).clamp(min=1 - fmt.bias) - fmt.mantissa_bits
    spacing = torch.ldexp(torch.ones_like(wide), spacing_exponent)
    rounded = torch.round(wide / spacing) * spacing  # torch.round is half to even and keeps the sign of zero
    rounded = torch.where(wide.isfinite(), rounded, wide)  # frexp gives inf and NaN no defined exponent
    beyond = torch.full_like(wide, fmt.largest if fmt.overflow == "saturate" else float("inf"))
    rounded = torch.where(rounded.abs() > fmt.largest, torch.copysign(beyond, wide), rounded)
    return rounded.to(x.dtype)  # exact: x's dtype holds the grid's values, or inf beyond its own largest


def round_stochastically(x: Tensor, random: Tensor) -> Tensor:
    """Round fp32 to one of the two neighbours in bf16 so that the mean is ``x``: up where ``random`` carries.

    The 16 low bits of |x| are its remainder in 2^-16 of a spacing. ``random``, int32 and uniform in 0 to 65535, is
    added to them before they are cut: P(away from zero) = remainder / 65536, so E = x exactly. A value of bf16 is never
    changed, nor inf or NaN. Beyond bf16's largest value the upper neighbour is inf. Shape and dtype of ``x``.
    """
    rounded = (x.view(torch.int32) + random).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)  # a NaN's digits could carry into the sign


def is_on_grid(x: Tensor, fmt: NumberFormat) -> Tensor:
    """True where a value is one that ``fmt`` can represent (NaN counts as representable). Shape of ``x``, bool."""
    return (round_to_format(x, fmt) == x) | x.isnan()


LOG_RATIO_BOUND = 20.0
KLEstimator = Literal["k1", "k2", "k3"]


def token_logprob(logits_BTV: Tensor, tokens_BT: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token under softmax(logits / temperature): ``y_t - max y - log sum exp(y - max y)``.

    With y = x / temperature. A logit of -inf has probability 0 and log-probability -inf; all -inf or a +inf gives NaN.

    ``logits_BTV``: fp32 or float64, any leading shape, last dimension V. ``tokens_BT``: int64, the leading shape.
    Returns the leading shape in the logits' dtype. Both the rollout engine and the learner call this function: that is
    what makes their numbers mean the same thing.
    """
    if logits_BTV.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"token_logprob needs fp32 or float64 logits, not {logits_BTV.dtype}: cast on a line of its own"
        )
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}: a greedy choice has no density")
    scaled = logits_BTV if temperature == 1.0 else logits_BTV / temperature
    return torch.log_softmax(scaled, dim=-1).gather(-1, tokens_BT.unsqueeze(-1)).squeeze(-1)


def entropy(logits_BTV: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): ``-sum p log p``, with 0 log 0 = 0. Leading shape."""
    logp = torch.log_softmax(logits_BTV if temperature == 1.0 else logits_BTV / temperature, dim=-1)
    p = logp.exp()
    finite_logp = logp.clamp(min=torch.finfo(logp.dtype).min)  # before the product: its gradient is 0 * -inf too
    return -(p * finite_logp).sum(-1)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of ``x`` where ``mask`` (bool) holds; masked entries may be anything, inf and NaN included."""
    kept = torch.where(mask, x, torch.zeros_like(x))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of ``x`` where ``mask`` (bool) holds; 0 where it holds nowhere."""
    count = (mask.sum() if dim is None else mask.sum(dim)).clamp(min=1)
    return masked_sum(x, mask, dim) / count


def clamped_log_ratio(logp: Tensor, other_logp: Tensor) -> Tensor:
    """``logp - other_logp`` clamped to +-20, so that its exponential is finite (4.9e8) and so is its gradient."""
    return (logp - other_logp).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def kl_estimate(log_ratio: Tensor, kind: KLEstimator) -> Tensor:
    """Per-token estimate of KL(p || q) from samples of p, with log r = log q - log p = ``log_ratio``.

    k1 = -log r (unbiased, signed); k2 = (log r)^2 / 2 (biased, low variance); k3 = r - 1 - log r (unbiased, never
    negative). Source: J. Schulman, "Approximating KL Divergence" (2020).
    """
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    # Its value is about (log r)^2 / 2. In fp32 exp - 1 loses every digit of that below |log r| = 1e-4, and expm1 below
    # 1e-7, after falling to one digit at 1e-6, where fp16 runs live. One number a token: float64 costs nothing.
    wide = log_ratio.double()
    return (torch.expm1(wide) - wide).to(log_ratio.dtype)


AccumulatorKind = Literal["sum", "mean", "max", "min", "std", "ess"]


@dataclass(frozen=True)
class Accumulator:
    """One metric over part of a batch. ``parts``: float64, one dimension, laid out as the table says.

    It adds up to the same numbers however a batch was split into micro-batches or over ranks.

    A mean of means is not the mean when the parts differ in size, and a loss that ignores the split deserves metrics
    that do too. So losses and corrections return no means. Each metric is an ``Accumulator``: float64 parts that
    combine by one operation, and a value that is computed once, at the end.

    =======  ==========================  =========  =========================================
    kind     parts                       combine    value
    =======  ==========================  =========  =========================================
    sum      sum x                       add        sum x
    mean     sum x, n                    add        sum x / n
    max      max x                       maximum    max x
    min      min x                       minimum    min x
    std      sum d, sum d^2, n; d=x-1    add        sqrt(mean d^2 - (mean d)^2)
    ess      sum x, sum x^2, n           add        (mean x)^2 / mean x^2
    =======  ==========================  =========  =========================================

    The last two are for importance weights. The moments of ``std`` are taken about 1, where weights live: with weights
    1 +- 1e-9 those about 0 lose the variance (1e-18) in float64, and those about 1 keep all of it; the error is 1e-8
    of the distance from 1. ``ess`` is a ratio, and weights may all be 2e-9 at once: its moments are about 0, and
    nothing cancels. With nothing counted every value is 0, ``ess`` included: an empty batch has no effective sample,
    and no value is NaN.

    Use: ``values(merge([metrics_of_first_micro_batch, ...]))``, over ranks likewise.
    """

    kind: AccumulatorKind
    parts: Tensor

    @staticmethod
    def of(kind: AccumulatorKind, x: Tensor, mask: Tensor | None = None) -> Accumulator:
        """Of ``x`` where ``mask`` (bool, its shape; None: everywhere) holds. Detached; the rest may be anything."""
        mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
        x = x.detach().double()  # exact; sums of many fp32 numbers would otherwise depend on their order
        if kind in ("max", "min"):
            worst = -torch.inf if kind == "max" else torch.inf
            kept = torch.cat([torch.where(mask, x, worst).flatten(), x.new_full((1,), worst)])
            return Accumulator(kind, (kept.max() if kind == "max" else kept.min()).reshape(1))
        if kind == "sum":
            return Accumulator(kind, masked_sum(x, mask).reshape(1))
        count = mask.sum().double()
        if kind == "mean":
            return Accumulator(kind, torch.stack([masked_sum(x, mask), count]))
        d = x - 1 if kind == "std" else x
        return Accumulator(kind, torch.stack([masked_sum(d, mask), masked_sum(d.square(), mask), count]))

    def __add__(self, other: Accumulator) -> Accumulator:
        if self.kind != other.kind:
            raise TypeError(f"cannot combine an accumulator of {self.kind} with one of {other.kind}")
        combine = {"max": torch.maximum, "min": torch.minimum}.get(self.kind, torch.add)
        return Accumulator(self.kind, combine(self.parts, other.parts))

    def value(self) -> Tensor:
        """The metric, a zero-dimensional float64 tensor; 0 where nothing was counted."""
        if self.kind == "sum":
            return self.parts[0]
        if self.kind in ("max", "min"):
            nothing = -torch.inf if self.kind == "max" else torch.inf
            return torch.where(self.parts[0] == nothing, 0.0, self.parts[0])
        count = self.parts[-1].clamp(min=1)
        mean = self.parts[0] / count
        if self.kind == "mean":
            return mean
        mean_square = self.parts[1] / count
        if self.kind == "std":
            return (mean_square - mean.square()).clamp(min=0).sqrt()
        return mean.square() / torch.where(mean_square > 0, mean_square, 1.0)  # all zero: 0 / 1


def merge(rows: Iterable[Mapping[str, Accumulator]]) -> dict[str, Accumulator]:
    """Combine the metrics of several micro-batches, name by name. Every row must have the same names."""
    merged: dict[str, Accumulator] = {}
    for row in rows:
        if merged and row.keys() != merged.keys():
            raise KeyError(f"metrics that do not match: {sorted(row.keys() ^ merged.keys())}")
        merged = {name: merged[name] + metric if merged else metric for name, metric in row.items()}
    return merged


def values(metrics: Mapping[str, Accumulator]) -> dict[str, Tensor]:
    """The value of each metric, zero-dimensional float64."""
    return {name: metric.value() for name, metric in metrics.items()}
