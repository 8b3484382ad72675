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

from typing import Literal

import torch
from torch import Tensor

from mantissa.errors import MantissaError

AggregationKind = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


def batch_counts(mask_BT: Tensor) -> Tensor:
    """``[N, S]``, int64: valid tokens, and sequences with at least one. Adds up over ranks and micro-batches."""
    return torch.stack([mask_BT.sum(), mask_BT.any(-1).sum()])


def aggregation_scale(
    mask_BT: Tensor,
    kind: AggregationKind,
    constant: float | None = None,
    *,
    counts: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight of each token in the loss, so that the loss is ``sum(where(mask, loss_BT * scale_BT, 0))``.

    ``mask_BT``: bool, the valid tokens of the whole optimiser batch (slice the result for micro-batches). ``constant``:
    tokens, the length by which ``seq_mean_token_sum_norm`` divides, usually the longest response allowed; no other kind
    takes one. ``counts``: ``batch_counts`` summed over all ranks, where ``mask_BT`` is one rank's share; that share's
    gradients are then to be summed over ranks, not averaged. Returns ``scale_BT`` in ``dtype``, 0 where the mask is
    False. Raises ``MantissaError`` where the constant is missing, superfluous or not positive.
    """
    if kind == "seq_mean_token_sum_norm":
        if constant is None or not 0 < constant < float("inf"):
            raise MantissaError(
                f"aggregation {kind} divides by a length in tokens: expected a positive constant, got {constant}"
            )
    elif constant is not None:
        raise MantissaError(f"aggregation {kind} takes no constant, got {constant}: leave it out")
    tokens, sequences = (batch_counts(mask_BT) if counts is None else counts).clamp(min=1).double()
    if kind == "token_mean":
        divisor = tokens.expand(mask_BT.shape)
    elif kind == "seq_mean_token_mean":
        divisor = (sequences * mask_BT.sum(-1, keepdim=True).clamp(min=1).double()).expand(mask_BT.shape)
    else:
        divisor = (sequences * constant).expand(mask_BT.shape)
    return torch.where(mask_BT, 1 / divisor, 0.0).to(dtype)  # divided in float64, rounded once
