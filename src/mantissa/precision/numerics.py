"""Safe numerics: the few formulas on which everything else stands, each with the naive form it replaces.

Shapes: B sequences, T positions, V vocabulary. Log-probabilities and everything here are fp32 (or float64 in tests).

- ``token_logprob``: ``log(softmax(x))[t]`` underflows to -inf for improbable tokens, and ``x_t - logsumexp(x)`` errs by
  a rounding at the logits' own size (5e-4 for logits of 1e4). ``(x_t - max x) - log(sum exp(x - max x))`` does neither.
- ``entropy``: ``-p log p`` is NaN where a filtered token has p = 0, and its gradient is NaN even where the product is
  replaced afterwards; a clamp of ``log p``, before the product, keeps both finite.
- ``masked_sum``, ``masked_mean``: ``(x * mask).sum()`` turns a masked inf or NaN into NaN; ``where`` does not.
- ``clamped_log_ratio``: ``exp(a - b)`` overflows fp32 at 88.7 and its gradient with it; the clamp at +-20 keeps both.
- ``kl_estimate``: ``r - 1 - log r`` near r = 1 is the small difference of two numbers; it is taken in float64.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

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
