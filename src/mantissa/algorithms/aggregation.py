"""From per-token losses to one number, without the number knowing how the batch was split.

The usual way averages each micro-batch and then the averages, which weighs a token by the company it keeps: the
gradient changes with the micro-batch size and with the ranks. Here the aggregation is a *weight* for each token,
computed once over the whole optimiser batch; a micro-batch's loss is ``sum(loss_BT * scale_BT)`` over its own tokens,
and the sum over micro-batches (gradients accumulate by adding) is the loss of the batch whatever the split.

=======================  ==========================  =====================================================
kind                     scale of token t of seq i   meaning
=======================  ==========================  =====================================================
token_mean               1 / N                       every token counts the same (DAPO)
seq_mean_token_mean      1 / (S * length_i)          every sequence counts the same (GRPO as published)
seq_mean_token_sum_norm  1 / (S * constant)          no preference for short or long answers (Dr. GRPO)
=======================  ==========================  =====================================================

N: valid tokens in the batch. S: sequences with at least one valid token; others are padding rows or were dropped, and
leave numerator and denominator alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.precision import masked_sum

AccumulatorKind = Literal["sum", "mean", "max", "min", "std", "ess"]


@dataclass(frozen=True)
class Accumulator:
    """One metric over part of a batch. ``parts``: float64, one dimension, laid out as the table says.

    It adds up to the same numbers however a batch was split into micro-batches or over ranks.

    A mean of means is not the mean when the parts differ in size, and a loss that ignores the split deserves metrics
    that do too. So a function in this room returns no means. Each metric is an ``Accumulator``: float64 parts that
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
            raise TypeError(f"cannot combine a accumulator of {self.kind} with one of {other.kind}")
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


AggregationKind = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


def aggregation_scale(
    mask_BT: Tensor, kind: AggregationKind, constant: float | None = None, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Weight of each token in the loss, so that the loss is ``sum(where(mask, loss_BT * scale_BT, 0))``.

    ``mask_BT``: bool, the valid tokens of the whole optimiser batch, on whatever rank (slice the result for
    micro-batches). ``constant``: tokens, the length by which ``seq_mean_token_sum_norm`` divides, usually the longest
    response allowed; no other kind takes one. Returns ``scale_BT`` in ``dtype``, 0 where the mask is False.
    Raises ``MantissaError`` where the constant is missing, superfluous or not positive.
    """
    sequences = mask_BT.any(-1).sum().clamp(min=1).double()
    if kind == "seq_mean_token_sum_norm":
        if constant is None or not 0 < constant < float("inf"):
            raise MantissaError(
                f"aggregation {kind} divides by a length in tokens: expected a positive constant, got {constant}"
            )
        divisor = sequences * constant
    elif constant is not None:
        raise MantissaError(f"aggregation {kind} takes no constant, got {constant}: leave it out")
    elif kind == "token_mean":
        divisor = mask_BT.sum().clamp(min=1).double()
    else:
        divisor = sequences * mask_BT.sum(-1, keepdim=True).clamp(min=1).double()
    return torch.where(mask_BT, 1 / divisor, 0.0).to(dtype)  # divided in float64, rounded once
